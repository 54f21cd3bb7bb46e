"""A table that is the same on all ranks, and as long as some partition or parameter: never cut, never refused untruly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.model import Setup
from tests.distributed.optimizer_expectations import Exact, configured

SAVED = [Setup(stage, optimizer=f"map_of_{numel}") for stage, numel in ((0, 211), (1, 318), (3, 319))]
BY_NAME, BY_SIZE = {"my_map": "replicated"}, {"numel<=512": "replicated"}
#: By the number of ranks that load.
STAGES = {1: (0, 2), 2: (0, 1, 3), 3: (1, 3)}


def saves(setup: Setup) -> list[Save]:
    """The native checkpoint of two ranks, and its conversion but for ZeRO-0, which does not save names of states."""
    native = Save(setup, 2, "optimizer_jobs.save")
    converted = Save(setup, 1, "optimizer_jobs.convert", {"options": {"states": BY_NAME}}, source=native)
    return [native, converted] if setup.stage else [native]


def into(setup: Setup, stage: int, states: dict[str, str], ranks: int) -> list[Cell]:
    """Both, into another stage, with options about ``states``."""
    live, note = configured(replace(setup, stage=stage), states=states), next(iter(states))
    return [crossing(save, live, ranks, "optimizer_jobs.load", Exact(), f"{note} {save.job}") for save in saves(setup)]


@cells(
    [
        cell
        for ranks, stages in STAGES.items()
        for setup in SAVED
        for stage in stages
        for states in (BY_NAME, BY_SIZE)
        for cell in into(setup, stage, states, ranks)
    ]
)
def test_a_table_is_whole_on_every_rank_though_a_partition_is_as_long(cell: Cell, facts: list[Any]) -> None:
    """By its name, and by its size."""
    cell.expected.check(facts)

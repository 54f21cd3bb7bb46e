"""Checkpoints of every kind with changed files: each load is refused in words on every rank, or exact."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import Cell, Save
from tests.distributed.cells import cells as table
from tests.distributed.expert_jobs import Experts
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel
from tests.distributed.pretrained_folders import MODELS

ANOTHER_RUN = {"first": 50}
PIPELINE = Parallel("pipeline", "uniform", pp=2, stage=1)
#: Changes of each kind and number of ranks in a run of all tests, and of a night.
COUNT, COUNT_OF_COMMANDS, COUNT_OF_NIGHT = 12, 8, 400


def beside(copy: Path, other: Path) -> None:
    """The other save where the job looks for it."""
    shutil.copytree(other, copy.with_name(f"{copy.name}-other"), copy_function=os.link)


def of_engine(setup: Setup, converted: bool = False) -> tuple[Save, Save]:
    return Save(setup, converted=converted), Save(setup, more=ANOTHER_RUN, converted=converted)


def pretrained(name: str, stage: int) -> tuple[tuple[Save], dict[str, Any]]:
    case = {"into": "pretrained", "model": MODELS[name].loaded, "setup": Setup(stage)}
    return (Save(name, 1, "pretrained_folders.save"),), case


def dcp(setup: Setup) -> tuple[tuple[Save], dict[str, Any]]:
    return (Save("plain", 2, "dcp_jobs.save_fsdp"),), {"setup": setup, "model": "UntiedLM"}


FP32 = Setup(3, config=(("gradient_clipping", 0.0),))
#: By name the saves, the one that is changed first, and the case.
KINDS: dict[str, tuple[tuple[Save, ...], dict[str, Any]]] = {
    "universal to ZeRO-3": (of_engine(Setup(1), converted=True), {"setup": Setup(3), "universal": True}),
    "universal of ZeRO-3 to ZeRO-1": (of_engine(Setup(3), converted=True), {"setup": Setup(1), "universal": True}),
    "dcp to ZeRO-3": dcp(FP32),
    "dcp to ZeRO-0": dcp(Setup(0, config=FP32.config)),
    "ZeRO-3": (of_engine(Setup(3)), {"setup": Setup(3)}),
    "ZeRO-3, bf16": (of_engine(Setup(3, "bf16")), {"setup": Setup(3, "bf16")}),
    "ZeRO-0 to ZeRO-3": (of_engine(Setup(0)), {"setup": Setup(3)}),
    "ZeRO-1 to ZeRO-3": (of_engine(Setup(1)), {"setup": Setup(3)}),
    "ZeRO-2, bf16": (of_engine(Setup(2, "bf16")), {"setup": Setup(2, "bf16")}),
    "ZeRO-3, weights alone": (
        of_engine(Setup(3)),
        {"setup": Setup(1), "arguments": {"load_module_only": True}},
    ),
    "safetensors": pretrained("llama", 3),
    "one of safetensors": pretrained("gpt2", 1),
    "archives": pretrained(next(name for name in MODELS if MODELS[name].how == "archives"), 3),
}
#: Those whose ranks are given.
OF_RANKS: dict[str, tuple[int, tuple[Save, ...], dict[str, Any]]] = {
    "pipeline to one stage": (
        1,
        (Save(PIPELINE, 2, "parallel_jobs.save_each"),),
        {"into": "parallel", "setup": Parallel("pipeline", "uniform", stage=1)},
    ),
    "pipeline": (2, (Save(PIPELINE, 2, "parallel_jobs.save_each"),), {"into": "parallel", "setup": PIPELINE}),
    "experts": (
        2,
        (Save(Experts(2, 1, 2, "fp32"), 2, "expert_jobs.save_each"),),
        {"into": "experts", "setup": Experts(2, 2, 1, "fp32")},
    ),
}


def cells_of(count: int, seed: int, seconds: float) -> list[Cell]:
    """A cell for each kind and number of ranks."""
    found = [(f"{name} on {ranks}", ranks, *KINDS[name]) for name in KINDS for ranks in (1, 2)]
    found += [(name, *OF_RANKS[name]) for name in OF_RANKS]
    cells = []
    for name, ranks, (save, *others), case in found:
        drawn = {**case, "seed": seed, "count": count}
        change = beside if others else None
        job = "malformed_load_jobs.load_each"
        cells.append(Cell(name, save, job, ranks, drawn, change=change, others=tuple(others), seconds=seconds))
    return cells


def check(facts: list[Any]) -> None:
    """Hold against what the ranks found."""
    for found in facts:
        assert found.problems == []
        assert found.refused


@table(cells_of(COUNT, seed=9, seconds=300))
def test_a_changed_file_is_refused_or_changes_nothing(cell: Cell, facts: list[Any]) -> None:
    check(facts)


def tool_cells_of(count: int, seed: int, seconds: float) -> list[Cell]:
    """A cell for each kind of save, for the commands."""
    cells = {}
    for cell in (each for each in cells_of(count, seed, seconds) if each.save != KINDS["archives"][0][0]):
        case = {"seed": seed, "count": count}
        cells[cell.save.key] = replace(cell, job="malformed_tool_jobs.judge_each", ranks=1, case=case)
    return [*cells.values()]


@table(tool_cells_of(COUNT_OF_COMMANDS, seed=5, seconds=300))
def test_a_changed_file_is_refused_by_commands_or_changes_nothing(cell: Cell, facts: list[Any]) -> None:
    check(facts)


LAYER = "step4/layer_02-model_states.pt"
#: Of a file that one rank of a pipeline reads. DeepSpeed's own loader would fail there, and leave the other one waiting.
OF_ONE_STAGE = [(LAYER, ("up.bias",), "nested"), (LAYER, (), "nested"), (LAYER, ("norm.weight",), "nested")]


@table(
    [
        replace(cell, name=f"{cell.name}, a layer", case={**cell.case, "changes": OF_ONE_STAGE})
        for cell in cells_of(0, 0, 100)
        if cell.name == "pipeline"
    ]
)
def test_what_one_stage_alone_reads_is_refused_by_both(cell: Cell, facts: list[Any]) -> None:
    check(facts)


WITHOUT_ZERO_PIPELINE = Save(Parallel("pipeline", "uniform", pp=2, stage=0), 2, "parallel_jobs.save_each")


def without_first_layer(copy: Path) -> None:
    (copy / "step4/layer_00-model_states.pt").unlink()


def under_another_name(copy: Path) -> None:
    (copy / "step4/layer_00-model_states.pt").rename(copy / "step4/layer_0000-model_states.pt")
    os.remove(copy / "step4/layer_03-model_states.pt")


@table(
    [
        Cell(
            change.__name__,
            WITHOUT_ZERO_PIPELINE,
            "parallel_jobs.refuse",
            2,
            {"setup": WITHOUT_ZERO_PIPELINE.setup},
            change,
            seconds=60,
        )
        for change in (without_first_layer, under_another_name)
    ]
)
def test_a_layer_without_file_is_refused_by_all_stages(cell: Cell, facts: list[Any]) -> None:
    """DeepSpeed's own loader would fail on the stage that has it, and leave the others waiting."""
    for refused in facts:
        assert len(refused.texts) == 1 and refused.kinds and refused.changed == set(), refused.texts


MODEL = "step4/mp_rank_00_model_states.pt"
#: Of a save without ZeRO: a parameter whose states no group lists, and a weight whose tied replica is whole.
WITHOUT_ZERO = [
    (MODEL, ("optimizer", "param_groups", 0, "params", 1), "a huge count"),
    (MODEL, ("module", "embedding.weight"), "[]"),
]


OF_ZERO_0, ANOTHER = of_engine(Setup(0))
NO_MEMBER = Cell(
    "ZeRO-0 to ZeRO-3",
    OF_ZERO_0,
    "malformed_load_jobs.load_each",
    1,
    {"setup": Setup(3), "changes": WITHOUT_ZERO},
    change=beside,
    others=(ANOTHER,),
    seconds=100,
)


@table([NO_MEMBER])
def test_what_numbers_its_states_is_refused_by_loads_and_verify(cell: Cell, facts: list[Any]) -> None:
    check(facts)
    assert [found.refused for found in facts] == [len(WITHOUT_ZERO)]


ONE_RANK = [
    Cell(name, save, "malformed_tool_jobs.on_one_rank", 2)
    for name, save in (("ZeRO-3", Save(Setup(3))), ("universal", Save(Setup(1), converted=True)))
]


@table(ONE_RANK)
def test_one_rank_of_a_job_may_open_a_checkpoint_alone(cell: Cell, facts: list[bool]) -> None:
    assert facts == [True]


@pytest.mark.nightly
@table(tool_cells_of(COUNT_OF_NIGHT, seed=6, seconds=3000))
def test_no_change_of_many_breaks_a_command(cell: Cell, facts: list[Any]) -> None:
    check(facts)


@pytest.mark.nightly
@table(cells_of(COUNT_OF_NIGHT, seed=4, seconds=3000))
def test_no_change_of_many_breaks_a_load(cell: Cell, facts: list[Any]) -> None:
    check(facts)

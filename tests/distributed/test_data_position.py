"""A registered sampler goes on with the next sample on any number of ranks, in the midst of an epoch."""

# Covers elastic_ckpt/load/data_position.py, which the hook calls.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from elastic_ckpt.data import ElasticSampler
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.data_jobs import LENGTH, OWN

#: Ranks, micro-batch, micro-batches in a step, micro-batches until the save: 12 samples, 24, and on into other epochs.
JOBS = [(2, 3, 1, 2), (3, 2, 2, 4), (1, 4, 1, 18)]


def going_on(name: str, jobs: Sequence[tuple[int, int, int, int]], **kind: Any) -> Cell:
    """What each of these jobs has found, which go on from one another."""
    save: Save | None = None
    for ranks, micro, steps, micro_batches in jobs:
        sizes = {"micro": micro, "steps": steps, "micro_batches": micro_batches}
        save = Save(name, ranks, "data_jobs.run", {**kind, **sizes}, source=save)
    return Cell(name, save, "noted", 1, kind)


SAMPLERS = [
    going_on("ZeRO-1", JOBS, kind="sampler", stage=1, workers=2, registers_late=False),
    going_on("ZeRO-3", JOBS, kind="sampler", stage=3, workers=0, registers_late=True),
]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def whole(epochs: int) -> list[int]:
    sampler = ElasticSampler(LENGTH, seed=5)
    return [number for epoch in range(epochs) for number in sampler.order(epoch).tolist()]


@cells(SAMPLERS)
def test_samples_go_on_over_2_3_and_1_ranks(cell: Cell, facts: list[Any]) -> None:
    first, second, third = facts
    assert [each.consumed for each in (first, second, third)] == [12, 36, 104]
    # the epoch of 50 ends with a batch of two
    assert flat(first.order + second.order + third.order) == whole(3)[:104]
    assert [first.client, second.client, third.client] == [None, {"epoch": 3}, {"epoch": 3}]


@cells(SAMPLERS)
def test_the_report_says_where_the_data_goes_on(cell: Cell, facts: list[Any]) -> None:
    _, second, third = facts
    assert second.report is not None and third.report is not None
    assert second.report.samples_consumed == 12 and second.report.batches_to_skip == 2
    assert third.report.samples_consumed == 36 and third.report.batches_to_skip == 9
    is_late = cell.case["registers_late"]
    expected = "to skip: 9 batches of each rank's loader" if is_late else "the registered sampler continues there"
    assert f"36 samples consumed; {expected}" in " ".join(str(third.report).replace("│", " ").split())


@cells([going_on("ZeRO-1", JOBS, kind="stream", stage=1, workers=2, registers_late=False)])
def test_documents_go_on_where_packs_of_them_ended(cell: Cell, facts: list[Any]) -> None:
    samples = chain.from_iterable(each.order for each in facts)
    assert flat(samples) == [3 * (place // 2) + 2 * (place % 2) for place in range(12 + 24 + 72)]
    assert [(each.consumed, each.documents) for each in facts] == [(12, 18), (36, 54), (108, 162)]


@cells([going_on("2 stages, then 1", JOBS[::2], kind="pipeline", stage=1, workers=0, registers_late=True)])
def test_a_pipelines_samples_go_on_with_fewer_stages(cell: Cell, facts: list[Any]) -> None:
    first, last = facts
    assert (first.consumed, last.consumed) == (6, 78)
    assert flat(first.order + last.order) == whole(2)[:78]


def by_own_loader(mode: str, seed: int, alone: bool = False) -> Cell:
    """A load of a position of seed 5 that DeepSpeed's own loader does."""
    name = f"{mode}, seed {seed}{', weights alone' * alone}"
    save = Save(OWN, 2, "data_jobs.save_for_own_loader")
    return Cell(name, save, "data_jobs.by_own_loader", 2, {"mode": mode, "seed": seed, "alone": alone})


@cells([by_own_loader(mode, 5) for mode in ("auto", "off")])
def test_deepspeeds_own_loader_takes_the_position_back(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert (found.error, found.report, found.client) == ("", None, {"epoch": 3})
        assert found.is_saved and found.consumed == 14


@cells([by_own_loader("auto", 6, alone=True)])
def test_weights_alone_leave_the_position_as_it_is(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert (found.error, found.report, found.consumed) == ("", None, 0)
        assert found.is_saved


SAME = by_own_loader("auto", 5)
OTHER_DATA = "the data position belongs to other data"


@cells([replace(by_own_loader("auto", 6), fits=(SAME.save, SAME.case))])
def test_other_data_are_refused_before_deepspeeds_own_loader_begins(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.error.startswith(f"MismatchError: {OTHER_DATA} or another order: seed")
        assert found.is_untouched and found.consumed == 0


@cells([by_own_loader("off", 6)])
def test_other_data_are_told_after_a_load_that_elastic_ckpt_was_not_to_look_at(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.error.startswith(f"PartialLoadError: {OTHER_DATA}")
        assert found.is_saved and found.consumed == 0

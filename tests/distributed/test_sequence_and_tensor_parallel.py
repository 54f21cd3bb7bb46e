"""Sequence and tensor parallelism together, by an ``mpu`` of one's own: any degrees to any others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.sequence_and_tensor_jobs import Topology

pytestmark = pytest.mark.nightly


def saved(ranks: int, *topology: Any) -> Save:
    return Save(Topology(*topology), ranks, "sequence_and_tensor_jobs.save_each")


FOUR_RANKS = [saved(4, 2, 2, 1), saved(4, 2, 2, 3, False), saved(4, 1, 2, 3)]
TWO_RANKS = [saved(2, 1, 1, 3), saved(2, 2, 1, 1, False)]
#: By number of ranks.
TARGETS = {
    4: [Topology(2, 2, 1), Topology(2, 2, 3), Topology(1, 2, 3)],
    2: [Topology(1, 1, 3), Topology(2, 1, 1), Topology(1, 2, 1)],
}


def resumed(save: Save, ranks: int, topology: Topology) -> Cell:
    name = f"{save.setup.name}-n{save.ranks} to {topology.name}-n{ranks}"
    case = {"topology": topology}
    return Cell(name, save, "sequence_and_tensor_jobs.resume", ranks, case, expected=Resumes("native", 1e-5))


def saver_of(rank: int, cell: Cell, is_known: bool) -> int:
    """The rank that saved what belongs to this one; ``is_known``: whether its sequence-parallel degree is."""
    source, live = cell.save.setup, cell.case["topology"]
    rest, tp_rank = divmod(rank, live.tp)
    if source.tp != live.tp:
        return 0
    data = cell.save.ranks // (source.tp * (source.sp if is_known else 1))
    if source.stage < 3 or data != cell.ranks // (live.tp * live.sp):
        return tp_rank  # a model-parallel rank has one file, or none is this rank's
    data_rank, sp_rank = divmod(rest, live.sp)
    return (data_rank * source.sp + (sp_rank if source.sp == live.sp else 0)) * source.tp + tp_rank


@cells(
    [
        resumed(save, ranks, topology)
        for ranks, topologies in TARGETS.items()
        for topology in topologies
        for save in FOUR_RANKS + TWO_RANKS
    ]
)
def test_every_source_loads_at_any_sequence_and_tensor_parallel_degree(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    source, live = cell.save.setup, cell.case["topology"]
    at_the_same = (source.tp, source.sp, cell.save.ranks) == (live.tp, live.sp, cell.ranks)
    is_known = source.states_batch or at_the_same
    for rank, load in enumerate(facts):
        at = load.report.live
        assert (at.tp, at.sequence.degree, at.partition_degree) == (live.tp, live.sp, cell.ranks // live.tp), load.where
        if is_known:
            assert load.report.source.sequence.degree == source.sp, load.where
            assert not any("batch" in note for note in load.report.notes), load.report.notes
        assert load.client_state["rng"] == saver_of(rank, cell, is_known), load.where


@cells(
    [
        Cell(save.setup.name, save, "sequence_and_tensor_jobs.same_as_deepspeed", 4, {"topology": save.setup})
        for save in FOUR_RANKS
    ]
)
def test_what_loads_without_elastic_loading_loads_with_it(cell: Cell, facts: list[Any]) -> None:
    assert len(facts) == cell.ranks
    for found in facts:
        assert found.differences == {}
        assert found.client_states[0] == found.client_states[1]
        assert found.losses[0] == found.losses[1]

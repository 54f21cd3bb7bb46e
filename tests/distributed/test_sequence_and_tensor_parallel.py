"""Sequence and tensor parallelism together, by an ``mpu`` of one's own: any degrees to any others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.sequence_and_tensor_jobs import Case

pytestmark = pytest.mark.nightly

#: By number of ranks.
SAVED = {4: [Case(2, 2, 1), Case(2, 2, 3, False), Case(1, 2, 3)], 2: [Case(1, 1, 3), Case(2, 1, 1, False)]}


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of :data:`SAVED`."""
    folder = tmp_path_factory.mktemp("sequence_and_tensor")
    for world, cases in SAVED.items():
        launch(world, "sequence_and_tensor_jobs.save", {"folder": str(folder), "cases": cases})
    return folder


def saver_of(rank: int, world: int, loaded: tuple[Case, int, Case], is_known: bool) -> int:
    """The rank that saved what belongs to this one; ``is_known``: whether its sequence-parallel degree is."""
    source, ranks, case = loaded
    rest, tp_rank = divmod(rank, case.tp)
    if source.tp != case.tp:
        return 0
    data = ranks // (source.tp * (source.sp if is_known else 1))
    if source.stage < 3 or data != world // (case.tp * case.sp):
        return tp_rank  # a model-parallel rank has one file, or none is this rank's
    data_rank, sp_rank = divmod(rest, case.sp)
    return (data_rank * source.sp + (sp_rank if source.sp == case.sp else 0)) * source.tp + tp_rank


@pytest.mark.parametrize(
    ("world", "cases"),
    [(4, [Case(2, 2, 1), Case(2, 2, 3), Case(1, 2, 3)]), (2, [Case(1, 1, 3), Case(2, 1, 1), Case(1, 2, 1)])],
    ids=["4 ranks", "2 ranks"],
)
def test_every_source_loads_at_any_sequence_and_tensor_parallel_degree(
    world: int, cases: list[Case], saved: Path, launch: Launch
) -> None:
    sources = [(case, ranks) for ranks, kept in SAVED.items() for case in kept]
    loads = launch(world, "sequence_and_tensor_jobs.load", {"folder": str(saved), "cases": cases, "sources": sources})
    for number, load in enumerate(loads):
        (source, ranks, case), report = load.case, load.report
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap < 1e-5, load.where
        at = report.live
        assert (at.tp, at.sequence.degree, at.partition_degree) == (case.tp, case.sp, world // case.tp), load.where
        is_known = source.states_batch or (source.tp, source.sp, ranks) == (case.tp, case.sp, world)
        if is_known:
            assert report.source.sequence.degree == source.sp, load.where
            assert not any("batch" in note for note in report.notes), report.notes
        rank = number // (len(loads) // world)
        assert load.client_state["rng"] == saver_of(rank, world, load.case, is_known), load.where


def test_what_loads_without_elastic_loading_loads_with_it(saved: Path, launch: Launch) -> None:
    arguments = {"folder": str(saved), "cases": SAVED[4]}
    for found in launch(4, "sequence_and_tensor_jobs.same_as_deepspeed", arguments):
        assert found.differences == {}
        assert found.client_states[0] == found.client_states[1]
        assert found.losses[0] == found.losses[1]

"""Whose counters, scheduler and client state a rank gets, with all ranks played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.played import PlayedJob, in_turn
from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.formats.assembling import Assembled, RankFiles
from elastic_ckpt.formats.base import Fitted
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.native import _own_state
from elastic_ckpt.load.metadata import fit_together, owner_of
from elastic_ckpt.storage import Entry, seen_through
from elastic_ckpt.storage.view import FolderView, NodeListing

#: Tensor-parallel, pipeline-parallel and data-parallel degree.
Degrees = tuple[int, int, int]


@pytest.mark.parametrize(
    ("saved", "files", "live", "states", "rounds"),
    [
        # ZeRO-3: a file for each replica
        ((1, 1, 2), 2, (1, 1, 2), [(0, 0), (0, 1)], 0),
        ((1, 1, 2), 2, (1, 1, 3), [(0, 0)] * 3, 0),
        ((1, 1, 4), 4, (1, 1, 1), [(0, 0)], 0),
        ((1, 1, 4), 4, (1, 1, 2), [(0, 0)] * 2, 0),
        # ZeRO-1: one
        ((1, 1, 2), 1, (1, 1, 2), [(0, 0)] * 2, 0),
        # the same model-parallel ranks, each with a state of its own
        ((2, 1, 1), 1, (2, 1, 1), [(0, 0), (1, 0)], 0),
        ((2, 1, 1), 1, (2, 1, 2), [(0, 0), (1, 0)] * 2, 1),
        ((2, 1, 2), 2, (2, 1, 2), [(0, 0), (1, 0), (0, 1), (1, 1)], 1),
        ((1, 2, 1), 1, (1, 2, 2), [(0, 0), (0, 0), (1, 0), (1, 0)], 1),
        # others
        ((2, 1, 1), 1, (1, 1, 2), [(0, 0)] * 2, 0),
        ((2, 1, 1), 1, (1, 2, 2), [(0, 0)] * 4, 0),
        ((2, 1, 2), 2, (1, 2, 1), [(0, 0)] * 2, 0),
    ],
)
def test_each_rank_gets_the_state_that_is_its_own(
    saved: Degrees, files: int, live: Degrees, states: list[Any], rounds: int
) -> None:
    tp, pp, dp = saved
    kinds = [(mp, number, "model") for mp in range(tp * pp) for number in range(files)]
    ranks: dict[int, RankFiles] = {}
    for position, (mp, _, _) in enumerate(kinds):
        model: Any = SimpleNamespace(counters={"dp_world_size": dp}, optimizer=None, path=str(position))
        ranks.setdefault(mp, RankFiles()).models.append(model)
    grid = Grid(tuple(tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)), dp)
    nothing: Any = None
    assembled = Assembled(ranks, grid, nothing)

    def read_state(position: int) -> Any:
        assert position % distributed.world_size() == distributed.rank()
        return kinds[position][:2]

    def fit() -> Fitted:
        """In DeepSpeed's order: stages, replicas, tensor-parallel ranks."""
        tp, pp, dp = live
        stage, rest = divmod(distributed.rank(), dp * tp)
        own, for_all = _own_state(assembled, RankCoordinates(dp, rest // tp, tp, rest % tp, pp, stage))
        return Fitted(assembled.metadata, "", None, int(own.path), for_all, read_state)

    job = PlayedJob(live[0] * live[1] * live[2])
    assert [state for _, state in job.run_all(lambda: fit_together(fit, in_turn(len(kinds))))] == states
    assert len(job.rounds) == 1 + rounds


def test_a_file_is_opened_by_a_rank_that_sees_it() -> None:
    """On two nodes of two ranks; what no node has, or has in two versions, its owner will find."""
    entries = {"shared": (1, 1), "there": (None, 1), "versions": (1, 2)}
    listings = []
    for node in range(2):
        of_node = [(name, sizes[node]) for name, sizes in entries.items()]
        files = tuple(Entry(name, nbytes, 0) for name, nbytes in of_node if nbytes is not None)
        listings.append(NodeListing(f"node{node}", ("/run",), (files,)))
    job = PlayedJob(4)

    def owners(name: str) -> list[int]:
        view = FolderView("/run", listings, distributed.rank() // 2, [[0, 1], [2, 3]], distributed.rank())
        with seen_through(view):
            return [owner_of(position, f"/run/{name}") for position in range(5)]

    assert job.run_all(lambda: owners("there")) == [[2, 3, 2, 3, 2]] * 4
    for name in ("shared", "versions", "missing"):
        assert job.run_all(lambda name=name: owners(name)) == [[0, 1, 2, 3, 0]] * 4

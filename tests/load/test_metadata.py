"""Whose counters, scheduler and client state a rank gets, with all ranks played."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.formats.assembling import Assembled, RankFiles
from elastic_ckpt.formats.base import Fitted
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.native import _own_state
from elastic_ckpt.load import metadata
from elastic_ckpt.load.exchange import opener_of
from elastic_ckpt.load.metadata import SharedState, Wanted

#: Tensor-parallel, pipeline-parallel and data-parallel degree.
Degrees = tuple[int, int, int]


class Waits(Exception):
    """A rank has told what it has to tell, and waits for the others."""


class Job:
    """All ranks of a job, one after the other.

    Args:
        saved: degrees of the save.
        files: model-states files of each of its model-parallel ranks.
        live: degrees of the job.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, saved: Degrees, files: int, live: Degrees) -> None:
        tp, pp, dp = saved
        self.kinds = [(mp, number, "model") for mp in range(tp * pp) for number in range(files)]
        model: Any = SimpleNamespace(counters={"dp_world_size": dp}, optimizer=None)
        ranks: dict[int, RankFiles] = {}
        for position, (mp, _, _) in enumerate(self.kinds):
            ranks.setdefault(mp, RankFiles()).models[position] = model
        grid = Grid(tuple(tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)), dp)
        nothing: Any = None
        self.files = Assembled(ranks, (), grid, {}, nothing)
        self.live = live
        self.world = live[0] * live[1] * live[2]
        self.me = 0
        self.told: list[dict[int, bytes]] = []
        monkeypatch.setattr(metadata.distributed, "rank", lambda: self.me)
        monkeypatch.setattr(metadata.distributed, "world_size", lambda: self.world)
        monkeypatch.setattr(metadata.distributed, "all_gather", self._all_gather)

    def _all_gather(self, doing: str, work: Any) -> list[dict[int, bytes]]:
        if len(self.told) == self.world:
            return self.told
        self.told.append(work())
        raise Waits

    def states(self) -> list[Any]:
        """The (model-parallel, data-parallel) rank whose state each rank gets."""
        states: list[SharedState] = []
        wanted: list[Wanted] = []
        for _ in self._ranks():
            position, for_all = _own_state(self.files, self._place())
            states.append(SharedState(Fitted(self.files.metadata, "", None, position, for_all, self._read)))
            wanted.append(states[-1].wanted())
        waiting = 0
        for _ in self._ranks():
            try:
                states[self.me].exchanged(wanted)
            except Waits:
                waiting += 1
        assert waiting in (0, self.world), "some ranks wait for others that go on"
        found = []
        for _ in self._ranks():
            found.append(states[self.me].exchanged(wanted))
        return found

    def _read(self, position: int) -> Any:
        assert opener_of(position) == self.me
        return self.kinds[position][:2]

    def _ranks(self) -> Iterator[None]:
        for rank in range(self.world):
            self.me = rank
            yield

    def _place(self) -> RankCoordinates:
        """In DeepSpeed's order: stages, replicas, tensor-parallel ranks."""
        tp, pp, dp = self.live
        stage, rest = divmod(self.me, dp * tp)
        return RankCoordinates(dp, rest // tp, tp, rest % tp, pp, stage)


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
    monkeypatch: pytest.MonkeyPatch, saved: Degrees, files: int, live: Degrees, states: list[Any], rounds: int
) -> None:
    job = Job(monkeypatch, saved, files, live)
    assert job.states() == states
    assert len(job.told) == rounds * job.world

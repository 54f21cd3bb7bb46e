"""Jobs of 32 ranks: what grows with their number shows nowhere else. ``launch/large.sh``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

pytestmark = pytest.mark.nightly

RANKS = 32
SECONDS = 900
#: Tensor parallel 4 by 4 stages by 2 data-parallel ranks; then 4 by 2 by 4.
DEEP = Parallel("3d", "uniform", tp=4, pp=4, stage=1)
FLAT = replace(DEEP, pp=2)
SHARED = ["a"] * RANKS
#: Eight nodes of four ranks.
APART = [letter for letter in "abcdefgh" for _ in range(4)]


def parallel(saved: Parallel, live: Parallel) -> Cell:
    save = Save(saved, RANKS, "parallel_jobs.save_each")
    return Cell(f"{saved.name} to {live.name}", save, "parallel_jobs.resume", RANKS, {"setup": live}, seconds=SECONDS)


def zero(saved: int, live: int, ranks: int, nodes: list[str]) -> Cell:
    """Saved on these nodes, and loaded by the last of their ranks, the other way round."""
    save = Save(Setup(saved), RANKS, "large_jobs.save_on_nodes", {"nodes": nodes})
    case = {"setup": Setup(live), "nodes": nodes[::-1][:ranks]}
    where = f"{len(set(nodes))} nodes"
    name = f"ZeRO-{saved} to {live} on {ranks} ranks of {where}"
    return Cell(name, save, "large_jobs.load_on_nodes", ranks, case, seconds=SECONDS)


ZERO = [zero(3, 3, 24, SHARED), zero(3, 3, 31, SHARED), zero(3, 1, 30, APART), zero(1, 3, 32, APART)]


@cells([*ZERO, parallel(DEEP, FLAT)])
def test_a_job_of_many_ranks_is_resumed_exactly(cell: Cell, facts: list[Loaded]) -> None:
    assert len(facts) == cell.ranks
    for load in facts:
        assert load.differences == {}, load.where

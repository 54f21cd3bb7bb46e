"""Sequence and tensor parallelism together, by an ``mpu`` of one's own: any degrees to any others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import Launch

#: Ranks -> tensor- and sequence-parallel degree, ZeRO stage, whether the config states the whole batch.
SAVED = {4: [(2, 2, 1, True), (2, 2, 3, False), (1, 2, 3, True)], 2: [(1, 1, 3, True), (2, 1, 1, False)]}


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of :data:`SAVED`."""
    folder = tmp_path_factory.mktemp("sequence_and_tensor")
    for world, cases in SAVED.items():
        launch(world, "sequence_and_tensor_jobs.save", {"folder": str(folder), "cases": cases})
    return folder


@pytest.mark.parametrize(
    ("world", "cases"),
    [(4, [(2, 2, 1), (2, 2, 3), (1, 2, 3)]), (2, [(1, 1, 3), (2, 1, 1), (1, 2, 1)])],
    ids=["4 ranks", "2 ranks"],
)
def test_every_source_loads_at_any_sequence_and_tensor_parallel_degree(
    world: int, cases: list[tuple[int, ...]], saved: Path, launch: Launch
) -> None:
    sources = [(case, ranks) for ranks, kept in SAVED.items() for case in kept]
    launch(world, "sequence_and_tensor_jobs.load", {"folder": str(saved), "cases": cases, "sources": sources})


def test_what_loads_without_elastic_loading_loads_with_it(saved: Path, launch: Launch) -> None:
    launch(4, "sequence_and_tensor_jobs.same_as_deepspeed", {"folder": str(saved), "cases": SAVED[4]})

"""Experts that are frozen, have buffers, 8-bit states, or other places than those of their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.expert_exotic_jobs import Exotic

pytestmark = pytest.mark.nightly

ONE_LAYER = r"mixtures\.0\.deepspeed_moe\.experts.*"
BIASES = r".*deepspeed_experts.*bias"
SAVED = [
    Exotic(4, 1, 2),
    Exotic(4, 2, 4, frozen=ONE_LAYER),
    Exotic(2, 0, 2, frozen=BIASES),
    Exotic(2, 1, 1, frozen=BIASES),
    Exotic(4, 2, 2, second=4),
    Exotic(2, 1, 2, second=1),
]
EIGHT_BIT = Exotic(4, 1, 2, "fp32", eight_bit=True)
PLACED = Exotic(4, 3, 2, "bf16", (4, 4), autoep=True, placement=((2, 0), (1, 3)))


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for world in (2, 4):
        runs = [run for run in (*SAVED, EIGHT_BIT, PLACED) if run.world == world]
        launch(world, "expert_exotic_jobs.save", {"folder": str(folder), "runs": runs})
    return folder


@pytest.mark.parametrize(
    "run",
    [
        Exotic(4, 1, 4),
        Exotic(2, 2, 1, frozen=ONE_LAYER),
        Exotic(4, 0, 1, frozen=BIASES),
        Exotic(1, 1, 1, frozen=BIASES),
        Exotic(2, 0, 2),
        Exotic(4, 1, 4, second=2),
    ],
    ids=lambda run: run.name,
)
def test_buffers_and_frozen_experts_come_back_whichever_side_freezes_them(
    run: Exotic, saved: Path, launch: Launch
) -> None:
    # without ZeRO, states are numbered: the same parameters have to train
    sources = [source for source in SAVED if source.stage or source.frozen == run.frozen]
    if run.second:  # whose first layer has a param group of its own, for which DeepSpeed has no getter without states
        sources = [source for source in sources if source.frozen != ONE_LAYER]
    arguments = {"folder": str(saved), "run": run, "sources": sources}
    for load in launch(run.world, "expert_exotic_jobs.load", arguments):
        assert load.different == set() and load.drift == {} and load.compared, load.where


@pytest.mark.parametrize(
    ("run", "exact"),
    [(Exotic(4, 1, 4, "fp32", eight_bit=True), True), (Exotic(2, 2, 2, "fp32", eight_bit=True), False)],
)
def test_eight_bit_states_of_experts_keep_their_bytes_while_their_blocks_stay_whole(
    run: Exotic, exact: bool, saved: Path, launch: Launch
) -> None:
    """Experts are whole blocks of each partition; dense parameters are not, and change partitions with the ranks."""
    for load in launch(
        run.world, "expert_exotic_jobs.load", {"folder": str(saved), "run": run, "sources": [EIGHT_BIT]}
    ):
        assert load.different == set() and load.compared > 50, load.where
        assert not [name for name, _ in load.drift if "deepspeed_experts" in name], load.drift
        assert bool(load.drift) is not exact
        bounds = {"state1": 0.9 / 128, "state2": 0.9 / 256}
        assert all(drift <= bounds[key] * load.largest[key] for (_, key), drift in load.drift.items()), load.drift


@pytest.mark.parametrize(
    "run",
    [
        Exotic(2, 3, 1, "bf16", (4, 4), autoep=True),
        Exotic(4, 1, 4, "bf16", (4, 4), autoep=True),
        Exotic(4, 3, 2, "bf16", (4, 4), autoep=True, placement=((3, 1), (0, 2))),
    ],
    ids=lambda run: run.name,
)
def test_experts_of_autoep_load_wherever_their_placement_puts_them(run: Exotic, saved: Path, launch: Launch) -> None:
    for load in launch(run.world, "expert_exotic_jobs.load", {"folder": str(saved), "run": run, "sources": [PLACED]}):
        assert load.different == set() and load.drift == {} and load.compared, load.where

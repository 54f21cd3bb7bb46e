"""Pretrained weights into engines whose ranks hold different shards, stages and experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.distributed.conftest import Launch
from tests.distributed.expert_jobs import Experts
from tests.distributed.parallel_models import Parallel

PARALLEL = [
    Parallel("autotp", "llama", tp=2, stage=1),
    Parallel("autotp", "tied", tp=2, stage=2, precision="bf16"),
    Parallel("autotp", "fused_uneven", tp=2, stage=1),
    Parallel("megatron", "llama", tp=2, stage=3),
    Parallel("megatron", "gpt", tp=4, stage=1),
    Parallel("pipeline", "uniform", pp=2, stage=1),
    Parallel("3d", "uniform", tp=2, pp=2, stage=1),
]
EXPERTS = [Experts(4, 2, 4), Experts(4, 0, 2, "fp32"), Experts(4, 1, 2, data_first=True)]


def test_every_rank_gets_its_shards_stages_and_experts(launch: Launch, tmp_path: Path) -> None:
    runs = [(run, run) for run in PARALLEL] + [(replace(run, stage=1, ep=1), run) for run in EXPERTS]
    found = launch(4, "pretrained_layout_jobs.load", {"folder": str(tmp_path), "runs": runs}, timeout=400)
    assert len(found) == 4 * len(runs)
    assert not [each for each in found if each[1]]


def test_experts_that_autoep_stacks_are_refused(launch: Launch, tmp_path: Path) -> None:
    run = Experts(2, 1, 2, autoep=True)
    for _, each in launch(2, "pretrained_layout_jobs.load", {"folder": str(tmp_path), "runs": [(run, run)]}):
        assert "AutoEP" in each["refused"] and each["changed"] == "frozenset()"

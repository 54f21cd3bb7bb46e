"""Pretrained weights into engines whose ranks hold different shards, stages and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.distributed.cells import Cell, cells
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Refused, Refuses
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
AUTOEP = Experts(2, 1, 2, autoep=True)
OWN = Experts(2, 1, 2)


def loaded(job: str, ranks: int, live: Any, saved: Any = None, **more: Any) -> Cell:
    """What one engine has, written as pretrained weights, into another engine."""
    case = {"saved": saved or live, "live": live}
    return Cell(live.name, None, f"pretrained_layout_jobs.{job}", ranks, case, **more)


@cells(
    [
        *(loaded("load_parallel", 4, live) for live in PARALLEL),
        *(loaded("load_experts", 4, live, replace(live, stage=1, ep=1)) for live in EXPERTS),
    ]
)
def test_every_rank_gets_its_shards_stages_and_experts(cell: Cell, facts: list[dict[str, str]]) -> None:
    assert facts == [{}] * cell.ranks


@cells([loaded("refuse_experts", 2, AUTOEP, fits=(None, {"saved": OWN, "live": OWN}))])
def test_experts_that_autoep_stacks_are_refused(cell: Cell, facts: list[Refused]) -> None:
    Refuses("ElasticCkptError", ("AutoEP",)).check(facts)

"""Jobs of many ranks, each of which has one sample of a batch; ``large_jobs.<function>``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.distributed import expert_jobs, model, node_jobs
from tests.distributed.facts import Loaded


def _one_sample_each() -> None:
    for module in (model, expert_jobs):
        module.GLOBAL_BATCH = dist.get_world_size()  # type: ignore[misc]


def save_on_nodes(cases: list[dict[str, Any]]) -> None:
    """See :func:`tests.distributed.node_jobs.save_each`."""
    _one_sample_each()
    node_jobs.save_each(cases)


def load_on_nodes(cases: list[dict[str, Any]]) -> list[Loaded]:
    """See :func:`tests.distributed.node_jobs.load_on_nodes`; losses are those of another batch."""
    _one_sample_each()
    return node_jobs.load_on_nodes(cases)

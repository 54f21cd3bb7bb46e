"""Engines whose states or weights lie in host memory or on NVMe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.model import Setup

CPU = ("offload_optimizer", {"device": "cpu", "pin_memory": True})
PARAM = ("offload_param", {"device": "cpu", "pin_memory": True})


def nvme(
    folder: Path, optimizer: str = "cpuadam", pipeline: bool = False, precision: str = "fp32", **more: Any
) -> Setup:
    """ZeRO-3 with two sub-groups on NVMe, and smaller ones in memory."""
    swap = {
        "device": "nvme",
        "nvme_path": str(folder),
        "buffer_count": 16 if pipeline else 5,
        "pipeline_read": pipeline,
        "pipeline_write": pipeline,
    }
    zero = (("offload_optimizer", swap), ("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0))
    aio = {
        "block_size": 1 << 20,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    }
    return Setup(3, precision, optimizer, zero=(*zero, *more.items()), config=(("aio", aio),))

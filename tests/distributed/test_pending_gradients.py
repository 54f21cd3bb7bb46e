"""A load is refused while gradients wait for a step, and only then, however their micro-batches are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.model import GLOBAL_BATCH, Setup

CPU = (("offload_optimizer", {"device": "cpu"}),)
OVERFLOWING = (("fp16", {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}),)
KINDS = [
    *(Setup(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")),
    Setup(1, "bf16_fp32acc"),
    Setup(2, "bf16_fp32acc"),
    Setup(1, "bf16", zero=CPU),
    Setup(2, "bf16", zero=CPU),
    Setup(3, "bf16", zero=CPU),
    Setup(1, "bf16", zero=(("overlap_comm", True), ("contiguous_gradients", False))),
    Setup(2, "fp16", config=OVERFLOWING),
    Setup(3, "fp16", config=OVERFLOWING),
]


def accumulating(setup: Setup, steps: int) -> Setup:
    sizes = {"gradient_accumulation_steps": steps, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // 2 // steps}
    return Setup(setup.stage, setup.precision, zero=setup.zero, config=(*setup.config, *sizes.items()))


SETUPS = [accumulating(kind, steps) for kind in KINDS for steps in (1, 3)]


def test_a_load_is_refused_between_a_backward_and_its_step_alone(launch: Launch, tmp_path: Path) -> None:
    found = launch(2, "pending_jobs.moments", {"setups": SETUPS, "folder": str(tmp_path)})
    wrong = [
        f"{setup.name} {setup.config}: {moment}: {'refused' if pending else 'loaded'}"
        for setup, moments in zip(SETUPS * 2, found, strict=True)
        for moment, pending in moments
        if pending != moment.endswith("pending")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=str)
def test_a_pipeline_loads_after_any_batch(precision: dict[str, Any], launch: Launch, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, **precision}
    found = launch(2, "pending_jobs.pipeline", {"config": config, "folder": str(tmp_path)})
    assert found == [False] * 8

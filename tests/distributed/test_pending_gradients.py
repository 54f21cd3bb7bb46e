"""A load is refused while gradients wait for a step, and only then, however their micro-batches are counted."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, cells
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


@cells(
    [
        Cell(f"{kind.name}, {number}, {steps}", None, "pending_jobs.moments", 2, {"setup": accumulating(kind, steps)})
        for number, kind in enumerate(KINDS)
        for steps in (1, 3)
    ]
)
def test_a_load_is_refused_between_a_backward_and_its_step_alone(cell: Cell, facts: list[Any]) -> None:
    for moments in facts:
        wrong = [moment for moment, pending in moments if pending != moment.endswith("pending")]
        assert not wrong, wrong


@cells(
    [
        Cell(name, None, "pending_jobs.pipeline", 2, {"config": {"zero_optimization": {"stage": 1}, **precision}})
        for name, precision in {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}.items()
    ]
)
def test_a_pipeline_loads_after_any_batch(cell: Cell, facts: list[bool]) -> None:
    assert facts == [False] * 8

"""What a config says of a run, and its bytes, counted by hand; tests/distributed/test_cli_plan.py has real engines."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.tools.footprint import GPU, RunSettings
from elastic_ckpt.tools.models import model_metadata
from elastic_ckpt.tools.virtual import LoadOptions, ReadOptions, Topology, VirtualJob, forecast

SAVED = RunSettings(3, "bfloat16", config={"train_micro_batch_size_per_gpu": 8})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (3, "bfloat16", GPU, GPU)),
        ({"elastic_checkpoint": {}}, (3, "bfloat16", GPU, GPU)),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, (2, "float32", "host", GPU)),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, (2, "float32", "host", GPU)),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}, "fp16": {"enabled": True}}, (3, "float16", GPU, "NVMe")),
        ({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}, (1, "bfloat16", GPU, GPU)),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, (3, "float16", GPU, GPU)),
        ({"bf16": {"enabled": False}}, (3, "float32", GPU, GPU)),
        ({"zero_optimization": {"stage": "two"}}, (3, "float32", GPU, GPU)),
    ],
)  # fmt: skip
def test_stage_precision_and_offload_are_those_of_the_config(config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    run = RunSettings.of(config, SAVED)
    assert (run.zero_stage, run.precision, run.optimizer, run.weights) == expected


def at(run: RunSettings, dp: int) -> dict[str, int]:
    job = VirtualJob(model_metadata("70b"), Topology(dp, 8, 4, run.zero_stage), LoadOptions())
    state, plan = job.planned(dp * 8)
    found: dict[str, int] = {}
    for each in run.memory(state, forecast(state, plan, ReadOptions())["filled"]):
        found[each["place"]] = found.get(each["place"], 0) + each["nbytes"]
    return found


def test_memory_after_a_load() -> None:
    """Stages 1 and 2 have whole weights, 3 its share of them; without ZeRO, fp32 weights are the masters."""
    numel = at(RunSettings(0, "float32"), 2)[GPU] // 12
    assert numel > 2_000_000_000
    assert at(RunSettings(0, "bfloat16"), 2) == {GPU: 14 * numel}
    assert at(RunSettings(1, "bfloat16"), 2) == {GPU: 2 * numel + 6 * numel}
    assert at(RunSettings(2, "float32", "host"), 2) == {GPU: 4 * numel, "host": 6 * numel}
    assert at(RunSettings(3, "bfloat16", "host", "NVMe"), 2) == {"NVMe": numel, "host": 6 * numel}
    assert at(RunSettings(1, "bfloat16", GPU, "NVMe"), 2) == {GPU: 8 * numel}, "weights are offloaded by ZeRO-3 alone"


@pytest.mark.parametrize(
    ("config", "dp", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, 1, 8),
        ({"train_batch_size": 16}, 4, 16),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}, 1, 8),
        ({"train_batch_size": "auto"}, 3, 8 * 3),
        ({}, 2, 16),
    ],
)
def test_the_global_batch_follows_the_config(config: dict[str, Any], dp: int, expected: int) -> None:
    assert RunSettings.of(config, SAVED).batch(dp, BatchSizes(16, 8, 1)) == (expected, "")


def test_a_batch_that_deepspeed_refuses_is_told() -> None:
    batch, refused = RunSettings.of({"train_batch_size": 16}, SAVED).batch(3, BatchSizes(16, 8, 1))
    assert batch == 16 and refused == "DeepSpeed refuses a global batch of 16 on 3 data-parallel ranks"

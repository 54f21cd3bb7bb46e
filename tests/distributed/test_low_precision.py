"""Masters in bf16 and fp16 (``bf16_master_weights_and_grads``): any degree and stage, and to and from fp32 masters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.model import Setup

OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)
BF16 = [Setup(stage, "bf16_masters") for stage in (1, 2, 3)]
MIXED = [Setup(stage, "bf16_masters_fp32_states", "cpuadam", OFFLOAD) for stage in (1, 3)]
FP16 = [Setup(stage, "fp16_masters", "cpuadam", OFFLOAD) for stage in (2, 3)]
WIDE = [Setup(1, "bf16"), Setup(3, "bf16")]
#: By which losses of the run that goes on may differ: 8 bits of mantissa at a loss of 3.6.
BF16_LOSSES = 2e-2
STRICT = (("elastic_checkpoint", {"on_change": "error"}),)


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<setup>-dp2/step4`` for every setup here."""
    folder = tmp_path_factory.mktemp("low_precision")
    launch(2, "save", {"folder": str(folder), "setups": BF16 + MIXED + FP16 + WIDE})
    return folder


def case(folder: Path, source: Setup, target: Setup, masters: str = "", states: str = "") -> dict[str, Any]:
    """A load, and the dtypes that the live engine has."""
    return {"folder": str(folder / f"{source.name}-dp2"), "setup": target, "masters": masters, "states": states}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masters_in_low_precision_come_back_bit_by_bit_at_any_degree_and_stage(
    world_size: int, saved: Path, launch: Launch
) -> None:
    cases = [case(saved, source, target, "bfloat16", "bfloat16") for source in BF16 for target in (BF16[0], BF16[2])]
    cases += [case(saved, source, target, "bfloat16", "float32") for source in MIXED for target in MIXED]
    cases += [case(saved, source, target, "float16", "float32") for source in FP16 for target in FP16]
    for load in launch(world_size, "low_precision_jobs.load", cases):
        assert load.format == "native" and load.differences == {}, load.where
        assert not any("rounded" in note for note in load.report.notes)
        assert load.loss_gap <= BF16_LOSSES, load.where


@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_masters_become_fp32_exactly_and_fp32_masters_bf16_by_rounding(
    world_size: int, saved: Path, launch: Launch
) -> None:
    cases = [case(saved, source, target, "float32", "float32") for source in BF16[::2] for target in WIDE]
    cases += [case(saved, source, target, "bfloat16", "bfloat16") for source in WIDE for target in BF16[::2]]
    cases += [case(saved, WIDE[0], MIXED[1], "bfloat16", "float32")]
    for load in launch(world_size, "low_precision_jobs.load", cases):
        assert load.format == "native" and load.differences == {}, load.where
        is_rounded = load.case["masters"] == "bfloat16"
        assert any("rounded" in note for note in load.report.notes) == is_rounded, load.where
        assert load.loss_gap <= BF16_LOSSES, load.where


@pytest.mark.parametrize(
    ("source", "target", "remedy"),
    [
        pytest.param(WIDE[1], replace(BF16[2], config=STRICT), "on_change", id="the config says so"),
        # whose range is smaller
        pytest.param(WIDE[0], FP16[0], "resume with the dtype", id="fp32 masters do not become fp16"),
    ],
)
def test_rounding_is_refused_where(source: Setup, target: Setup, remedy: str, saved: Path, launch: Launch) -> None:
    (refused,) = launch(2, "refusal_jobs.refuse", [case(saved, source, target)])
    (text,) = refused.texts
    assert "MismatchError" in refused.kinds and refused.changed == set()
    assert "lose precision" in text and remedy in text

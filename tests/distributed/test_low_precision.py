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
STRICT = (("elastic_checkpoint", {"on_precision_loss": "error"}),)


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<setup>-dp2/step4`` for every setup here."""
    folder = tmp_path_factory.mktemp("low_precision")
    setups = [setup.as_json() for setup in BF16 + MIXED + FP16 + WIDE]
    launch(2, "save", {"folder": str(folder), "setups": setups})
    return folder


def case(
    folder: Path, source: Setup, target: Setup, masters: str, states: str, rounded: bool = False
) -> dict[str, Any]:
    where = str(folder / f"{source.name}-dp2")
    return {"folder": where, "setup": target.as_json(), "masters": masters, "states": states, "rounded": rounded}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masters_in_low_precision_come_back_bit_by_bit_at_any_degree_and_stage(
    world_size: int, saved: Path, launch: Launch
) -> None:
    cases = [case(saved, source, target, "bfloat16", "bfloat16") for source in BF16 for target in (BF16[0], BF16[2])]
    cases += [case(saved, source, target, "bfloat16", "float32") for source in MIXED for target in MIXED]
    cases += [case(saved, source, target, "float16", "float32") for source in FP16 for target in FP16]
    launch(world_size, "low_precision_jobs.load", {"cases": cases})


@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_masters_become_fp32_exactly_and_fp32_masters_bf16_by_rounding(
    world_size: int, saved: Path, launch: Launch
) -> None:
    cases = [case(saved, source, target, "float32", "float32") for source in BF16[::2] for target in WIDE]
    cases += [case(saved, source, target, "bfloat16", "bfloat16", True) for source in WIDE for target in BF16[::2]]
    cases += [case(saved, WIDE[0], MIXED[1], "bfloat16", "float32", True)]
    launch(world_size, "low_precision_jobs.load", {"cases": cases})


def test_rounding_is_refused_where_the_config_says_so(saved: Path, launch: Launch) -> None:
    strict = replace(BF16[2], config=STRICT)
    arguments = {"folder": str(saved / f"{WIDE[1].name}-dp2"), "setup": strict.as_json(), "remedy": "on_precision_loss"}
    launch(2, "low_precision_jobs.refuse", arguments)


def test_fp32_masters_do_not_become_fp16_whose_range_is_smaller(saved: Path, launch: Launch) -> None:
    arguments = {
        "folder": str(saved / f"{WIDE[0].name}-dp2"),
        "setup": FP16[0].as_json(),
        "remedy": "resume with the dtype",
    }
    launch(2, "low_precision_jobs.refuse", arguments)

"""Every stage and degree to every other, natively and from universal checkpoints, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import EXTRA, MATRIX, Launch, in_precision, saved_at
from tests.distributed.model import Setup

#: By which losses of the run that goes on may differ: other ranks sum gradients in another order.
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3}


def sources(folder: Path, setups: list[Setup], degrees: list[int], kind: str) -> list[dict[str, str]]:
    return [{"folder": str(folder / f"{s.name}-dp{n}"), "format": kind} for s in setups for n in degrees]


@pytest.mark.parametrize("degree", [1, 3, 4])  # 2 is what most other tests load on
def test_any_stage_and_degree_resumes_bit_exactly_on(
    degree: int, launch: Launch, native: Path, universal: Path
) -> None:
    targets = []
    for number, target in enumerate(MATRIX):
        if target.precision != "fp32" and degree % 2 == 0:
            continue  # another precision changes nothing about the cuts
        same_precision = [setup for setup in MATRIX if setup.precision == target.precision]
        found = sources(native, same_precision, saved_at(target), "native")
        found += sources(universal, same_precision, [2 + degree % 2], "universal")
        # every fourth one, of each stage at some degree: the cuts are proven in test_planner.py
        found = found[(number + degree) % 4 :: 4]
        targets.append({"setup": target, "sources": found, "continue": list(range(0, len(found), 8))})
    for load in launch(degree, "load", {"targets": targets}, timeout=500):
        assert load.format == load.case["format"] and load.differences == {}, load.where
        assert load.report.verified.nbytes and not load.report.verified.without_checksum_nbytes, load.text
        assert load.loss_gap <= ROUNDING[load.case["setup"].precision], load.where


@pytest.mark.parametrize("degree", [1, 3])
def test_round_robin_alignment_amsgrad_and_cpu_adam_resume_bit_exactly_on(
    degree: int, launch: Launch, native: Path
) -> None:
    adam, cpu = Setup(1), Setup(1, optimizer="cpuadam")
    extra = {setup.name: setup for setup in EXTRA}
    idle = [setup for setup in EXTRA if setup.groups == "idle"]
    amsgrad = [setup for setup in EXTRA if setup.optimizer == "adam_amsgrad"]
    round_robin = [extra[name] for name in extra if "round_robin" in name]
    crossings = [
        *[
            (target, [target, in_precision(Setup(1), target.precision), in_precision(Setup(3), target.precision)])
            for target in round_robin
        ],
        (Setup(2, precision="bf16"), [round_robin[1]]),
        (Setup(3, zero=(("sub_group_size", 150),)), [Setup(2, zero=(("round_robin_gradients", True),)), cpu]),
        (Setup(2), [Setup(2, zero=(("round_robin_gradients", True),))]),
        (cpu, [cpu, Setup(3), extra["z3-fp32-cpuadam-sub_group_size-stage3_param_persistence_threshold"]]),
        (Setup(3, optimizer="cpuadam"), [cpu, adam]),
        *[(target, amsgrad) for target in amsgrad],
        *[(target, idle) for target in idle],
    ]
    targets = [{"setup": target, "sources": sources(native, found, [2], "native")} for target, found in crossings]
    for load in launch(degree, "load", {"targets": targets}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap <= ROUNDING[load.case["setup"].precision], load.where

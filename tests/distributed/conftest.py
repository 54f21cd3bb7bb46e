"""Checkpoints that the distributed tests share: made once a session by real DeepSpeed jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import end, environment, run_ranks, start
from tests.distributed.model import Setup

SUB_GROUPS = (("sub_group_size", 150), ("stage3_param_persistence_threshold", 0))
ROUND_ROBIN = (("round_robin_gradients", True),)

#: What the matrix crosses: ZeRO-1, 2, 3, and 3 with sub-group splits and nothing persistent.
STAGES = [Setup(1), Setup(2), Setup(3), Setup(3, zero=SUB_GROUPS)]
DEGREES = [1, 2, 3, 4]


def in_precision(setup: Setup, bf16: bool) -> Setup:
    return Setup(setup.stage, bf16, setup.optimizer, setup.zero, setup.groups, setup.config)


MATRIX = [in_precision(setup, bf16) for setup in STAGES for bf16 in (False, True)]
#: Saved at DP=2 and 3 only.
EXTRA = [
    Setup(2, zero=ROUND_ROBIN),
    Setup(1, bf16=True, zero=(*ROUND_ROBIN, ("parameter_alignment", True))),
    Setup(1, optimizer="cpuadam"),
    Setup(3, optimizer="cpuadam", zero=SUB_GROUPS),
    Setup(1, optimizer="adam_amsgrad"),
    Setup(3, optimizer="adam_amsgrad"),
    Setup(2, groups="idle"),
    Setup(3, groups="idle"),
]


@pytest.fixture(scope="session")
def extensions_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Private to this run: a killed build leaves a lock behind that would hang the next run."""
    return str(tmp_path_factory.mktemp("extensions"))


Launch = Callable[..., None]


@pytest.fixture(scope="session")
def launch(extensions_dir: str) -> Launch:
    """``launch(world_size, job, arguments)``: run a job of ``jobs.py`` on real processes."""

    def run(world_size: int, job: str, arguments: dict, timeout: float = 300) -> None:
        run_ranks(world_size, job, arguments, extensions_dir, timeout)

    return run


@pytest.fixture(scope="session")
def native(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<setup>-dp<n>/step4`` for every setup of the matrix at DP 1 to 4, and extras at 2 and 3."""
    folder = tmp_path_factory.mktemp("native")
    for degree in DEGREES:
        setups = MATRIX + (EXTRA if degree in (2, 3) else [])
        launch(degree, "save", {"folder": str(folder), "setups": [setup.as_json() for setup in setups]})
    return folder


@pytest.fixture(scope="session")
def universal(native: Path, extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The matrix at DP=2 and 3 as universal checkpoints, made by DeepSpeed's own converter."""
    folder = tmp_path_factory.mktemp("universal")
    names = [f"{setup.name}-dp{degree}" for setup in MATRIX for degree in (2, 3)]
    names.append(f"{Setup(2, zero=ROUND_ROBIN).name}-dp2")
    log = folder / "convert.log"
    command = [sys.executable, "-m", "tests.distributed.convert", str(native), str(folder), *names]
    process = start(command, environment(extensions_dir), log)
    try:
        assert process.wait(300) == 0, log.read_text()[-6000:]
    except subprocess.TimeoutExpired:
        pytest.fail(f"conversion hung\n{log.read_text()[-6000:]}")
    finally:
        end(process)
    return folder

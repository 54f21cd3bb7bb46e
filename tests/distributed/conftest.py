"""Checkpoints that the distributed tests share: made once a session by real DeepSpeed jobs."""

from __future__ import annotations

import contextlib
import fcntl
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.distributed import jobs
from tests.distributed.cells import Cell, Launcher, Packs, Saves, cell_of
from tests.distributed.launch import end, environment, run_ranks, start
from tests.distributed.model import Setup

SUB_GROUPS = (("sub_group_size", 150), ("stage3_param_persistence_threshold", 0))
ROUND_ROBIN = (("round_robin_gradients", True),)

#: What the matrix crosses: ZeRO-1, 2, 3, and 3 with sub-group splits and nothing persistent.
STAGES = [Setup(1), Setup(2), Setup(3), Setup(3, zero=SUB_GROUPS)]
DEGREES = [1, 2, 3, 4]


def in_precision(setup: Setup, precision: str) -> Setup:
    return replace(setup, precision=precision)


MATRIX = [in_precision(setup, precision) for setup in STAGES for precision in ("fp32", "bf16")]
#: Saved at DP=2 only.
EXTRA = [
    Setup(2, zero=ROUND_ROBIN),
    Setup(1, precision="bf16", zero=(*ROUND_ROBIN, ("parameter_alignment", True))),
    Setup(1, optimizer="cpuadam"),
    Setup(3, optimizer="cpuadam", zero=SUB_GROUPS),
    Setup(1, optimizer="adam_amsgrad"),
    Setup(3, optimizer="adam_amsgrad"),
    Setup(2, groups="idle"),
    Setup(3, groups="idle"),
]


def saved_at(setup: Setup) -> list[int]:
    """Degrees at which the session saves a setup."""
    if setup not in MATRIX:
        return [2]
    return DEGREES if setup.precision == "fp32" else [2, 3]


Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(extensions_dir: str) -> Launch:
    """``launch(world_size, job, arguments)``: run a job of ``jobs.py`` on real processes; what it found on all ranks."""

    def run(world_size: int, job: str, arguments: Any, timeout: float = 300) -> list[Any]:
        return run_ranks(world_size, job, arguments, extensions_dir, timeout)

    return run


Convert = Callable[[Path, Path, list[str]], None]


@pytest.fixture(scope="session")
def convert(extensions_dir: str) -> Convert:
    """``convert(native, universal, names)``: run DeepSpeed's own converter on ``native/name`` for every name."""

    def run(native: Path, universal: Path, names: list[str]) -> None:
        log = universal / "convert.log"
        command = [sys.executable, "-m", "tests.distributed.convert", str(native), str(universal), *names]
        process = start(command, environment(extensions_dir), log)
        try:
            assert process.wait(300) == 0, log.read_text()[-6000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"conversion hung\n{log.read_text()[-6000:]}")
        finally:
            end(process)

    return run


@pytest.fixture(scope="session")
def aio(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSpeed's async_io op, built before a test with a time limit needs it: that takes minutes."""
    log = tmp_path_factory.mktemp("aio") / "build.log"
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
    process = start([sys.executable, "-c", build], environment(extensions_dir), log)
    try:
        assert process.wait(550) == 0, log.read_text()[-6000:]
    finally:
        end(process)


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property: Any) -> None:
    """Columns of the table that ``launch/matrix_table.py`` writes."""
    record_testsuite_property("DeepSpeed", deepspeed.__version__)
    record_testsuite_property("torch", torch.__version__)
    record_testsuite_property("Python", platform.python_version())


@pytest.fixture(scope="session")
def saves(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The checkpoints that cells name."""
    return Saves(tmp_path_factory.mktemp("saves"), Launcher(extensions_dir))


@pytest.fixture(scope="session")
def packs(
    saves: Saves, extensions_dir: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Packs:
    """What cells found out."""
    return Packs(saves, Launcher(extensions_dir), tmp_path_factory.mktemp("changed"), request.session.items)


@pytest.fixture
def facts(cell: Cell, packs: Packs, request: pytest.FixtureRequest) -> list[Any]:
    """What the ranks of the test's cell found out."""
    return packs.facts(request.node.path, cell)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where everything is spoiled, tests of cells are run alone: no other one knows that it has to fail."""
    if jobs.SPOILS:
        config.hook.pytest_deselected(items=[item for item in items if cell_of(item) is None])
        items[:] = [item for item in items if cell_of(item) is not None]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Where everything is spoiled, a test of a cell passes by its failure."""
    if not jobs.SPOILS or cell_of(pyfuncitem) is None:
        return (yield)
    try:
        yield
    except AssertionError:
        return True
    raise AssertionError("this test does not look at what it is about: it passes with another truth")


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether a folder is to be filled now: the other workers of pytest-xdist that want it wait until it is."""
    with open(f"{folder}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_missing = not folder.with_suffix(".made").exists()
        if is_missing:
            shutil.rmtree(folder, ignore_errors=True)  # what failed in another worker
            folder.mkdir()
        yield is_missing
        folder.with_suffix(".made").touch()


@pytest.fixture(scope="session")
def native(launch: Launch, of_all_workers: Path) -> Path:
    """A folder with ``<setup>-dp<n>/step4``: the matrix in fp32 at DP 1 to 4, in bf16 at 2 and 3, the extras at 2."""
    folder = of_all_workers / "native"
    with made_once(folder) as is_missing:
        for degree in DEGREES if is_missing else ():
            setups = [setup for setup in MATRIX + EXTRA if degree in saved_at(setup)]
            launch(degree, "save", {"folder": str(folder), "setups": setups})
    return folder


@pytest.fixture(scope="session")
def universal(native: Path, convert: Convert, of_all_workers: Path) -> Path:
    """The matrix at DP=2 and 3 as universal checkpoints, made by DeepSpeed's own converter."""
    folder = of_all_workers / "universal"
    names = [f"{setup.name}-dp{degree}" for setup in MATRIX for degree in (2, 3)]
    names.append(f"{Setup(2, zero=ROUND_ROBIN).name}-dp2")
    with made_once(folder) as is_missing:
        if is_missing:
            convert(native, folder, names)
    return folder


#: Engines of which every rank holds everything, ZeRO-1 that accumulates in fp32, and fp16 in all of them.
UNPARTITIONED = [
    Setup(0),
    Setup(0, "bf16"),
    Setup(0, "fp16"),
    Setup(0, "fp16_static"),
    Setup(0, "bf16", "fusedadam"),
    Setup(0, "fp32", "fusedadam"),
    Setup(1, "bf16_fp32acc"),
    Setup(3, "fp16"),
    Setup(1, "fp16_static"),
]


@pytest.fixture(scope="session")
def unpartitioned(launch: Launch, of_all_workers: Path) -> Path:
    """A folder with ``<setup>-dp<n>/step4`` for every setup of :data:`UNPARTITIONED` at DP=2, with AdamW also at 3."""
    folder = of_all_workers / "unpartitioned"
    with made_once(folder) as is_missing:
        for degree, optimizers in ((2, ("adamw", "fusedadam")), (3, ("adamw",))) if is_missing else ():
            setups = [setup for setup in UNPARTITIONED if setup.optimizer in optimizers]
            launch(degree, "save", {"folder": str(folder), "setups": setups})
    return folder


@pytest.fixture(scope="session")
def universal_bf16(unpartitioned: Path, convert: Convert, of_all_workers: Path) -> Path:
    """``BF16_Optimizer``'s checkpoint of two ranks as a universal one."""
    folder = of_all_workers / "universal_bf16"
    with made_once(folder) as is_missing:
        if is_missing:
            convert(unpartitioned, folder, [f"{Setup(1, 'bf16_fp32acc').name}-dp2"])
    return folder

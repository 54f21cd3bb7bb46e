"""Checkpoints of many more ranks than this machine could run: real saves, split into their files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.split import split
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup

RANKS = 256
SETUPS = [Setup(1), Setup(3), Setup(1, "bf16"), Setup(3, zero=(("sub_group_size", 150),))]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<setup>-dp1/step4``, and with ``<setup>-dp256/step4``, whose truth is the same."""
    folder = tmp_path_factory.mktemp("scale")
    launch(1, "save", {"folder": str(folder), "setups": SETUPS})
    for setup in SETUPS:
        source, target = folder / f"{setup.name}-dp1", folder / f"{setup.name}-dp{RANKS}"
        split(source / "step4", target / "step4", RANKS)
        for name in ("latest", "truth.pt"):
            shutil.copy(source / name, target / name)
    return folder


def test_a_checkpoint_of_256_ranks_resumes_bit_exactly_on_4(launch: Launch, saved: Path) -> None:
    sources = [{"folder": str(saved / f"{setup.name}-dp{RANKS}"), "format": "native"} for setup in SETUPS]
    fp32 = [source for setup, source in zip(SETUPS, sources, strict=True) if setup.precision == "fp32"]
    targets = [{"setup": target, "sources": fp32, "continue": []} for target in (Setup(1), Setup(3))]
    targets.append({"setup": SETUPS[2], "sources": [sources[2]], "continue": []})
    for load in launch(4, "load", {"targets": targets}):
        assert load.format == "native" and load.differences == {}, load.where


def test_splitting_into_two_is_what_deepspeed_saves_on_two(launch: Launch, saved: Path, tmp_path: Path) -> None:
    """Loaded by DeepSpeed itself: sizes, paddings and places are its own."""
    folder = tmp_path / "two"
    for setup in SETUPS[:2]:
        target = folder / f"{setup.name}-dp2"
        split(saved / f"{setup.name}-dp1" / "step4", target / "step4", 2)
        for name in ("latest", "truth.pt"):
            shutil.copy(saved / f"{setup.name}-dp1" / name, target / name)
    cases = [{"setup": setup, "folder": str(folder / f"{setup.name}-dp2"), "arguments": {}} for setup in SETUPS[:2]]
    for load in launch(2, "same_as_deepspeed", cases):
        assert load.differences == {}, load.where

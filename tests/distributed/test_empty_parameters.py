"""Parameters without elements, which ZeRO's groups leave out and others number: every stage to every stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Convert, Launch
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup

MODEL = "HollowLM"
SAVED = [Setup(0), Setup(1), Setup(2), Setup(3), Setup(0, "bf16"), Setup(1, "bf16_fp32acc")]
UNIVERSAL = [Setup(1), Setup(3)]
TARGETS = [Setup(0), Setup(1), Setup(2), Setup(3), Setup(3, "bf16")]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "save", {"folder": str(folder), "setups": SAVED, "model": MODEL})
    return folder


def folder_of(folder: Path, setup: Setup) -> Path:
    return folder / f"{setup.name}-dp2"


def test_every_stage_loads_them_from_every_stage(launch: Launch, saved: Path, convert: Convert, tmp_path: Path) -> None:
    convert(saved, tmp_path, [folder_of(saved, setup).name for setup in UNIVERSAL])
    (tmp_path / "ours").mkdir()
    for setup in SAVED:  # by the command, which converts what was saved with ZeRO
        ours = folder_of(tmp_path / "ours", setup)
        result = CliRunner().invoke(app, ["convert", str(folder_of(saved, setup)), str(ours / "step4_universal")])
        assert (result.exit_code == 0) == (setup.stage > 0), result.output
        if result.exit_code == 0:
            shutil.copy(folder_of(saved, setup) / "truth.pt", ours)
    sources = [(folder_of(saved, setup), "native") for setup in SAVED]
    sources += [(folder_of(tmp_path, setup), "universal") for setup in UNIVERSAL]
    sources += [(folder, "universal") for folder in sorted((tmp_path / "ours").iterdir())]
    every = [{"folder": str(folder), "format": kind} for folder, kind in sources]
    targets = [{"setup": setup, "model": MODEL, "sources": every} for setup in TARGETS]
    facts = launch(3, "load", {"targets": targets})
    assert len(facts) == 3 * len(TARGETS) * len(sources)
    for loaded in facts:
        assert loaded.differences == {}, loaded.where


def test_weights_alone_and_exports_have_them(launch: Launch, saved: Path, tmp_path: Path) -> None:
    cases = [
        {"folder": str(folder_of(saved, source)), "setup": target, "model": MODEL}
        for source in (Setup(0), Setup(2), Setup(3))
        for target in (Setup(0), Setup(2), Setup(3))
    ]
    for loaded in launch(1, "weights_only", cases):
        assert loaded.differences == {}, loaded.where
    for setup in SAVED:
        folder = tmp_path / setup.name
        result = CliRunner().invoke(app, ["export", str(folder_of(saved, setup)), str(folder)])
        assert result.exit_code == 0, result.output
        found: dict[str, torch.Tensor] = load_file(next(folder.glob("*.safetensors")))
        truth: dict[str, Any] = truth_of(folder_of(saved, setup))
        empty = {name: tuple(value.shape) for name, value in truth["weights"].items() if not value.numel()}
        assert {name: tuple(found[name].shape) for name in empty if name in found} == empty

"""States that are no plain moments in universal checkpoints: converted, and loaded as from the native checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.test_optimizers import LOOSE, assert_exact, assert_requantized, bnb, load, save, source

SAVED = [bnb(name, stage) for name in ("AdamW8bit", "Lion8bit") for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def universal(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8-bit checkpoints of two ranks as universal ones, with their truth beside them."""
    folder = tmp_path_factory.mktemp("universal_states")
    save(launch, folder / "native", SAVED)
    for setup in SAVED:
        convert(folder / "native" / f"{setup.name}-dp2", folder / setup.name)
    return folder


def convert(native: Path, target: Path, *options: str) -> dict[str, Any]:
    words = ["convert", str(native), str(target / "step4_universal"), "--to", "universal", "--json", *options]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    shutil.copy(native / "truth.pt", target / "truth.pt")
    return dict(json.loads(result.stdout))


def targets(folder: Path, setups: Iterable[Setup], loss: float) -> list[tuple[Setup, list[dict[str, Any]]]]:
    return [(setup, [source(str(folder / setup.name), loss)]) for setup in setups]


def test_at_the_saved_topology_8_bit_states_come_back_bit_by_bit(launch: Launch, universal: Path) -> None:
    for found in load(launch, 2, targets(universal, SAVED, 1e-5)):
        assert_exact(found)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_at_another_degree_they_are_within_the_bound(degree: int, launch: Launch, universal: Path) -> None:
    for found in load(launch, degree, targets(universal, SAVED, LOOSE)):
        assert_requantized(found)

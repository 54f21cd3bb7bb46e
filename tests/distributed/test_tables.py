"""A table that is the same on all ranks, and as long as some partition or parameter: never cut, never refused untruly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.test_optimizers import assert_exact, configured, load, save, source

SAVED = [Setup(stage, optimizer=f"map_of_{numel}") for stage, numel in ((0, 211), (1, 318), (3, 319))]
BY_NAME, BY_SIZE = {"my_map": "replicated"}, {"numel<=512": "replicated"}


@pytest.fixture(scope="module")
def folders(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[Setup, list[Path]]:
    """The native checkpoint of two ranks, and its conversion but for ZeRO-0, which does not save names of states."""
    folder = tmp_path_factory.mktemp("tables")
    native = save(launch, folder / "native", SAVED)
    config = folder / "config.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"states": BY_NAME}}))
    found: dict[Setup, list[Path]] = {}
    for setup in SAVED:
        found[setup] = [Path(native(setup, 2))]
        if not setup.stage:
            continue
        universal = folder / "universal" / setup.name
        words = ["convert", native(setup, 2), str(universal / "step4_universal"), "--to", "universal"]
        result = CliRunner().invoke(app, [*words, "--config", str(config)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        shutil.copy(Path(native(setup, 2), "truth.pt"), universal / "truth.pt")
        found[setup].append(universal)
    return found


@pytest.mark.parametrize(("degree", "stages"), [(1, (0, 2)), (2, (0, 1, 3)), (3, (1, 3))])
def test_a_table_is_whole_on_every_rank_though_a_partition_is_as_long(
    degree: int, stages: tuple[int, ...], launch: Launch, folders: dict[Setup, list[Path]]
) -> None:
    """By its name, and by its size; from each stage into others."""
    targets = []
    for saved, every in folders.items():
        live = [configured(replace(saved, stage=stage), states=word) for stage in stages for word in (BY_NAME, BY_SIZE)]
        targets += [(setup, [source(str(folder)) for folder in every]) for setup in live]
    for found in load(launch, degree, targets):
        assert_exact(found)

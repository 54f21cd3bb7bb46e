"""Every ready config of ``configs/`` trains, saves and resumes on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.launch import REPO

CONFIGS = sorted(str(path) for path in (REPO / "configs").glob("*.json"))
#: What the demo's script creates where a config leaves the optimizer to the script.
OPTIMIZERS = {"zero2_8bit": "AdamW8bit", "megatron_3d": "AdamW"}
#: Of losses: sums of fp32 in another order, and rounding to 16 bits after these.
ROUNDING, IN_16_BITS = 1e-3, 2e-2


def test_what_a_ready_config_saves_on_two_ranks_is_resumed_on_one(launch: Launch, tmp_path: Path) -> None:
    arguments = {"configs": CONFIGS, "folder": str(tmp_path)}
    launch(2, "config_jobs.save", arguments)
    for load in launch(1, "config_jobs.resume", arguments):
        stage = load.case
        assert f"ZeRO-{stage}, DP=2" in load.text and f"ZeRO-{stage}, DP=1, at step 2" in load.text
        assert load.differences == {}, load.where


def test_the_demo_goes_on_with_every_ready_config(launch: Launch, tmp_path: Path) -> None:
    def words(path: Path, *more: str) -> list[str]:
        created = ["--optimizer", OPTIMIZERS[path.stem]] if path.stem in OPTIMIZERS else []
        return ["--deepspeed_config", str(path), "--steps", "3", "--losses", "unused", *created, *more]

    paths = list(map(Path, CONFIGS))
    saving = {path.stem: words(path, "--save-at", "2", "--save-dir", str(tmp_path / path.stem)) for path in paths}
    saved = {name: losses for name, losses, _ in launch(2, "config_jobs.demo", {"command_lines": saving})}
    folders = {path.stem: tmp_path / path.stem for path in paths}
    result = CliRunner().invoke(app, ["convert", str(folders["zero1_universal"]), "universal"])  # beside the native one
    assert result.exit_code == 0, result.output
    resuming = {path.stem: words(path, "--resume-from", str(folders[path.stem])) for path in paths}
    resumed = launch(1, "config_jobs.demo", {"command_lines": resuming})
    for name, losses, report in resumed:
        expected = {3: saved[name][3]}
        config = json.loads((REPO / "configs" / f"{name}.json").read_text())
        assert losses == pytest.approx(expected, abs=IN_16_BITS if {"fp16", "bf16"} & config.keys() else ROUNDING), name
        assert report.source.format == ("universal" if name == "zero1_universal" else "native")
        assert ("optimizer" in config) == (name not in OPTIMIZERS) == ("comment" not in config), name
    assert [name for name, *_ in resumed] == [path.stem for path in paths]

"""``elastic-ckpt latest``: the newest whole checkpoint, whatever died while it was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.errors import DamagedError, NotFoundError
from tests.distributed import damage

MODEL, RANK1 = "mp_rank_00_model_states.pt", damage.OPTIMIZER.format(1)


def latest(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["latest", str(folder), *words], catch_exceptions=False)


def at_step(source: Path, tag: Path, step: int) -> None:
    """A copy of a save whose files say another step."""
    shutil.copytree(source, tag)
    tree = torch.load(tag / MODEL, weights_only=False)
    torch.save({**tree, "global_steps": step, "skipped_steps": step - tree["global_steps"]}, tag / MODEL)


@pytest.fixture
def folder(native: Path, tmp_path: Path) -> Path:
    """Three saves; ``latest`` names the oldest."""
    for step in (10, 20, 9):
        at_step(native / "z1-fp32-adamw-dp2" / "step4", tmp_path / f"global_step{step}", step)
    (tmp_path / "latest").write_text("global_step9")
    return tmp_path


def empty(tag: Path) -> None:
    for file in tag.iterdir():
        file.write_bytes(b"")


def flip(tag: Path) -> None:
    raw = bytearray((tag / RANK1).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tag / RANK1).write_bytes(raw)


def test_the_newest_by_its_step_is_found(folder: Path) -> None:
    result = latest(folder)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "global_step20")
    assert elastic_ckpt.find_latest(folder) == str(folder / "global_step20")


@pytest.mark.parametrize(
    ("change", "words", "problem"),
    [
        (lambda tag: (tag / RANK1).unlink(), (), RANK1),
        (empty, (), "truncated or unreadable"),
        (lambda tag: (tag / MODEL).write_bytes((tag / MODEL).read_bytes()[:-100]), (), MODEL),
        (flip, ("--full",), RANK1),
    ],
    ids=["a rank is missing", "empty files of a full disk", "a save that was killed", "a flipped bit"],
)
def test_what_is_not_whole_is_skipped_and_named(
    change: Callable[[Path], Any], words: tuple[str, ...], problem: str, folder: Path
) -> None:
    change(folder / "global_step20")
    result = latest(folder, *words)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "global_step10")
    assert problem in result.stderr and "global_step20" in result.stderr
    found = json.loads(latest(folder, *words, "--json").stdout)
    assert found["newest"]["step"] == 10 and found["newest"]["load_dir"] == str(folder)
    assert problem in found["skipped"][0]["problem"]


def one_step_apart(tag: Path) -> None:
    tree = torch.load(tag / MODEL, weights_only=False)
    torch.save({**tree, "skipped_steps": tree["skipped_steps"] - 1}, tag / MODEL)


def without_names(tag: Path) -> None:
    tree = torch.load(tag / MODEL, weights_only=False)
    del tree["buffer_names"]
    torch.save(tree, tag / MODEL)


@pytest.mark.parametrize(
    ("change", "problem"),
    [(one_step_apart, "files of two saves may be mixed"), (without_names, "buffer_names")],
    ids=["counts that do not fit", "a layout that is not known"],
)
def test_what_is_only_suspected_is_not_passed_over(
    change: Callable[[Path], Any], problem: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / "global_step20")
    result = latest(folder)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "global_step20")
    assert problem in result.stderr and result.stderr.startswith("maybe damaged: ")
    assert problem in json.loads(latest(folder, "--json").stdout)["newest"]["suspicion"]
    assert elastic_ckpt.find_latest(folder) == str(folder / "global_step20")
    assert problem in caplog.text and "may be damaged" in caplog.text
    # with proof beside it, it is
    (folder / "global_step20" / RANK1).write_bytes(b"")
    assert elastic_ckpt.find_latest(folder) == str(folder / "global_step10")


def test_a_save_that_had_just_begun_is_named_too(folder: Path) -> None:
    for name in ("global_step30", "logs", "offload_1"):
        (folder / name).mkdir()
    result = latest(folder)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "global_step20")
    assert result.stderr.splitlines() == [
        f"not complete: {folder / 'global_step30'}: no file of a checkpoint can be seen in it"
    ]


def test_the_trainers_own_state_must_be_of_the_same_step(folder: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        inside = tmp_path / "out" / f"checkpoint-{step}"
        shutil.copytree(folder / f"global_step{step}", inside / f"global_step{step}")
        (inside / "latest").write_text(f"global_step{step}")
        (inside / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert elastic_ckpt.find_latest(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-20")
    state = tmp_path / "out" / "checkpoint-20" / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 19}))
    assert "is of step 19, the checkpoint of step 20" in latest(tmp_path / "out").stderr
    state.unlink()
    assert elastic_ckpt.find_latest(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-10")


@pytest.mark.parametrize(("own_step", "name"), [(19, "checkpoint-19"), (5, "checkpoint-5"), (19, "renamed")])
def test_the_trainers_own_count_may_be_behind_the_engines(own_step: int, name: str, folder: Path) -> None:
    """In a save within a step, by one; in a run whose engine had trained before, by more."""
    inside = folder / "out" / name
    shutil.copytree(folder / "global_step20", inside / "global_step20")
    (inside / "latest").write_text("global_step20")
    (inside / "trainer_state.json").write_text(json.dumps({"global_step": own_step}))
    assert elastic_ckpt.find_latest(folder / "out") == str(inside)
    (inside / "trainer_state.json").write_text(json.dumps({"global_step": own_step + 2}))
    assert "trainer_state.json is of step" in latest(folder / "out").stderr


def test_where_nothing_is_whole_or_nothing_is_there(folder: Path, tmp_path: Path) -> None:
    for step in (9, 10, 20):
        empty(folder / f"global_step{step}")
    result = latest(folder)
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.count("not complete:") == 3
    with pytest.raises(DamagedError, match="no checkpoint in this folder is complete") as caught:
        elastic_ckpt.find_latest(folder)
    assert all(f"global_step{step}: " in str(caught.value.found) for step in (9, 10, 20))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(NotFoundError):
        elastic_ckpt.find_latest(tmp_path / "nothing")
    assert latest(tmp_path / "nothing").exit_code == 3

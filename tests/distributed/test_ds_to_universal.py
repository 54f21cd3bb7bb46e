"""``python -m elastic_ckpt.ds_to_universal``, in the place of DeepSpeed's converter."""

# Covers elastic_ckpt/ds_to_universal/__main__.py, which a process of its own runs.

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.checkpoint import ds_to_universal as deepspeeds

from elastic_ckpt.ds_to_universal import main, parse_arguments
from elastic_ckpt.errors import DamagedError, NotFoundError
from tests.distributed.cells import Cell, Change, Save, Saves, cells
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.launch import REPO
from tests.distributed.model import Setup

SAVED = Save(Setup(1))


@pytest.fixture
def run(saves: Saves, tmp_path: Path) -> Path:
    """A run's folder, with ``step4`` in it."""
    return Path(shutil.copytree(saves.folder(SAVED), tmp_path / "run"))


def convert(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folders = ["--input_folder", str(run / "step4"), "--output_folder", str(run / "step4_universal")]
    command = [sys.executable, "-m", "elastic_ckpt.ds_to_universal", *folders, *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)


def converted(*words: str) -> Change:
    """A run after the command, whose controller has ``latest`` name the output folder."""

    def apply(run: Path) -> None:
        convert(run, *words)
        (run / "latest").write_text("step4_universal")

    return apply


def resumed(format: str, *words: str) -> Cell:
    case = {"setup": Setup(3), "format": format}
    return Cell(format, SAVED, "resume", 1, case, converted(*words), expected=Resumes(format, 1e-5))


@cells([resumed("native"), resumed("universal", "--really")])
def test_the_output_folder_is_loaded_whatever_was_converted(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    assert facts[0].report.source.tag == "step4_universal"


def test_nothing_is_converted(run: Path) -> None:
    (run / "step4_universal").mkdir()  # as some controllers do before
    before = set(run.rglob("*"))
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state", "--keep_temp_folder")
    done = convert(run, *workers)
    assert done.returncode == 0 and "nothing needs converting" in done.stdout, done.stderr
    assert set(run.rglob("*")) == before and os.readlink(run / "step4_universal") == "step4"
    again = convert(run)
    assert again.returncode == 0 and "it exists already" in again.stdout


def test_really_converts(run: Path) -> None:
    done = convert(run, "--really")
    assert done.returncode == 0 and not (run / "step4_universal").is_symlink(), done.stderr
    assert (run / "latest_universal").read_text() == "step4_universal"


def test_what_is_not_whole_is_refused_unless_it_is_not_to_be_checked(run: Path) -> None:
    next((run / "step4").glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    done = convert(run)
    assert done.returncode == 1 and done.stderr.startswith("DamagedError: the checkpoint is not complete"), done.stderr
    assert "more finding" not in done.stderr
    assert not os.path.lexists(run / "step4_universal")
    os.truncate(next((run / "step4").glob("*zero_pp_rank_0_*optim_states.pt")), 1000)
    assert "(and 1 more finding: elastic-ckpt verify)" in convert(run).stderr
    theirs = SimpleNamespace(input_folder=str(run / "step4"), output_folder=str(run / "out"), strict=True)
    with pytest.raises(DamagedError):
        main(theirs)
    theirs.strict = False  # a namespace of DeepSpeed's has no "really"
    main(theirs)
    assert (run / "out").is_symlink()
    theirs.input_folder = str(run / "nowhere")
    with pytest.raises(NotFoundError):
        main(theirs)


def test_its_arguments_are_deepspeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--input_folder", "a", "--output_folder", "b", "--num_merge_workers", "7", "--no_strict"]
    monkeypatch.setattr(sys, "argv", ["ds_to_universal", *words])
    assert vars(parse_arguments()) == {**vars(deepspeeds.parse_arguments()), "really": False}
    for needed in (words[:2], words[2:4]):
        with pytest.raises(SystemExit):
            parse_arguments(needed)
    assert set(re.findall(r"'(--\w+)'", Path(deepspeeds.__file__).read_text())) <= set(
        re.findall(r'"(--\w+)"', (REPO / "elastic_ckpt" / "ds_to_universal" / "__init__.py").read_text())
    )

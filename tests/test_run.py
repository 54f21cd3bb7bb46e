"""``python -m elastic_ckpt.run``: the script must not notice, except that the hook is there."""

# Covers elastic_ckpt/__main__.py, which a process of its own runs.
# Covers elastic_ckpt/patches/argument_parsers.py, which the script runs under.

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import elastic_ckpt
from elastic_ckpt.config import flags, read_config
from elastic_ckpt.load import installation
from elastic_ckpt.run import main

REPO = Path(elastic_ckpt.__file__).resolve().parents[1]

SCRIPT = """\
import json, os, pickle, sys
import neighbour
from deepspeed.runtime.engine import DeepSpeedEngine
from elastic_ckpt.config import flag_given, read_config

class Mine:
    pass

if __name__ == "__main__":
    print("FACTS" + json.dumps({
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "folder": sys.path[0],
        "elsewhere": os.getcwd() in sys.path[1:],
        "neighbour": neighbour.VALUE,
        "patched": "elastic_ckpt" in DeepSpeedEngine.load_checkpoint.__code__.co_filename,
        "mode": read_config({}).mode,
        "flag": flag_given(),
        "pickles": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
    }))
    sys.exit(3 if "fail" in sys.argv else 0)
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    facts: dict[str, Any]
    errors: str


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script on its own, and the same as a module of a package."""
    for place in (tmp_path / "scripts", tmp_path / "package"):
        place.mkdir()
        (place / "train.py").write_text(SCRIPT)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "scripts" / "neighbour.py").write_text("VALUE = 'beside the script'")
    (tmp_path / "neighbour.py").write_text("VALUE = 'in the working directory'")
    return tmp_path


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flags.clear()
    for variable in installation.variables():  # which main() sets
        monkeypatch.setenv(variable, "")
    yield
    flags.clear()


def run(folder: Path, *arguments: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_ckpt.run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    facts = [line.removeprefix("FACTS") for line in done.stdout.splitlines() if line.startswith("FACTS")]
    return Outcome(done.returncode, json.loads(facts[0]) if facts else {}, done.stderr)


def test_a_script_runs_as_main_with_its_own_arguments_and_the_hook_installed(folder: Path) -> None:
    script = os.path.join("scripts", "train.py")
    outcome = run(folder, script, "--help", "-m", "--universal-checkpoint=off", "x")
    assert outcome.code == 0, outcome.errors
    assert outcome.facts == {
        "argv": [script, "--help", "-m", "--universal-checkpoint=off", "x"],
        "name": "__main__",
        "file": str(folder / "scripts" / "train.py"),
        "folder": str(folder / "scripts"),
        "elsewhere": False,
        "neighbour": "beside the script",
        "patched": True,
        "mode": "off",  # no parser takes the flag
        "flag": False,
        "pickles": True,
    }


def test_a_module_runs_as_main_from_the_working_directory_and_its_exit_code_is_handed_back(folder: Path) -> None:
    """With what DeepSpeed's launcher puts before its name."""
    outcome = run(folder, "--local_rank=0", "--universal-checkpoint=require", "-m", "package.train", "--epochs", "fail")
    assert outcome.code == 3, outcome.errors
    assert outcome.facts == {
        "argv": [str(folder / "package" / "train.py"), "--local_rank=0", "--epochs", "fail"],
        "name": "__main__",
        "file": str(folder / "package" / "train.py"),
        "folder": str(folder),
        "elsewhere": False,
        "neighbour": "in the working directory",
        "patched": True,
        "mode": "require",
        "flag": True,
        "pickles": True,
    }


LATE = """\
import atexit, multiprocessing, os, pickle, signal, threading, time

class Mine:
    pass

def same(value):
    return value

def end():
    pickle.dumps(Mine())
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map_async(same, [Mine()]).get(timeout=60))
    atexit.register(end)
    threading.Thread(target=lambda: (time.sleep(0.2), print(pickle.dumps(Mine())))).start()
"""


def test_spawned_processes_threads_and_what_runs_at_exit_find_the_scripts_classes(folder: Path) -> None:
    (folder / "late.py").write_text(LATE)
    outcome = run(folder, "late.py")
    assert outcome.code == -signal.SIGTERM, outcome.errors  # all of it has run; a signal ends it as it would the script
    assert "Traceback" not in outcome.errors


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--universal-checkpoint", "require"], "require"),
        (["--universal-checkpoint=require"], "require"),
        (["--universal-checkpoint", "--universal-checkpoint", "off"], "off"),
        (["--universal-checkpoint"], "auto"),
        (["--universal_checkpoint"], "auto"),
        (["--universal_checkpoint=require"], "require"),
    ],
)
def test_a_mode_may_be_a_word_of_its_own(words: list[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("elastic_ckpt.run.install", lambda: None)
    monkeypatch.setattr("elastic_ckpt.run._run_script", ran.append)
    monkeypatch.setattr(sys, "argv", [])
    main([*words, "train.py", "require"])
    assert ran == ["train.py"] and sys.argv == ["train.py", "require"]
    assert read_config({}).mode == mode


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere.py"], FileNotFoundError),
        (["-m", "nowhere"], SystemExit),
        (["-m", "nowhere.train"], ModuleNotFoundError),
        (["-m", "json"], SystemExit),  # a package that has no __main__
    ],
)
def test_a_script_that_is_not_there_is_named(
    arguments: list[str], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ckpt.run.install", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(error, match=arguments[-1].split(".")[0]):
        main(arguments)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_and_nothing_runs(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    main([flag, "script.py"])
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: python -m elastic_ckpt.run")
    assert "--universal-checkpoint" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--universal-checkpoint"], ["--local_rank=0"]])
def test_a_command_without_a_script_ends_with_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"which script\?\n\nusage:"):
        main(arguments)


@pytest.mark.parametrize("argument", ["--universal-checkpoint=on", "--universal-checkpoint=AUTO"])
def test_a_mode_that_does_not_exist_ends_with_the_choices(argument: str) -> None:
    with pytest.raises(SystemExit, match="choose auto, require or off"):
        main([argument, "script.py"])


@pytest.mark.parametrize("argument", ["--universal-checkpoint-x", "--local_rank", "-x", "--", "--mode=off"])
def test_only_the_documented_flags_are_taken(argument: str) -> None:
    with pytest.raises(SystemExit, match=f"unknown flag {argument}"):
        main([argument, "script.py"])

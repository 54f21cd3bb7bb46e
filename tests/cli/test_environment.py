"""``elastic-ckpt doctor``, on the versions that run the tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.engines import versions


def test_the_versions_of_the_tests_are_supported() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert result.exit_code == 0 and found["ok"]
    verdicts = {name: verdict for name, (_, _, verdict) in found["versions"].items()}
    assert verdicts == {"Python": "tried", "torch": "tried", "DeepSpeed": "tried"}


def test_a_newer_version_and_known_bugs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (versions.Requirement("DeepSpeed", "0.1", "0.2"),))
    monkeypatch.setattr(versions, "KNOWN_BUGS", (("0", "99", "it hums"),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "not tried" in result.output and "it hums" in result.output


def test_a_version_that_is_too_old_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (versions.Requirement("DeepSpeed", "99", "99"),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "too old" in result.output


def test_what_is_not_installed_ends_with_1_and_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "DeepSpeed" else "3.11")
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert (
        result.exit_code == 1 and "not installed" in result.output and "all commands; an engine needs" in result.output
    )
    assert "pip install 'elastic_ckpt[deepspeed]'" in result.output


@pytest.mark.parametrize("command", ["convert", "diff", "export"])
def test_a_command_that_reads_tensors_says_so_where_torch_is_missing(command: str) -> None:
    script = "import sys; sys.modules.update(torch=None, deepspeed=None); from elastic_ckpt.cli import app; app()"
    line = [sys.executable, "-c", script, command, "a", "b"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "pip install torch" in done.stderr and "Traceback" not in done.stderr

"""``elastic-ckpt doctor``, on the versions that run the tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app, environment
from elastic_ckpt.engines import versions
from elastic_ckpt.engines.accelerator import Accelerator


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed is not imported for each test."""
    monkeypatch.setattr(environment, "find_accelerator", lambda: Accelerator("cuda", ("H200",) * 8))


def test_the_versions_of_the_tests_are_supported() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"]
    verdicts = {name: verdict for name, (_, _, verdict) in found["versions"].items()}
    assert verdicts == {"Python": "tested", "torch": "tested", "DeepSpeed": "tested"}


def test_its_own_version_and_the_accelerator_are_shown() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["version"] == elastic_ckpt.__version__
    assert (found["accelerator"]["name"], len(found["accelerator"]["devices"])) == ("cuda", 8)
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert any(line.split()[1:4:2] == ["elastic_ckpt", elastic_ckpt.__version__] for line in lines)
    assert any("accelerator" in line and "cuda, 8 x H200" in line for line in lines)


def test_a_deepspeed_that_fails_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Accelerator(None, problem="DeepSpeed fails with ImportError: libcudart", is_broken=True)
    monkeypatch.setattr(environment, "find_accelerator", lambda: broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "not known: DeepSpeed fails with ImportError: libcudart" in result.output


def test_a_newer_version_and_known_bugs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (versions.Requirement("DeepSpeed", "0.1", "0.2"),))
    monkeypatch.setattr(versions, "KNOWN_BUGS", (("0", "99", "it hums"),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "not tested" in result.output and "it hums" in result.output


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
    assert "pip install torch 'deepspeed>=0.14.5'" in result.output


@pytest.mark.parametrize("command", ["convert", "diff", "export"])
def test_a_command_that_reads_tensors_says_so_where_torch_is_missing(command: str) -> None:
    script = "import sys; sys.modules.update(torch=None, deepspeed=None); from elastic_ckpt.cli import app; app()"
    line = [sys.executable, "-c", script, command, "a", "b"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "pip install torch" in done.stderr and "Traceback" not in done.stderr

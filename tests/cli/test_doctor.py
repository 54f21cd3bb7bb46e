"""``elastic-ckpt doctor``, on the versions that run the tests."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.engines import versions


def test_the_versions_of_the_tests_are_supported_and_have_every_private() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert result.exit_code == 0 and found["ok"] and found["missing"] == [] and found["privates"] > 100
    verdicts = {name: verdict for name, (_, _, verdict) in found["versions"].items()}
    assert verdicts == {"Python": "supported", "torch": "supported", "DeepSpeed": "supported"}


def test_a_version_that_is_too_old_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (versions.Requirement("DeepSpeed", "99", "99"),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "too old" in result.output

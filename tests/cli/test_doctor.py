"""``elastic-ckpt doctor``, on the versions that run the tests."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.engines import versions


def test_the_versions_of_the_tests_are_supported_and_have_every_private() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert result.exit_code == 0 and found["ok"] and found["missing"] == [] and found["privates"] > 100
    verdicts = {name: verdict for name, (_, _, verdict) in found["versions"].items()}
    assert verdicts == {"Python": "tried", "torch": "tried", "DeepSpeed": "tried"}
    assert found["loads"]["ZeRO-1 to ZeRO-3, bf16"] is True


def test_a_release_that_was_not_tried_and_loads_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "RELEASES", {})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "not tried" in result.output and "none was tried on this release" in result.output
    release = next(each.found for each in versions.REQUIREMENTS if each.name == "DeepSpeed")
    monkeypatch.setattr(versions, "RELEASES", {release: versions.CELLS[:1]})
    result = CliRunner().invoke(app, ["doctor"])
    assert re.search(rf"loads that fail\W+{re.escape(versions.CELLS[0])}", result.output), result.output


def test_a_version_that_is_too_old_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (versions.Requirement("DeepSpeed", "99", "99"),))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "too old" in result.output

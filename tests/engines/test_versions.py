"""Ranges of versions: what is refused, what is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ckpt.engines import versions
from elastic_ckpt.engines.versions import Requirement
from elastic_ckpt.errors import UnsupportedError

RANGE = Requirement("DeepSpeed", "0.14.5", "0.19.8")
TORCH = Requirement("torch", "2.4", "2.15")


@pytest.mark.parametrize(
    ("requirement", "found", "expected"),
    [
        (RANGE, "0.14.4", -1),
        (RANGE, "0.14.5", 0),
        (RANGE, "0.19.8+cafe123", 0),
        (RANGE, "0.19.9", 1),
        (RANGE, "0.20.0.dev1", 1),
        (TORCH, "2.3.1+cu121", -1),
        (TORCH, "2.15.3", 0),
        (TORCH, "2.16.0a0+git1", 1),
    ],
)
def test_a_version_is_compared_as_exactly_as_the_bound_is_given(
    requirement: Requirement, found: str, expected: int
) -> None:
    assert requirement.compare(found) == expected


def test_an_older_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (Requirement("DeepSpeed", "99.1", "99.2"),))
    with pytest.raises(UnsupportedError) as error:
        versions.refuse_older()
    assert "too old" in error.value.problem and error.value.expected == "DeepSpeed 99.1 to 99.2"
    assert error.value.found == f"DeepSpeed {RANGE.found}" and "99.1 or newer" in str(error.value.remedy)


def test_a_package_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REQUIREMENTS", (Requirement("no-such-package", "1", "2"),))
    with pytest.raises(UnsupportedError, match="no-such-package is not installed") as error:
        versions.refuse_older()
    assert error.value.remedy == "pip install torch 'deepspeed>=0.14.5'"


def test_a_fork_under_another_name_is_found_by_the_package_that_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "vendors_quickspeed-0.16.9+v2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vendors-quickspeed\nVersion: 0.16.9+v2\n")
    (about / "top_level.txt").write_text("quickspeed\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions.installed("QuickSpeed") == "0.16.9+v2" and versions.installed("quickerspeed") is None


def test_a_newer_version_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    versions.warn_of_newer()
    assert not caplog.records
    monkeypatch.setattr(versions, "REQUIREMENTS", (Requirement("DeepSpeed", "0.1", "0.2"),))
    versions.warn_of_newer()
    assert f"is not tested with DeepSpeed {RANGE.found}, only with DeepSpeed 0.1 to 0.2" in caplog.text


def test_a_known_bug_is_told_of_its_versions_only() -> None:
    assert any("resume its weights" in text for text in versions.known_bugs("0.17.6"))
    assert versions.known_bugs("0.19.8") == [] == versions.known_bugs(None)

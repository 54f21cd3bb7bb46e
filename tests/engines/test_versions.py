"""Ranges of versions: what is refused, what is warned of."""

from __future__ import annotations

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
    with pytest.raises(UnsupportedError, match="not installed"):
        versions.refuse_older()


@pytest.mark.parametrize("why", ["newer than the range", "a release between those that were tried"])
def test_an_untried_version_is_warned_of_and_refused_where_install_would_fail(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert versions.untried() == []
    if "newer" in why:
        monkeypatch.setattr(versions, "REQUIREMENTS", (Requirement("DeepSpeed", "0.1", "0.2"),))
    else:
        monkeypatch.setattr(versions, "RELEASES", {"0.14.5": (), "0.19.9": ()})
    assert versions.untried() == [f"DeepSpeed {RANGE.found}"]
    versions.check_untried([], [])
    assert "was not tried on DeepSpeed" in caplog.text and "names that it needs are there" in caplog.text
    versions.check_untried([], ["DeepSpeedZeroOptimizer.bit16_groups (loading)"])
    assert "loads that need these are refused: DeepSpeedZeroOptimizer.bit16_groups" in caplog.text
    with pytest.raises(UnsupportedError, match=r"Engine\.load_checkpoint"):
        versions.check_untried(["DeepSpeedEngine.load_checkpoint (install())"], [])


def test_what_was_tried_is_told_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "CELLS", ("ZeRO-3", "pipeline"))
    monkeypatch.setattr(versions, "RELEASES", {"0.19.8": ("pipeline",)})
    assert versions.cells_of("0.19.8+cafe123") == {"ZeRO-3": True, "pipeline": False}
    assert versions.cells_of("0.19.80") is None


def test_a_known_bug_is_told_of_its_versions_only() -> None:
    assert any("resume its weights" in text for text in versions.known_bugs("0.17.6"))
    assert versions.known_bugs("0.19.8") == [] == versions.known_bugs(None)

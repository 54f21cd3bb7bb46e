"""Checkpoints of which no name is in the live model: refused, and restored once the error's own lines are followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Convert, Launch
from tests.distributed.model import Setup

SOURCES = {
    "stage0": {"model": "model", "setup": Setup(0)},
    "stage1": {"model": "model", "setup": Setup(1)},
    "stage3": {"model": "model", "setup": Setup(3, "bf16")},
    "adapter": {"model": "default", "setup": Setup(3), "bare": True},
    "adapter with its base": {"model": "default", "setup": Setup(3)},
    "full": {"model": "plain", "setup": Setup(1)},
}
WRAPPED, ADAPTERS, INTO_BASE = ("model.", "language_model."), (".default.", ".other."), ("", "base.")
ALONE, WITHOUT_STATES = {"load_module_only": True}, {"load_optimizer_states": False}
#: Source, live model, live engine, what a name becomes, and more of a case.
CASES: list[tuple[str, str, Setup, tuple[str, str], dict[str, Any]]] = [
    ("stage0", "language_model", Setup(3), WRAPPED, {}),
    ("stage1", "language_model", Setup(0), WRAPPED, {}),
    ("stage1", "language_model", Setup(2), WRAPPED, {"arguments": ALONE}),
    ("stage3", "language_model", Setup(3, "bf16"), WRAPPED, {"arguments": WITHOUT_STATES}),
    ("stage3", "language_model", Setup(2, "bf16"), WRAPPED, {}),
    ("universal", "language_model", Setup(3), WRAPPED, {"universal": True}),
    ("adapter", "other", Setup(2), ADAPTERS, {"bare": True}),
    ("adapter with its base", "other", Setup(2), ADAPTERS, {"arguments": ALONE}),
    ("full", "default", Setup(2), INTO_BASE, {"frozen": True}),
    ("full", "default", Setup(3), INTO_BASE, {"frozen": True, "arguments": ALONE}),
]


@pytest.fixture(scope="module")
def saved(launch: Launch, convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "nothing_matched_jobs.save", [{**case, "folder": str(folder / name)} for name, case in SOURCES.items()])
    folders = {name: folder / name for name in SOURCES}
    folders["universal"] = tmp_path_factory.mktemp("universal") / "stage1"
    convert(folder, folders["universal"].parent, ["stage1"])
    return folders


def test_the_lines_of_the_error_restore_what_it_refuses(launch: Launch, saved: dict[str, Path]) -> None:
    cases = [
        {"folder": str(saved[source]), "model": model, "setup": setup, "names": names, **more}
        for source, model, setup, names, more in CASES
    ]
    for refused, loaded in launch(3, "nothing_matched_jobs.load", cases):
        assert refused.kinds[0] == "MismatchError" and len(refused.texts) == 1, refused
        assert refused.changed == frozenset(), refused
        assert loaded.differences == {}, loaded.where
        share, is_frozen = loaded.report.share, loaded.case.get("frozen", False)
        assert share.of_trained == (0.0 if is_frozen else 1.0), loaded.where
        assert ("WARNING: only 0 %" in str(loaded.report).splitlines()[0]) == is_frozen, loaded.text


def test_a_pipeline_stage_of_which_nothing_matches_is_no_error_where_another_has_something(
    launch: Launch, tmp_path: Path
) -> None:
    loaded, refused = launch(2, "nothing_matched_jobs.pipeline", str(tmp_path))[:2]
    assert loaded.texts == {"loaded without an error"} and loaded.changed
    assert refused.kinds[0] == "MismatchError" and len(refused.texts) == 1
    assert refused.changed == frozenset()

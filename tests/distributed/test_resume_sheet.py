"""Resume sheets of real runs: what deviates is named, in the report of a load and by ``elastic-ckpt explain``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.core.resume_sheet import LOSSES, OPTIMIZER, SHEET, WEIGHTS
from tests.distributed.conftest import Launch
from tests.distributed.resume_jobs import FAULTS, LAST, SAVED_AT

#: What a load sees by itself; the other faults come after it.
SEEN_BY_A_LOAD = {
    "batch": "batch: 12 -> 24",
    "precision": "precision: fp32 -> bf16",
    "code versions": "code versions: numpy",
}


def explain(*folders: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["explain", *map(str, folders), "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert result.exit_code == bool(found.get("deviations") or found.get("changes"))
    return found


@pytest.fixture(scope="module")
def runs(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a run of two ranks and those that went on from it, and what their loads reported."""
    folder = tmp_path_factory.mktemp("runs")
    launch(2, "resume_jobs.uninterrupted", str(folder / "run"))
    arguments = {"source": str(folder / "run"), "folder": str(folder), "faults": list(FAULTS)}
    found = launch(2, "resume_jobs.resumed", arguments)
    assert found[-1].goes_on == "" and found[-1].differs == (), "rank 0 alone reads the sheet"
    launch(1, "resume_jobs.resumed", arguments | {"faults": ["none", "weights"]})
    return folder, {each.fault: each for each in found[:-1]}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_by_its_own_name(fault: str, runs: tuple[Path, dict[str, Any]]) -> None:
    folder, reports = runs
    found = explain(folder / "run", folder / f"{fault}-2")
    assert found["named"] == ([] if fault == "none" else [fault]), found
    assert found["steps"] == [SAVED_AT, LAST]
    # a generator deviates as soon as it is drawn from
    assert found["step"] == {"none": None, "RNG": LAST}.get(fault, SAVED_AT)
    assert (folder / f"{fault}-2" / "first" / SHEET).stat().st_mode == (folder / "run" / "latest").stat().st_mode
    report, expected = reports[fault], SEEN_BY_A_LOAD.get(fault)
    assert [each.startswith(expected or "?") for each in report.differs] == [True] * (expected is not None)
    assert (fault in report.goes_on) == (fault in ("lr", "hyperparameters", "data order"))
    assert "data order (samples_consumed 24, length 10000, seed 3, shuffle True)" in report.goes_on
    assert report.text.rindex("unchanged") > report.text.index("seconds, slowest rank")


def test_later_everything_that_follows_is_named_after_its_cause(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    found = explain(folder / "run" / "second", folder / "lr-2" / "second")
    assert [each["component"] for each in found["deviations"]] == ["lr", WEIGHTS, OPTIMIZER, LOSSES]
    assert found["named"] == ["lr"] and found["step"] == LAST
    both = explain(folder / "run" / "second", folder / "weights-2" / "second")
    assert both["named"][:2] == [WEIGHTS, OPTIMIZER]


def test_other_ranks_round_otherwise_and_are_not_accused(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    found = explain(folder / "run", folder / "none-1")
    assert found["named"] == [] and any("other topologies round" in note for note in found["notes"]), found
    assert explain(folder / "run", folder / "weights-1")["named"] == [WEIGHTS]


def test_of_one_run_it_tells_what_changed_on_the_way(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = runs
    assert explain(folder / "run") == {"steps": [SAVED_AT, LAST], "changes": []}
    for name in ("first", "second"):  # as the Trainer's folders, one for each tag
        shutil.copytree(folder / "run" / name, tmp_path / "output" / f"checkpoint-{name}" / name)
    assert explain(tmp_path / "output") == {"steps": [SAVED_AT, LAST], "changes": []}
    alone = CliRunner().invoke(app, ["explain", str(tmp_path / "output" / "checkpoint-second")])
    assert "nothing to compare" in alone.output
    shutil.copytree(folder / "run" / "first", tmp_path / "first")
    shutil.copytree(folder / "batch-2" / "second", tmp_path / "second")
    (change,) = explain(tmp_path)["changes"]
    assert change == {"first": SAVED_AT, "second": LAST, "deviation": {"component": "batch", "detail": "12 -> 24"}}


def test_without_sheets_tensors_and_hyperparameters_are_compared(
    runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = runs
    for fault in ("run", "lr-2", "hyperparameters-2"):
        shutil.copytree(folder / fault / "first", tmp_path / fault)
        (tmp_path / fault / SHEET).unlink()
    (tmp_path / "run" / SHEET).write_text("{")
    lr = explain(tmp_path / "run", tmp_path / "lr-2")
    assert lr["named"] == ["lr"] and len(lr["notes"]) == 2 and "cannot be read" in lr["notes"][0]
    assert explain(tmp_path / "run", tmp_path / "hyperparameters-2")["named"] == ["hyperparameters"]
    text = CliRunner().invoke(app, ["explain", str(folder / "run"), str(folder / "lr-2")])
    assert "the first of 2 common steps to deviate: lr" in text.stdout
    apart = CliRunner().invoke(app, ["explain", str(folder / "run" / "first"), str(folder / "run" / "second")])
    assert apart.exit_code == 3 and "no step in common" in apart.output
    verified = CliRunner().invoke(app, ["verify", str(folder / "run" / "first")])
    assert verified.exit_code == 0 and "none of DeepSpeed" not in verified.output


def test_a_sheet_makes_neither_a_save_nor_a_load_fail(launch: Launch, tmp_path: Path) -> None:
    found, other = launch(2, "resume_jobs.without", str(tmp_path))
    assert not found.off and "could not write the resume sheet" in found.unwritten
    assert found.left == [SHEET] and other.unwritten == ""
    (same, differs, said), stale, whole = (found.said[kind] for kind in ("broken", "stale", "whole"))
    assert (same, differs) == ("", ()) and "could not compare the resume sheet" in said
    assert stale[:2] == ("", ("not compared: the resume sheet is one of step 7",))
    assert whole[0].startswith("batch 12, lr 0.01, 0.003, hyperparameters") and whole[1:] == ((), "")
    assert found.said["weights alone"] == ("", (), "")

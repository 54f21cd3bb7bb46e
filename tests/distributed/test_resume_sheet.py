"""Resume sheets of real runs: what deviates is named, in the report of a load and by ``elastic-ckpt explain``.

What only the command reads starts no ranks of its own: these tests take the saves of the cells.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.core.resume_sheet import LOSSES, OPTIMIZER, SHEET, WEIGHTS
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.resume_jobs import FAULTS, LAST, SAVED_AT

RUN = Save("run", 2, "resume_jobs.uninterrupted")


def resumed(fault: str, ranks: int = 2) -> Save:
    """A run that goes on from :data:`RUN` with a fault."""
    return Save(fault, ranks, "resume_jobs.resumed", source=RUN)


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


@cells([Cell(fault, resumed(fault), "noted", 1) for fault in FAULTS])
def test_each_fault_is_named_by_its_own_name(cell: Cell, facts: list[Any], saves: Saves) -> None:
    (report,), fault = facts, cell.name
    run, folder = saves.folder(RUN), saves.folder(resumed(fault))
    found = explain(run, folder)
    assert found["named"] == ([] if fault == "none" else [fault]), found
    assert found["steps"] == [SAVED_AT, LAST]
    # a generator deviates as soon as it is drawn from
    assert found["step"] == {"none": None, "RNG": LAST}.get(fault, SAVED_AT)
    assert (folder / "first" / SHEET).stat().st_mode == (run / "latest").stat().st_mode
    expected = SEEN_BY_A_LOAD.get(fault)
    assert [each.startswith(expected or "?") for each in report.differs] == [True] * (expected is not None)
    assert (fault in report.goes_on) == (fault in ("lr", "hyperparameters", "data order"))
    assert "data order (samples_consumed 24, length 10000, seed 3, shuffle True)" in report.goes_on
    assert report.text.rindex("unchanged") > report.text.index("seconds, slowest rank")
    assert report.of_others == [("", ())], "rank 0 alone reads the sheet"


def test_later_everything_that_follows_is_named_after_its_cause(saves: Saves) -> None:
    run, lr, weights = (saves.folder(save) / "second" for save in (RUN, resumed("lr"), resumed("weights")))
    found = explain(run, lr)
    assert [each["component"] for each in found["deviations"]] == ["lr", WEIGHTS, OPTIMIZER, LOSSES]
    assert found["named"] == ["lr"] and found["step"] == LAST
    assert explain(run, weights)["named"][:2] == [WEIGHTS, OPTIMIZER]


def test_other_ranks_round_otherwise_and_are_not_accused(saves: Saves) -> None:
    run, none, weights = (saves.folder(save) for save in (RUN, resumed("none", 1), resumed("weights", 1)))
    found = explain(run, none)
    assert found["named"] == [] and any("other topologies round" in note for note in found["notes"]), found
    assert explain(run, weights)["named"] == [WEIGHTS]


def test_of_one_run_it_tells_what_changed_on_the_way(saves: Saves, tmp_path: Path) -> None:
    run = saves.folder(RUN)
    assert explain(run) == {"steps": [SAVED_AT, LAST], "changes": []}
    for name in ("first", "second"):  # as the Trainer's folders, one for each tag
        shutil.copytree(run / name, tmp_path / "output" / f"checkpoint-{name}" / name)
    assert explain(tmp_path / "output") == {"steps": [SAVED_AT, LAST], "changes": []}
    alone = CliRunner().invoke(app, ["explain", str(tmp_path / "output" / "checkpoint-second")])
    assert "nothing to compare" in alone.output
    shutil.copytree(run / "first", tmp_path / "first")
    shutil.copytree(saves.folder(resumed("batch")) / "second", tmp_path / "second")
    (change,) = explain(tmp_path)["changes"]
    assert change == {"first": SAVED_AT, "second": LAST, "deviation": {"component": "batch", "detail": "12 -> 24"}}


def test_without_sheets_tensors_and_hyperparameters_are_compared(saves: Saves, tmp_path: Path) -> None:
    run, lr, hyperparameters = tmp_path / "run", tmp_path / "lr", tmp_path / "hyperparameters"
    whole = {run: RUN, lr: resumed("lr"), hyperparameters: resumed("hyperparameters")}
    for copy, save in whole.items():
        shutil.copytree(saves.folder(save) / "first", copy)
        (copy / SHEET).unlink()
    (run / SHEET).write_text("{")
    found = explain(run, lr)
    assert found["named"] == ["lr"] and len(found["notes"]) == 2 and "cannot be read" in found["notes"][0]
    assert explain(run, hyperparameters)["named"] == ["hyperparameters"]


def test_what_it_says_of_two_runs_of_steps_in_common_and_of_none(saves: Saves) -> None:
    run, lr = saves.folder(RUN), saves.folder(resumed("lr"))
    text = CliRunner().invoke(app, ["explain", str(run), str(lr)])
    assert "the first of 2 common steps to deviate: lr" in text.stdout
    apart = CliRunner().invoke(app, ["explain", str(run / "first"), str(run / "second")])
    assert apart.exit_code == 3 and "no step in common" in apart.output
    verified = CliRunner().invoke(app, ["verify", str(run / "first")])
    assert verified.exit_code == 0 and "none of DeepSpeed" not in verified.output


@cells([Cell("ZeRO-3", None, "resume_jobs.without", 2)])
def test_a_sheet_makes_neither_a_save_nor_a_load_fail(cell: Cell, facts: list[Any]) -> None:
    found, other = facts
    assert not found.off and "could not write the resume sheet" in found.unwritten
    assert found.left == [SHEET] and other.unwritten == ""
    (same, differs, said), stale, whole = (found.said[kind] for kind in ("broken", "stale", "whole"))
    assert (same, differs) == ("", ()) and "could not compare the resume sheet" in said
    assert stale[:2] == ("", ("not compared: the resume sheet is one of step 7",))
    assert whole[0].startswith("batch 12, lr 0.01, 0.003, hyperparameters") and whole[1:] == ((), "")
    assert found.said["weights alone"] == ("", (), "")

"""Another lr scheduler than at the save: one that is not restored restarts from the live lr; none is half restored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.other_schedule_jobs import MORE, SCHEDULES, fresh_rates

KEEP_LIVE = {"param_groups": "keep_live"}
WITHOUT = {"load_lr_scheduler_states": False}
#: Saved and live schedule, and the config.
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("WarmupLR", "SequentialLR", {}),
    ("OneCycle", "SequentialLR", {}),
    ("OneCycleLR", "SequentialLR", {}),
    ("SequentialLR", "WarmupLR", {}),
    ("WarmupLR", "CosineAnnealingLR", {}),
    ("LambdaLR", "CosineAnnealingLR", KEEP_LIVE),
    ("SequentialLR", "LinearLR", {}),
]
ADDED = [("none", schedule) for schedule in SCHEDULES if schedule != "none"]
ASKED = [(was, now) for was, now, _ in REFUSED] + [("LambdaLR", "LambdaLR"), ("SequentialLR", "SequentialLR")]


def saved(schedule: str) -> Save:
    return Save(schedule, job="other_schedule_jobs.save")


def resumed(was: str, now: str, number: int, **case: Any) -> Cell:
    """Another schedule, in ZeRO-1 and 3 by turns."""
    case |= {"now": now, "stage": 3 if number % 2 else 1}
    return Cell(f"{was} to {now}", saved(was), "other_schedule_jobs.resume", 2, case)


def refused(was: str, now: str, number: int, section: dict[str, Any]) -> Cell:
    cell = resumed(was, now, number, section=section)
    return replace(cell, fits=(cell.save, {**cell.case, "now": was}))


@cells([refused(was, now, number, section) for number, (was, now, section) in enumerate(REFUSED)])
def test_the_state_of_another_class_is_refused_before_anything_changes(cell: Cell, facts: list[Any]) -> None:
    first, second = facts
    assert first.error == second.error and first.error.startswith("MismatchError"), first.error
    was, now = cell.name.split(" to ")
    assert now in first.error and (was in first.error or "of DeepSpeed" in first.error)
    assert "load_lr_scheduler_states=False" in first.remedy
    assert not first.changed and not second.changed


@cells(
    [resumed(was, now, number) for number, (was, now) in enumerate(ADDED, start=1)]
    + [resumed(was, now, number, arguments=WITHOUT) for number, (was, now) in enumerate(ASKED)]
)
def test_a_schedule_that_is_not_restored_begins_with_the_live_rates(cell: Cell, facts: list[Any]) -> None:
    """Also what the remedy of the refusals says."""
    for each in facts:
        assert each.error == ""
        expected = fresh_rates(cell.case["now"])
        if cell.name.startswith("OneCycle "):  # no state of DeepSpeed's says that momenta were cycled: the report does
            last = each.saved[0]
            expected = [[(lr, last[0][1], start) for lr, _, start in rates] for rates in expected]
            assert "betas" in each.text
        assert each.rates == expected and len(expected) == MORE
    assert "restarts from the live lr" in facts[0].text


@cells([resumed("LambdaLR", "none", 1)])
def test_without_a_live_schedule_the_lr_is_that_of_the_checkpoint(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.rates == each.saved[:1] * MORE


@cells([resumed("none", "SequentialLR", 0, outside=True), resumed("WarmupLR", "OneCycleLR", 1, outside=True)])
def test_so_does_one_outside_of_the_engine_that_is_new(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.rates == fresh_rates(cell.case["now"])
        assert "is new since the save" in each.text


@cells([resumed("LambdaLR", "LambdaLR", 0, outside=True)])
def test_one_outside_of_the_engine_that_the_script_would_restore_has_the_saved_lr(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.rates[0] == each.saved[0]
        assert "is new since the save" not in each.text

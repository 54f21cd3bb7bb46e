"""Schedules that a script restores itself: each param group goes on with its own rates, wherever it is now."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from elastic_ckpt.core.text import counted
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.hand_schedule_jobs import (
    FACTOR,
    FLOORS,
    GROUPINGS,
    KEEP_LIVE,
    MERGED_RATE,
    MORE,
    RATES,
    STEPS,
)

JOB = "hand_schedule_jobs.save"
BEFORE, AFTER = ("restore", "load"), ("load", "restore")
WITHOUT = {"load_lr_scheduler_states": False}
#: Of torch, which an engine need not know.
OUTSIDE = ["LambdaLR", "StepLR", "Whole", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"]


def save_of(schedule: str, is_own: bool) -> Save:
    return Save(schedule, job=JOB, more={"is_own": is_own})


def cell_of(schedule: str, grouping: str, is_own: bool, number: int, order: tuple[str, ...], **more: Any) -> Cell:
    case = {"schedule": schedule, "grouping": grouping, "is_own": is_own, "order": order, **more}
    name = f"{schedule} {grouping} {'-'.join(order)}"
    stage = 3 if number % 2 else 1
    return Cell(name, save_of(schedule, is_own), "hand_schedule_jobs.resume", 2 + number % 2, {"stage": stage, **case})


#: A schedule of more lambdas than there are groups cannot be restored before the load.
TOO_MANY = [("LambdaLR", "one fewer"), ("SequentialLR", "one fewer")]
EARLY = [
    cell_of(schedule, grouping, False, number, BEFORE)
    for number, (schedule, grouping) in enumerate(product(OUTSIDE, GROUPINGS))
    if (schedule, grouping) not in TOO_MANY
]
BOTH = [
    cell_of(schedule, "reversed", False, number, ("restore", "load", "restore"))
    for number, schedule in enumerate(("LambdaLR", "ReduceLROnPlateau"))
]


@cells([*EARLY, *BOTH])
def test_a_schedule_that_is_restored_before_the_load_goes_on(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.differences == {}, each.differences
        assert each.lines == []
    first, *_ = facts
    groups = len(GROUPINGS[cell.case["grouping"]])
    assert first.differs == ((f"hyperparameters: 2 -> {counted(groups, 'param group')}",) if groups != 2 else ())
    assert first.goes_on.split(", ")[1].startswith("lr ")


@cells(
    [
        replace(cell_of(*pair, False, number, AFTER), job="hand_schedule_jobs.restore_first")
        for number, pair in enumerate(TOO_MANY)
    ]
)
def test_a_schedule_of_more_lambdas_than_groups_is_restored_after_the_load(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "MismatchError" and each.is_same
        assert "after load_checkpoint" in each.error.remedy
        assert each.differences == {}, each.differences


#: With the states left out, groups keep their live values anyway, and the schedule's lists have an order all the same.
WITHOUT_STATES = [
    cell_of(schedule, grouping, False, number, order, arguments={"load_optimizer_states": False})
    for number, (schedule, grouping, order) in enumerate(
        product(("LambdaLR", "ReduceLROnPlateau"), ("reversed", "split"), (AFTER, BEFORE))
    )
]


@cells(WITHOUT_STATES)
def test_a_schedule_is_put_in_order_where_states_are_left_out(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        # the first step has the live rate
        later = {at: pair for at, pair in each.differences.items() if at[0] > 0}
        assert later == {}, later


def merging(schedule: str, order: tuple[str, ...], number: int, arguments: dict[str, Any]) -> Cell:
    case = {"schedule": schedule, "order": order, "stage": 3 if number % 2 else 1, "arguments": arguments}
    return Cell(f"{schedule} {'-'.join(order)}", save_of(schedule, False), "hand_schedule_jobs.merge", 2, case)


MERGES = [
    merging("LambdaLR", AFTER, 0, {}),
    merging("StepLR", AFTER, 1, {}),
    merging("StepLR", BEFORE, 2, {}),
    merging("ReduceLROnPlateau", AFTER, 3, {}),
]


@cells(MERGES)
def test_groups_that_were_merged_go_on_as_the_remedy_says(cell: Cell, facts: list[Any]) -> None:
    later = range(STEPS + 1, STEPS + MORE)
    rates = {
        "LambdaLR": [MERGED_RATE * 0.5 ** (step / (500 * MERGED_RATE)) for step in later],
        "StepLR": [MERGED_RATE / 2, MERGED_RATE / 2, MERGED_RATE / 4],
        "ReduceLROnPlateau": [1e-3, 1e-3, 1e-3],
    }[cell.case["schedule"]]
    for each in facts:
        assert each.refused.kinds[:1] == ("MismatchError",) and not each.refused.changed
        assert each.rates == pytest.approx([MERGED_RATE, *rates])


#: Of an engine, which is told to leave it; a schedule of DeepSpeed keeps nothing by group.
OWN = [
    cell_of(schedule, grouping, True, number, order, arguments=WITHOUT)
    for number, (schedule, grouping, order) in enumerate(
        [
            *product(("StepLR", "CosineAnnealingLR"), GROUPINGS, (AFTER, BEFORE)),
            *product(("LambdaLR", "Whole"), ("as saved", "reversed", "split"), (AFTER, BEFORE)),
            *product(("WarmupLR", "OneCycle"), ("as saved",), (AFTER, BEFORE)),
        ]
    )
]


@cells(OWN)
def test_an_engines_schedule_that_is_restored_by_hand_has_the_saved_rates(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.differences == {}, each.differences
        begins_anew = "restarts from the live lr" in each.text
        assert begins_anew == (cell.case["order"] == AFTER)
        assert ("was restored before the load" in each.text) != begins_anew
    first, *_ = facts
    is_same = ", lr " in first.goes_on
    assert is_same != any(each.startswith("lr: ") for each in first.differs)
    assert is_same == (cell.case["order"] == BEFORE)


def changed(name: str, schedule: str, is_own: bool, expected: Any, **case: Any) -> Cell:
    case = {"schedule": schedule, "is_own": is_own, **case}
    return Cell(name, save_of(schedule, is_own), "hand_schedule_jobs.change_lr", 1, case, expected=expected)


SAVED = list(RATES.values())
NEW = [FACTOR * rate for rate in SAVED]
#: The saved rates at the first of the next steps: of a StepLR, and of a plateau, which is at its floors.
HALVED, PLATEAU = (
    [rate / 2 for rate in SAVED],
    [max(rate / 10**3, floor) for rate, floor in zip(SAVED, FLOORS.values(), strict=True)],
)
#: Rows of the recipe about a new lr: the lr of the first step by param group, that of the second where it is known, and
#: what the report says.
NEW_LR = [
    changed("plateau, anew", "ReduceLROnPlateau", True, (NEW, None, "restarts from the live lr"), arguments=WITHOUT),
    changed("plateau, restored", "ReduceLROnPlateau", True, (PLATEAU, PLATEAU, "")),
    changed("plateau, restored, kept", "ReduceLROnPlateau", True, (PLATEAU, PLATEAU, ""), section=KEEP_LIVE),
    changed("own class, anew", "Whole", True, (NEW, NEW, "restarts from the live lr"), arguments=WITHOUT),
    changed("own class, restored", "Whole", True, (HALVED, [rate / 4 for rate in SAVED], "")),
    changed("framework's", "LambdaLR", False, (None, None, ""), restores=True),
    changed(
        "framework's, kept",
        "LambdaLR",
        False,
        (NEW, None, "LambdaLR outside of the engine sets it"),
        restores=True,
        section=KEEP_LIVE,
    ),
    changed(
        "framework's, from rate to rate",
        "StepLR",
        False,
        (NEW, [rate / 2 for rate in NEW], "StepLR outside of the engine continues"),
        restores=True,
        section=KEEP_LIVE,
    ),
]


@cells(NEW_LR)
def test_a_new_lr_is_taken_as_the_recipe_says(cell: Cell, facts: list[Any]) -> None:
    first, second, said = cell.expected
    for each in facts:
        assert first is None or each.rates[0] == pytest.approx(first)
        assert second is None or each.rates[1] == pytest.approx(second)
        if cell.case.get("restores") and cell.case["schedule"] == "LambdaLR":  # with the old rates in its state
            decay = [0.5 ** ((STEPS + 1) / (500 * rate)) for rate in SAVED]
            assert each.rates[1] == pytest.approx([rate * part for rate, part in zip(SAVED, decay, strict=True)])
        assert said in each.text, each.text


#: What a note on a replaced value says is followed: config, what the schedule begins with, the lr of the first step.
FOLLOWED = [
    changed("engine's", "StepLR", True, (SAVED, HALVED)),
    changed("engine's, kept", "StepLR", True, (NEW, [rate / 2 for rate in NEW]), section=KEEP_LIVE),
    changed("outside", "StepLR", False, (SAVED, HALVED), restores=True),
]


@cells(FOLLOWED)
def test_a_note_on_what_a_schedule_began_with_names_what_keeps_it(cell: Cell, facts: list[Any]) -> None:
    initial, first = cell.expected
    for each in facts:
        assert each.initial == pytest.approx(initial) and each.rates[0] == pytest.approx(first)
        notes = [note for note in each.notes if "replace those of the live run" in note]
        assert len(notes) == ("section" not in cell.case)
        for note in notes:
            assert "initial_lr 0.03 -> 0.01" in note
            assert ('{"param_groups": "keep_live"}' in note) == cell.case["is_own"]
            assert '"fresh"' not in note


def refused(name: str, schedule: str, **case: Any) -> Cell:
    case = {"schedule": schedule, "grouping": "reversed", **case}
    fits = save_of("LambdaLR", False), {"schedule": "LambdaLR", "grouping": "reversed"}
    return Cell(name, save_of(schedule, False), "hand_schedule_jobs.refuse", 2, case, fits=fits)


REFUSED = [
    refused("something by group that is not known", "Boosted"),
    refused("stepped since, on one rank", "LambdaLR", steps_on=1),
    refused("restored before the installation", "LambdaLR", installed=True),
]


@cells(REFUSED)
def test_what_cannot_be_put_in_order_is_refused_before_anything_changes(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        (text,) = each.refused.texts
        assert each.refused.kinds[:1] == ("MismatchError",), text
        assert each.refused.changed == set() and each.is_same
        assert each.refused.lines == ()
        if cell.case["schedule"] == "Boosted":
            assert "boosts" in text and "as they were saved" in text
            assert "boosts" in each.followed
        else:
            assert ("stepped since" if "steps_on" in cell.case else "not at its beginning") in text
            assert "after load_checkpoint" in text and each.followed == ""

"""Changes are drawn on all axes, written down and read again, and reduced to what fails."""

from __future__ import annotations

import random
from dataclasses import fields, replace

from tests.changes.draw import (
    AXES,
    FILES,
    FORMATS,
    GIVEN,
    LOADS,
    Change,
    Script,
    as_json,
    change_of,
    random_change,
    simpler,
)
from tests.drawn import plainest

CHANGES = [random_change(random.Random(seed), 2, 4) for seed in range(1500)]


def test_all_choices_of_all_axes_are_drawn_on_both_sides() -> None:
    for axis, choices in AXES.items():
        assert {getattr(change.loads, axis) for change in CHANGES} == set(choices), axis
        assert {getattr(change.saves, axis) for change in CHANGES} >= set(choices) - (
            {"none"} if axis == "optimizer" else set()
        ), axis
    assert {field.name for field in fields(Script)} == set(AXES)
    for axis, named in (("arguments", LOADS), ("files", FILES), ("given", GIVEN), ("format", FORMATS)):
        assert {getattr(change, axis) for change in CHANGES} == set(named)


def test_scripts_differ_on_each_axis_alone_and_in_twos() -> None:
    assert {change.kinds for change in CHANGES} >= {(axis,) for axis in AXES if axis != "stage"}
    assert {len(change.kinds) for change in CHANGES} >= {0, 1, 2, 3}


def test_a_change_is_read_as_it_was_written() -> None:
    assert all(change_of(as_json(change)) == change for change in CHANGES)


def test_a_failing_change_is_reduced_to_what_it_needs() -> None:
    saves = Script(stage=3, groups="decay", tied=True, more="buffer")
    change = Change(saves, replace(saves, scheduler="none", frozen="norms"), 4, 3, "not strict", given="tag")
    shortest = plainest(change, simpler, lambda other: other.saves.tied and other.loads.frozen == "norms")
    assert shortest == Change(Script(tied=True), Script(tied=True, frozen="norms"))

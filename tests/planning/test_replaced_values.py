"""Which live hyperparameters a load replaces, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.core.read_plan import NO_SCHEDULER, SchedulerPlan
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.replaced_values import describe_replaced
from tests.simulation import ADAM, TWO, live, saved

DEFAULTS = frozenset({"lr", "betas", "eps", "weight_decay", "d", "k", "mode"})
KEEP_ALL = '"elastic_checkpoint": {"param_groups": "keep_live"} for all hyperparameters'


def said(before: Mapping[str, Any], after: Mapping[str, Any], *scheduled: str) -> str:
    state = replace(live(TWO), groups=(LiveGroup(("a.weight",), before),), defaults=DEFAULTS)
    return describe_replaced(state, (after,), SchedulerPlan(bool(scheduled), sets=frozenset(scheduled)))


def test_values_are_shown_with_the_lines_that_keep_them() -> None:
    text = said({"betas": (0.9, 0.95), "eps": 1e-8}, {"betas": (0.9, 0.999), "eps": 1e-8})
    assert text == (
        "saved hyperparameters replace those of the live run (live -> saved): betas (0.9, 0.95) -> (0.9, 0.999) "
        '(param groups 0); to keep the live ones: "elastic_checkpoint": {"states": {"betas": "fresh"}}, or ' + KEEP_ALL
    )


@pytest.mark.parametrize(
    ("before", "after", "scheduled"),
    [
        ({"lr": 0.0}, {"lr": 0.1}, ("lr",)),
        ({"lr": 0.0, "initial_lr": 0.1}, {"lr": 0.1, "initial_lr": 0.1}, ()),  # of a schedule that the engine lacks
        ({"betas": (0.8, 0.99)}, {"betas": (0.9, 0.99)}, ("lr", "betas", "momentum")),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}, ()),
        ({"k": 0, "d": 1e-6}, {"k": 4, "d": 0.3}, ()),  # what the optimizer computes as it steps
        ({"mine": 1}, {"mine": 2}, ()),  # which the optimizer does not know
        ({"eps": 1e-8}, {}, ()),
        ({}, {"eps": 1e-8}, ()),
        ({"mode": object()}, {"mode": object()}, ()),
    ],
)
def test_what_is_equal_or_goes_on_by_itself_is_not_named(
    before: dict[str, Any], after: dict[str, Any], scheduled: tuple[str, ...]
) -> None:
    assert said(before, after, *scheduled) == ""


def test_a_schedule_that_began_at_another_rate_is_kept_as_a_whole_alone() -> None:
    text = said({"initial_lr": 0.2}, {"initial_lr": 0.1}, "lr")
    assert "initial_lr 0.2 -> 0.1" in text and text.endswith(f"to keep the live ones: {KEEP_ALL}")


def test_what_a_schedule_outside_of_the_engine_began_with_is_kept_by_no_line() -> None:
    """Its framework restores it, and it goes on from the rates in its own state."""
    text = said({"initial_lr": 0.2}, {"initial_lr": 0.1})
    assert "initial_lr 0.2 -> 0.1" in text and "elastic_checkpoint" not in text
    assert text.endswith(
        "initial_lr is in the state of the schedule outside of the engine, too, which continues from that"
    )


@pytest.mark.parametrize("scheduled", [(), ("lr",)])
def test_a_line_is_said_to_keep_what_it_keeps(scheduled: tuple[str, ...]) -> None:
    text = said({"initial_lr": 0.2, "eps": 1e-8}, {"initial_lr": 0.1, "eps": 1e-6}, *scheduled)
    assert f'; to keep the live eps: "elastic_checkpoint": {{"states": {{"eps": "fresh"}}}}, or {KEEP_ALL}' in text


def test_groups_that_change_alike_are_named_together() -> None:
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAM, ADAM))
    other = {**ADAM, "weight_decay": 0.25}
    groups = tuple(LiveGroup((name,), other) for name in ("a.weight", "b.weight"))
    state = replace(live(TWO), groups=groups, defaults=frozenset(ADAM))
    plan = plan_load(metadata, state, LoadOptions())
    (note,) = [note for note in plan.notes if "replace those" in note]
    assert plan.replaces_live_values and "weight_decay 0.25 -> 0.01 (param groups 0, 1)" in note
    kept = plan_load(metadata, state, LoadOptions(ElasticConfig(states={"weight_decay": "fresh"})))
    assert not kept.replaces_live_values and not [note for note in kept.notes if "replace those" in note]
    assert kept.hyperparameters[0]["weight_decay"] == 0.25


RESTORED, WITH_LAMBDA = SchedulerPlan(is_restored=True), SchedulerPlan(sets_rates=("LambdaLR",))


@pytest.mark.parametrize(
    ("values", "scheduler", "said"),
    [
        ({}, NO_SCHEDULER, "hyperparameters of the live group stay"),
        ({}, RESTORED, "but for what the restored lr scheduler sets"),
        ({"initial_lr": 0.1}, RESTORED, "but for what the restored lr scheduler sets"),
        ({"initial_lr": 0.1}, WITH_LAMBDA, "until LambdaLR outside of the engine sets it after the first step"),
        ({"initial_lr": 0.1}, replace(WITH_LAMBDA, goes_on=("Own",)), "from which Own outside of the engine continues"),
        ({"initial_lr": 0.1}, NO_SCHEDULER, "unless that continues from it"),
    ],
)
def test_groups_that_keep_their_values_say_whose_lr_the_first_step_has(
    values: dict[str, Any], scheduler: SchedulerPlan, said: str
) -> None:
    metadata = saved(TWO, hyperparameters=(ADAM,))
    state = replace(live(TWO), groups=(LiveGroup(("a.weight", "b.weight"), {**ADAM, **values}),))
    options = LoadOptions(ElasticConfig(param_groups="keep_live"), scheduler=scheduler)
    (outcome,) = [each for each in plan_load(metadata, state, options).outcomes if each.role == "param groups"]
    assert outcome.what == "fresh" and said in outcome.reason


def test_of_betas_the_first_alone_is_a_schedules() -> None:
    """torch's OneCycleLR and CyclicLR set the first, and leave the second."""
    state = replace(live(TWO), groups=(LiveGroup(("a.weight",), {"betas": (0.9, 0.95)}),), defaults=DEFAULTS)
    plan = SchedulerPlan(is_restored=True, sets=frozenset({"lr", "momentum"}), sets_first_beta=True)
    assert describe_replaced(state, ({"betas": (0.85, 0.95)},), plan) == ""
    assert "betas (0.9, 0.95) -> (0.9, 0.999)" in describe_replaced(state, ({"betas": (0.85, 0.999)},), plan)

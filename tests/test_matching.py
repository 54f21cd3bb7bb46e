"""Rules of matching that keep a resume from being wrong in silence: groups, kinds of weight decay, tied names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.catalog import MASTER
from elastic_ckpt.destinations import Destinations, LiveGroup
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.progress import compare_progress
from elastic_ckpt.planner import LoadOptions, plan_load
from tests.test_planner import ADAM, TWO, live, saved

SLOW = {**ADAM, "lr": 1e-4}
WITH_SCHEDULER = LoadOptions(scheduler=True)


def two_groups(order: Sequence[Sequence[str]]) -> tuple[Any, Destinations]:
    catalog = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAM, SLOW))
    return catalog, live(TWO, groups=order)


def with_live_hyperparameters(engine: Destinations, values: Mapping[str, Any]) -> Destinations:
    groups = tuple(LiveGroup(group.names, {**group.hyperparameters, **values}) for group in engine.groups)
    return replace(engine, groups=groups)


def test_groups_in_the_saved_order_may_have_a_scheduler() -> None:
    plan = plan_load(*two_groups([["a.weight"], ["b.weight"]]), WITH_SCHEDULER)
    assert [values["lr"] for values in plan.hyperparameters] == [1e-3, 1e-4]


def test_groups_in_another_order_keep_their_own_hyperparameters() -> None:
    plan = plan_load(*two_groups([["b.weight"], ["a.weight"]]), LoadOptions())
    assert [values["lr"] for values in plan.hyperparameters] == [1e-4, 1e-3]


def test_groups_in_another_order_are_refused_where_a_scheduler_would_mix_up_their_rates() -> None:
    with pytest.raises(MismatchError, match="rebuilt") as caught:
        plan_load(*two_groups([["b.weight"], ["a.weight"]]), WITH_SCHEDULER)
    assert "load_lr_scheduler_states=False" in str(caught.value.remedy)


def test_merged_groups_are_refused_where_a_scheduler_keeps_a_rate_for_each() -> None:
    catalog = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAM, ADAM))
    assert plan_load(catalog, live(TWO), LoadOptions()).hyperparameters == (ADAM,)
    with pytest.raises(MismatchError, match="rebuilt"):
        plan_load(catalog, live(TWO), WITH_SCHEDULER)


@pytest.mark.parametrize("was", [True, False])
def test_adam_for_adamw_is_refused_although_both_keep_the_same_states(was: bool) -> None:
    catalog = saved(TWO, hyperparameters=({**ADAM, "decoupled_weight_decay": was},))
    same = with_live_hyperparameters(live(TWO), {"decoupled_weight_decay": was})
    other = with_live_hyperparameters(live(TWO), {"decoupled_weight_decay": not was})
    assert "decoupled_weight_decay" not in plan_load(catalog, same, LoadOptions()).hyperparameters[0]
    with pytest.raises(MismatchError, match="weight decay"):
        plan_load(catalog, other, LoadOptions())


def test_a_tied_parameter_is_found_under_another_of_its_live_names() -> None:
    engine = replace(live({"head": (2, 5)}), ties={"head": ("embedding",)})
    plan = plan_load(saved({"embedding": (2, 5)}), engine, LoadOptions())
    assert sum(copy.numel for copy in plan.copies) == 30
    assert {slot.key for slot in plan.slots} >= {MASTER}
    assert any("embedding" in note and "head" in note for note in plan.notes)


def test_a_tied_parameter_is_not_taken_from_a_name_of_its_own() -> None:
    """Untied at save time: two parameters, of which a tied live model can take only its own."""
    engine = replace(live({"head": (2, 5)}), ties={"head": ("embedding",)})
    with pytest.raises(MismatchError) as caught:
        plan_load(saved({"embedding": (2, 5), "head": (2, 5)}), engine, LoadOptions())
    assert "embedding" in str(caught.value.found)


@pytest.mark.parametrize(("skipped", "agrees"), [(0, False), (1, True)])
def test_step_counts_are_compared_with_the_counters(skipped: int, agrees: bool) -> None:
    parameters = saved(TWO, scalars=dict.fromkeys(TWO, (("step", 7.0),))).parameters
    counters = {"global_steps": 8, "skipped_steps": skipped}
    if agrees:
        assert compare_progress(parameters, counters, "file", refuse=True) == ()
        return
    assert "step 7" in compare_progress(parameters, counters, "file", refuse=False)[0]
    with pytest.raises(Exception, match="different steps"):
        compare_progress(parameters, counters, "file", refuse=True)

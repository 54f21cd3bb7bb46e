"""Param groups that were merged, split, put in another order or built anew: whose hyperparameters they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveGroup, LocalState
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata
from elastic_ckpt.core.read_plan import SchedulerPlan
from elastic_ckpt.core.values import LeftInFile
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.planning.param_groups import match_groups, transferable, with_first_beta
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import ADAM, TWO, live, names_of, saved

SLOW = {**ADAM, "lr": 1e-4}
KEEP_LIVE = LoadOptions(ElasticConfig(param_groups="keep_live"))


def two_groups(
    order: Sequence[Sequence[str]], hyperparameters: Sequence[Mapping[str, Any]] = (ADAM, SLOW)
) -> tuple[CheckpointMetadata, LocalState]:
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=hyperparameters)
    return metadata, live(TWO, groups=order)


def with_live_hyperparameters(engine: LocalState, values: Mapping[str, Any]) -> LocalState:
    groups = tuple(LiveGroup(group.names, {**group.hyperparameters, **values}) for group in engine.groups)
    return replace(engine, groups=groups)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[CheckpointMetadata, LocalState]:
    """Parameters dealt out into saved and into live groups, some of them on one side only."""
    names = [f"p{number}" for number in range(draw(st.integers(1, 6)))]
    was = {name: draw(st.integers(0, 2)) for name in names}
    now = {name: draw(st.integers(0, 3)) for name in [*names, "new"]}
    rates = draw(st.lists(st.sampled_from([1e-3, 1e-4]), min_size=3, max_size=3))
    metadata = saved(dict.fromkeys(names, (1,)), groups=was, hyperparameters=[{**ADAM, "lr": rate} for rate in rates])
    groups = [[name for name in now if now[name] == number] for number in range(4)]
    return metadata, live(dict.fromkeys(now, (1,)), groups=groups)


@given(regrouped())
def test_every_live_group_takes_the_values_that_all_its_members_had(
    case: tuple[CheckpointMetadata, LocalState],
) -> None:
    metadata, engine = case
    was = [[metadata.parameters[name].group for name in group.names if name != "new"] for group in engine.groups]
    if any(len({metadata.groups[source]["lr"] for source in sources}) > 1 for sources in was):
        with pytest.raises(MismatchError, match="different hyperparameters"):
            match_groups(metadata, engine, keep_live=False)
    else:
        found, hyperparameters = match_groups(metadata, engine, keep_live=False)
        assert len(found) == len(hyperparameters) == 4
        for sources, source, values in zip(was, found, hyperparameters, strict=True):
            assert source == tuple(sorted(set(sources)))
            assert values == (metadata.groups[source[0]] if source else {})


def test_groups_in_another_order_keep_their_own_hyperparameters() -> None:
    plan = plan_load(*two_groups([["b.weight"], ["a.weight"]]), LoadOptions())
    assert [values["lr"] for values in plan.hyperparameters] == [1e-4, 1e-3]
    assert plan.group_sources == ((1,), (0,))
    assert plan.saved_groups == 2
    assert names_of(plan, "param groups", "restored") == ("0", "1")


def test_groups_that_the_checkpoint_does_not_record_are_in_the_order_of_the_live_ones() -> None:
    """For an lr scheduler beside weights alone; a user who keeps the live groups keeps their rates."""
    metadata, engine = two_groups([["a.weight"], ["b.weight"]])
    metadata = replace(metadata, groups=(), parameters={})
    assert match_groups(metadata, engine, False, with_states=False)[0] == ((0,), (1,))
    assert match_groups(metadata, engine, True, with_states=False)[0] == ((), ())


def test_a_group_that_was_split_gives_both_halves_its_values() -> None:
    plan = plan_load(saved(TWO, hyperparameters=(SLOW,)), live(TWO, groups=[["b.weight"], ["a.weight"]]), LoadOptions())
    assert plan.hyperparameters == (SLOW, SLOW)
    assert (plan.group_sources, plan.saved_groups) == (((0,), (0,)), 1)


def test_groups_with_the_same_values_may_be_merged() -> None:
    plan = plan_load(*two_groups([["a.weight", "b.weight"]], (ADAM, dict(ADAM))), LoadOptions())
    assert (plan.group_sources, plan.saved_groups) == (((0, 1),), 2)
    assert plan.hyperparameters == (ADAM,)


def test_merged_groups_with_different_values_are_refused_with_both_and_the_way_out() -> None:
    with pytest.raises(MismatchError, match="param group 0 ") as caught:
        plan_load(*two_groups([["b.weight", "a.weight"]]), LoadOptions())
    found = str(caught.value.found)
    assert found == (
        "saved group 0, 1 parameter such as a.weight: {'lr': 0.001}; "
        "saved group 1, 1 parameter such as b.weight: {'lr': 0.0001}"
    )
    assert caught.value.parameter == "b.weight"  # the live rate is the other's
    (remedy,) = (each for each in caught.value.remedies if each.is_data)
    assert remedy.config == {"param_groups": "keep_live"}
    assert "keeps {'lr': 0.001} for all 2 parameters, which changes 1 of them" in remedy.text


@pytest.mark.parametrize("other", [{}, {"weight_decay": 0.5}])
def test_an_lr_that_a_restored_schedule_sets_is_not_said_to_be_kept(other: dict[str, Any]) -> None:
    options = LoadOptions(scheduler=SchedulerPlan(is_restored=True, sets=frozenset({"lr"})))
    with pytest.raises(MismatchError, match="param group 0 ") as caught:
        plan_load(*two_groups([["b.weight", "a.weight"]], (ADAM, SLOW | other)), options)
    (remedy,) = (each for each in caught.value.remedies if each.is_data)
    assert "0.001" not in remedy.text and "one lr, that of the restored lr scheduler" in remedy.text
    assert ("keeps {'weight_decay': 0.01} for all 2 parameters, and" in remedy.text) == bool(other)


def test_hyperparameters_that_were_not_read_are_refused_where_they_are_restored() -> None:
    case = two_groups([["a.weight"], ["b.weight"]], (ADAM, {**SLOW, "mine": [LeftInFile("a tensor")]}))
    with pytest.raises(UnsupportedError, match='"mine" of a param group') as caught:
        plan_load(*case, LoadOptions())
    assert (caught.value.parameter, caught.value.file) == ("b.weight", case[0].source.folder)
    plans = [
        plan_load(*case, options)
        for options in (KEEP_LIVE, LoadOptions(optimizer_states=False, scheduler=SchedulerPlan(is_restored=True)))
    ]
    assert [plan.restores_states for plan in plans] == [True, False]


@pytest.mark.parametrize("other", ["a.weight", "b.weight", "c"])
def test_one_saved_group_of_three_that_differs_is_enough_to_refuse(other: str) -> None:
    three = {**TWO, "c": (1,)}
    hyperparameters = [SLOW if name == other else ADAM for name in three]
    metadata = saved(three, groups={name: n for n, name in enumerate(three)}, hyperparameters=hyperparameters)
    with pytest.raises(MismatchError) as caught:
        plan_load(metadata, live(three), LoadOptions())
    assert str(caught.value.found).count("saved group") == 3
    plan_load(metadata, live(three), KEEP_LIVE)


def test_the_group_that_mixes_is_named_by_its_live_number() -> None:
    three = {**TWO, "c": (1,)}
    metadata = saved(three, groups={"a.weight": 1, "b.weight": 0, "c": 2}, hyperparameters=(ADAM, ADAM, SLOW))
    with pytest.raises(MismatchError, match="param group 1 "):
        plan_load(metadata, live(three, groups=[["a.weight"], ["b.weight", "c"]]), LoadOptions())


def test_a_group_without_saved_members_keeps_its_own_values_and_says_so() -> None:
    metadata = saved({"a.weight": (2, 5)})
    plan = plan_load(metadata, live(TWO, groups=[["b.weight"], ["a.weight"]]), LoadOptions(strict=False))
    assert plan.group_sources == ((), (0,))
    assert plan.hyperparameters == ({}, ADAM)
    assert names_of(plan, "param groups", "restored") == ("1",)
    assert names_of(plan, "param groups", "fresh") == ("0",)


def test_a_parameter_that_was_frozen_brings_no_group_with_it() -> None:
    metadata = saved({"a.weight": (2, 5)}, wholes={("b.weight", FROZEN): ((3,), "float32")}, hyperparameters=(SLOW,))
    assert plan_load(metadata, live(TWO), LoadOptions()).group_sources == ((0,),)
    assert plan_load(metadata, live(TWO, groups=[["b.weight"], ["a.weight"]]), LoadOptions()).group_sources == (
        (),
        (0,),
    )


def test_keep_live_leaves_every_group_alone_and_says_so() -> None:
    plan = plan_load(*two_groups([["b.weight", "a.weight"]]), KEEP_LIVE)
    assert plan.group_sources == ((),)
    assert plan.hyperparameters == ({},)
    assert names_of(plan, "param groups", "fresh") == ("0",)
    assert names_of(plan, "param groups", "restored") == ()
    assert names_of(plan, "exp_avg", "restored") == ("a.weight", "b.weight")


def test_without_optimizer_states_groups_are_matched_for_a_scheduler_only() -> None:
    case = two_groups([["b.weight"], ["a.weight"]])
    assert plan_load(*case, LoadOptions(optimizer_states=False)).group_sources == ()
    plan = plan_load(*case, LoadOptions(optimizer_states=False, scheduler=SchedulerPlan(is_restored=True)))
    assert plan.group_sources == ((1,), (0,))
    assert not [outcome for outcome in plan.outcomes if outcome.role == "param groups"]
    assert not plan.restores_states


@pytest.mark.parametrize("was", [True, False])
@pytest.mark.parametrize("options", [LoadOptions(), KEEP_LIVE])
def test_adam_for_adamw_is_refused_although_both_keep_the_same_states(was: bool, options: LoadOptions) -> None:
    metadata = saved(TWO, hyperparameters=({**ADAM, "decoupled_weight_decay": was},))
    same = with_live_hyperparameters(live(TWO), {"decoupled_weight_decay": was})
    other = with_live_hyperparameters(live(TWO), {"decoupled_weight_decay": not was})
    assert "decoupled_weight_decay" not in plan_load(metadata, same, options).hyperparameters[0]
    with pytest.raises(MismatchError, match="weight decay of param group 0") as caught:
        plan_load(metadata, other, options)
    kinds = ("AdamW", "L2") if was else ("L2", "AdamW")
    assert kinds[0] in str(caught.value.found)
    assert kinds[1] in str(caught.value.expected)
    plan_load(metadata, other, LoadOptions(optimizer_states=False, scheduler=SchedulerPlan(is_restored=True)))


@pytest.mark.parametrize(("saved_kind", "live_kind"), [({}, True), ({}, False), (True, {}), (False, {}), ({}, {})])
def test_a_kind_of_weight_decay_that_one_side_does_not_tell_is_no_difference(saved_kind: Any, live_kind: Any) -> None:
    def told(kind: Any) -> dict[str, Any]:
        return {} if kind == {} else {"decoupled_weight_decay": kind}

    metadata = saved(TWO, hyperparameters=({**ADAM, **told(saved_kind)},))
    engine = with_live_hyperparameters(live(TWO), told(live_kind))
    assert plan_load(metadata, engine, LoadOptions()).hyperparameters == (ADAM,)


def test_one_of_two_merged_groups_with_another_kind_of_weight_decay_is_refused() -> None:
    hyperparameters = [{**ADAM, "decoupled_weight_decay": kind} for kind in (True, False)]
    metadata, engine = two_groups([["a.weight", "b.weight"]], hyperparameters)
    with pytest.raises(MismatchError, match="weight decay"):
        plan_load(metadata, with_live_hyperparameters(engine, {"decoupled_weight_decay": True}), LoadOptions())


def test_what_belongs_to_the_live_run_is_not_taken_over() -> None:
    training = {"lr": 1.0, "initial_lr": 2.0, "betas": (0.5, 0.9), "maximize": True, "amsgrad": False, "mine": "x"}
    live_only = dict.fromkeys(
        ("params", "param_names", "name", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
        "saved",
    )
    assert transferable({**training, **live_only, "_ds_anything": 1}) == training


def test_a_group_keeps_its_live_name() -> None:
    hyperparameters = [{**ADAM, "name": "old"}, {**ADAM, "name": "older"}]
    plan = plan_load(*two_groups([["a.weight", "b.weight"]], hyperparameters), LoadOptions())
    assert plan.hyperparameters == (ADAM,)


def test_what_no_optimizer_takes_is_told_before_what_was_not_read() -> None:
    """DeepSpeed's own loader, to which the latter may be left, would take both."""
    groups = ({**ADAM, "mine": [LeftInFile("a tensor")]}, {**SLOW, "lr": float("nan")})
    metadata, engine = two_groups([["a.weight"], ["b.weight"]], groups)
    with pytest.raises(MismatchError, match="lr of param group 1"):
        match_groups(metadata, engine, keep_live=False)


@pytest.mark.parametrize("rate", ["0.1", LeftInFile("a tensor"), None, [0.1]])
def test_what_a_schedule_may_get_back_is_of_the_live_kind(rate: Any) -> None:
    scheduler = SchedulerPlan(begins_anew=True, kept_live=frozenset({"lr"}))
    plans = [
        plan_load(
            *two_groups([["a.weight"], ["b.weight"]], (ADAM, {**ADAM, "lr": each})), LoadOptions(scheduler=scheduler)
        )
        for each in (0.5, rate)
    ]
    assert [plan.start_values for plan in plans] == [({"lr": 1e-3}, {"lr": 0.5}), ({"lr": 1e-3}, {})]
    assert all("lr" not in values for plan in plans for values in plan.hyperparameters)


@pytest.mark.parametrize(
    ("of_first", "others", "expected"),
    [
        ((0.5, 0.6), (0.9, 0.99, 0.999), (0.5, 0.99, 0.999)),
        ([0.5, 0.6], [0.9, 0.99], (0.5, 0.99)),
        ((0.5,), (0.9, 0.99), (0.9, 0.99)),
        ((0.5, 0.6), (0.9,), (0.9,)),
        (0.5, (0.9, 0.99), (0.9, 0.99)),
        ((0.5, 0.6), 0.9, 0.9),
    ],
)
def test_a_schedule_sets_the_first_of_two_momenta_alone(of_first: Any, others: Any, expected: Any) -> None:
    assert with_first_beta(of_first, others) == expected


def test_a_saved_group_with_more_hyperparameters_than_any_optimizer_is_refused() -> None:
    """Each of many live groups would take all of them: 2 MB of file came to a gigabyte."""
    values = {f"value{number}": 0 for number in range(4096 - len(ADAM))}
    metadata = saved(TWO, hyperparameters=({**ADAM, **values},))
    sources, taken = match_groups(metadata, live(TWO), keep_live=False)
    assert sources == ((0,),) and len(taken[0]) == 4096
    metadata = saved(TWO, hyperparameters=({**ADAM, **values, "one more": 0},))
    with pytest.raises(UnsupportedError, match="more hyperparameters than any optimizer") as caught:
        match_groups(metadata, live(TWO), keep_live=False)
    assert caught.value.found == "4097" and '"param_groups": "keep_live"' in str(caught.value)
    assert match_groups(metadata, live(TWO), keep_live=True) == (((),), ({},))

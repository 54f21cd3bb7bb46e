"""Saved lr schedulers for rebuilt param groups, against schedulers of torch and DeepSpeed that ran on such groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.read_plan import SavedRate, SchedulerPlan
from elastic_ckpt.core.values import BatchSizes, TrainingState
from elastic_ckpt.engines.schedule_states import fit_scheduler
from elastic_ckpt.engines.schedules import apply_schedule
from elastic_ckpt.engines.training_state import LoadArguments, TrainingStateCommit
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.param_groups import transferable
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.schedulers import FACTORIES, LOSSES, RATES, REBUILT, Factory, advance, optimizer_of
from tests.simulation import ADAM, TWO, live, saved


def as_tuples(sources: Sequence[int | None]) -> list[tuple[int, ...]]:
    """One saved group for each live one, or none."""
    return [() if source is None else (source,) for source in sources]


def resumed(make: Factory, was: list[str], now: list[str], sources: Sequence[int | None], steps: int) -> Any:
    """A run of other groups, after the restore of one that was saved."""
    old = optimizer_of(was)
    scheduler = make(old, was)
    advance(old, scheduler, LOSSES[:steps])
    state = copy.deepcopy(scheduler.state_dict())
    optimizer = optimizer_of(now)
    restored = make(optimizer, now)
    restored.load_state_dict(fit_scheduler(state, copy.deepcopy(restored.state_dict()), as_tuples(sources), len(was)))
    for group, source in zip(optimizer.param_groups, sources, strict=True):
        group.update({} if source is None else transferable(old.param_groups[source]))
    return optimizer, restored


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REBUILT)
@pytest.mark.parametrize("kind", FACTORIES)
def test_rates_go_on_as_if_the_groups_had_always_been_so(kind: str, case: str) -> None:
    make = FACTORIES[kind]
    was, now, sources = REBUILT[case]
    reference = optimizer_of(now)
    expected = advance(reference, make(reference, now), LOSSES)
    for steps in (1, 5, 8):
        optimizer, scheduler = resumed(make, was, now, sources, steps)
        assert [group["lr"] for group in optimizer.param_groups] == expected[steps - 1]
        if kind not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"):
            assert list(scheduler.get_last_lr()) == expected[steps - 1]
        assert advance(optimizer, scheduler, LOSSES[steps:]) == expected[steps:]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingWarmRestarts", "CyclicLR"])
def test_a_new_group_has_the_rates_that_the_live_scheduler_gives_it(kind: str) -> None:
    make = FACTORIES[kind]
    reference = optimizer_of(["new", "b", "a"])
    expected = advance(reference, make(reference, ["new", "b", "a"]), LOSSES)
    optimizer, scheduler = resumed(make, ["a", "b"], ["new", "b", "a"], [None, 1, 0], 5)
    assert advance(optimizer, scheduler, LOSSES[5:]) == expected[5:]


def test_groups_that_all_keep_their_live_values_keep_the_live_lists() -> None:
    state = {"base_lrs": [1.0, 2.0], "last_epoch": 7, "_last_lr": [0.5, 1.0]}
    now = {"base_lrs": [3.0], "last_epoch": 0, "_last_lr": [3.0]}
    assert fit_scheduler(state, now, as_tuples([None]), 2) == {"base_lrs": [3.0], "last_epoch": 7, "_last_lr": [3.0]}


def test_groups_as_they_were_take_the_state_as_it_is_whatever_is_in_it() -> None:
    state = {"base_lrs": [1.0, 2.0], "mine": [1, 2], "odd": [3]}
    fitted = fit_scheduler(state, {}, as_tuples([0, 1]), 2)
    assert fitted == state
    assert fit_scheduler({"base_lrs": [1.0]}, {}, as_tuples([0, 1]), 2) == {"base_lrs": [1.0]}


def test_without_saved_groups_lists_are_in_the_order_of_the_live_ones_and_as_long() -> None:
    state = {"base_lrs": [1.0, 2.0], "mine": [1, 2], "_schedulers": [{"_last_lr": [3.0, 4.0]}]}
    assert fit_scheduler(state, {}, as_tuples([0, 1]), 0) == state
    for wrong in (state, {"_schedulers": state["_schedulers"]}):
        with pytest.raises(MismatchError, match="rebuilt"):
            fit_scheduler(wrong, {}, as_tuples([0, 1, 2]), 0)


@pytest.mark.parametrize("state", [None, 3, "7", [0.5], (1, 2), torch.tensor(4), torch.tensor([1.0, 2.0])])
def test_a_state_that_is_no_dict_is_taken_as_it_is_where_it_cannot_go_by_group(state: Any) -> None:
    assert fit_scheduler(state, None, as_tuples([0, 1]), 2) is state
    if isinstance(state, tuple) or getattr(state, "shape", None) == (2,):
        with pytest.raises(MismatchError, match="rebuilt"):
            fit_scheduler(state, None, as_tuples([1, 0]), 2)
    else:
        assert fit_scheduler(state, None, as_tuples([1, 0]), 2) is state


@pytest.mark.parametrize("sources", [[0], [0, 1, None], [None, None], [0, 0], [1, 0], [0, 1, 1]])
def test_any_other_groups_are_not_as_they_were(sources: list[int | None]) -> None:
    with pytest.raises(MismatchError, match="rebuilt"):
        fit_scheduler({"mine": [1, 2]}, {}, as_tuples(sources), 2)


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), {"inner": [1, 2]}, {0: 1.0, 1: 2.0}, torch.tensor([1.0, 2.0]), [{"rates": (1, 2)}]]
)
def test_a_list_that_may_go_by_group_is_an_error_that_shows_it(value: Any) -> None:
    with pytest.raises(MismatchError, match="rebuilt") as caught:
        fit_scheduler({"base_lrs": [1.0, 2.0], "per_group_boost": value}, {}, as_tuples([1, 0]), 2)
    assert "per_group_boost" in str(caught.value.found)
    assert "per_group_boost" in str(caught.value.expected)
    assert "load_lr_scheduler_states=False" in str(caught.value.remedy)


@pytest.mark.parametrize("value", [[1, 2, 3], (1,), [], "ab", 2, None, {"x": 1, "y": 2}])
def test_what_cannot_go_by_group_is_handed_on(value: Any) -> None:
    assert fit_scheduler({"mine": value}, {}, as_tuples([1, 0]), 2) == {"mine": value}


@pytest.mark.parametrize(
    "key",
    ["base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "eta_mins"],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_known_lists_by_group_are_put_in_order(key: str, kind: type) -> None:
    assert fit_scheduler({key: kind([5, 6])}, {key: [7, 8, 9]}, as_tuples([1, None, 0]), 2) == {key: [6, 8, 5]}


@pytest.mark.parametrize("key", ["_milestones", "milestones"])
def test_milestones_do_not_go_by_group_however_many_there_are(key: str) -> None:
    assert fit_scheduler({key: [3, 6]}, {}, as_tuples([1, 0]), 2) == {key: [3, 6]}


def test_a_list_of_another_length_is_an_error() -> None:
    with pytest.raises(MismatchError, match="rebuilt") as caught:
        fit_scheduler({"base_lrs": [1.0, 2.0, 3.0]}, {}, as_tuples([1, 0]), 2)
    assert "2 entries" in str(caught.value.expected)


@pytest.mark.parametrize("now", [{}, {"base_lrs": [1.0]}, {"base_lrs": None}, {"base_lrs": [1.0] * 3}])
def test_a_live_scheduler_without_an_entry_for_a_new_group_is_an_error(now: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="rebuilt"):
        fit_scheduler({"base_lrs": [1.0]}, now, as_tuples([0, None]), 1)
    assert fit_scheduler({"base_lrs": [1.0]}, now, as_tuples([0, 0]), 1) == {"base_lrs": [1.0, 1.0]}


def test_lists_inside_nested_schedulers_are_put_in_order_too() -> None:
    state = {"_schedulers": [{"base_lrs": [1, 2]}, {"_schedulers": [{"base_lrs": (3, 4)}], "last_epoch": 5}]}
    now = {"_schedulers": [{"base_lrs": [6, 7, 8]}, {"_schedulers": [{"base_lrs": [9, 10, 11]}], "last_epoch": 0}]}
    assert fit_scheduler(state, now, as_tuples([None, 1, 0]), 2) == {
        "_schedulers": [{"base_lrs": [6, 2, 1]}, {"_schedulers": [{"base_lrs": [9, 4, 3]}], "last_epoch": 5}]
    }


@pytest.mark.parametrize("now", [{}, {"_schedulers": []}, {"_schedulers": [{"base_lrs": [5, 6]}]}])
def test_no_nested_scheduler_is_lost_where_the_live_one_has_fewer(now: dict[str, Any]) -> None:
    """torch itself refuses such a state dict; a shorter one it would take."""
    state = {"_schedulers": [{"base_lrs": [1, 2]}, {"base_lrs": [3, 4]}]}
    assert fit_scheduler(state, now, as_tuples([1, 0]), 2) == {
        "_schedulers": [{"base_lrs": [2, 1]}, {"base_lrs": [4, 3]}]
    }


@pytest.mark.parametrize("kind", ["CyclicLR", "ReduceLROnPlateau"])
def test_merged_groups_that_differ_for_the_scheduler_alone_are_refused(kind: str) -> None:
    """Both groups have the same hyperparameters now, but the scheduler would have led them apart."""

    def make(names: list[str], values: list[float]) -> Any:
        optimizer = optimizer_of(names)
        if kind == "CyclicLR":
            return lr_scheduler.CyclicLR(optimizer, 0.02, values, cycle_momentum=False)
        return lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=values)

    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAM, ADAM))
    plan = plan_load(metadata, live(TWO), LoadOptions(scheduler=SchedulerPlan(is_restored=True)))
    scheduler = make(["b"], [0.1])
    engine = SimpleNamespace(lr_scheduler=scheduler, optimizer=scheduler.optimizer, training_dataloader=None)
    engine.random_ltd_enabled, engine.train_batch_size, engine.fp16_enabled = bool, lambda: 1, bool
    engine.zero_optimization_stage = int
    counters = dict.fromkeys(("global_steps", "skipped_steps", "dp_world_size", "mp_world_size"), 1)
    for values, refused in (([0.1, 0.1], False), ([0.1, 0.2], True)):
        state = make(["b", "c"], values).state_dict()
        host = TrainingState(counters, BatchSizes(None, None, None), state, None, False, {})
        with pytest.raises(MismatchError) if refused else nullcontext():
            TrainingStateCommit(engine, host, LoadArguments("/ckpt"), RankCoordinates()).load_schedulers(plan)


class Half(lr_scheduler.LambdaLR):
    """It fails after it has changed what it holds."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(9.0)
            group["extra"] = 9.0
        self.base_lrs[0].fill_(9.0)
        if state_dict["last_epoch"] == 7:
            raise RuntimeError("half loaded")


def test_a_scheduler_that_fails_half_loaded_leaves_live_tensors_in_place() -> None:
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate, capturable=False, foreach=False)
    scheduler = Half(optimizer, lambda step: 1.0)
    base, (group,) = scheduler.base_lrs[0], optimizer.param_groups
    engine = SimpleNamespace(lr_scheduler=scheduler, optimizer=optimizer, training_dataloader=None)
    engine.random_ltd_enabled, engine.train_batch_size, engine.fp16_enabled = bool, lambda: 1, bool
    engine.zero_optimization_stage = int
    counters = dict.fromkeys(("global_steps", "skipped_steps", "dp_world_size", "mp_world_size"), 1)
    state = {**scheduler.state_dict(), "last_epoch": 7}
    host = TrainingState(counters, BatchSizes(None, None, None), state, None, False, {})
    commit = TrainingStateCommit(engine, host, LoadArguments("/ckpt"), RankCoordinates())
    with pytest.raises(MismatchError, match="half loaded") as caught:
        commit.load_schedulers(plan_load(saved(TWO), live(TWO), LoadOptions(scheduler=SchedulerPlan(is_restored=True))))
    assert "load_lr_scheduler_states=False" in str(caught.value.remedy)
    commit.undo_schedulers()
    assert group["lr"] is rate and rate == 0.25
    assert scheduler.base_lrs[0] is base and base == 0.25 and scheduler.last_epoch == 0


# --- groups that keep the live run's hyperparameters -----------------------------------------------------------------

#: Schedules that have a formula for the rate at a position, whatever the rates so far.
OF_POSITION = ["LambdaLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"]
OF_POSITION += ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"]
WITH_FORMULA = [*OF_POSITION, "StepLR", "MultiStepLR", "CosineAnnealingLR", "PolynomialLR"]


def kept(make: Factory, names: list[str], steps: int, rates: Mapping[str, float], monkeypatch: Any) -> Any:
    """A run whose groups all keep their own values, now with other ``rates``; and the rates that are not known."""
    old = optimizer_of(names)
    scheduler = make(old, names)
    advance(old, scheduler, LOSSES[:steps])
    state = copy.deepcopy(scheduler.state_dict())
    of_members = [SavedRate(number, group["lr"]) for number, group in enumerate(old.param_groups)]
    monkeypatch.setattr("tests.schedulers.RATES", rates)
    optimizer = optimizer_of(names)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.7  # the live run's
    restored = make(optimizer, names)
    before = copy.deepcopy(restored.state_dict())
    restored.load_state_dict(fit_scheduler(copy.deepcopy(state), before, [()] * len(names), len(names)))
    groups = optimizer.param_groups
    return optimizer, restored, apply_schedule(restored, groups, range(len(names)), (state, before), of_members)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("steps", [1, 5, 8])
@pytest.mark.parametrize("kind", FACTORIES)
def test_groups_that_keep_their_values_have_the_rates_of_the_restored_schedule(
    kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, names = FACTORIES[kind], ["a", "b"]
    reference = optimizer_of(names)
    expected = advance(reference, uninterrupted := make(reference, names), LOSSES[:steps])
    momenta = [{key: group.get(key) for key in ("momentum", "betas")} for group in reference.param_groups]
    optimizer, scheduler, unknown = kept(make, names, steps, RATES, monkeypatch)
    assert unknown == []
    assert [group["lr"] for group in optimizer.param_groups] == expected[-1]
    assert [{key: group.get(key) for key in momenta[0]} for group in optimizer.param_groups] == momenta
    if kind != "OneCycle":  # which has none before its first step
        assert list(scheduler.get_last_lr()) == expected[-1]
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.7}
    assert advance(optimizer, scheduler, LOSSES[steps:]) == advance(reference, uninterrupted, LOSSES[steps:])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("steps", [1, 5, 8])
@pytest.mark.parametrize("kind", FACTORIES)
def test_new_rates_are_those_of_a_run_that_always_had_them(
    kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, of schedules without a formula, the saved rates where the state has no other ones, or the live rates."""
    make, names, others = FACTORIES[kind], ["a", "b"], {key: rate / 8 for key, rate in RATES.items()}
    old = optimizer_of(names)
    saved_rates = advance(old, make(old, names), LOSSES[:steps])[-1]
    optimizer, scheduler, unknown = kept(make, names, steps, others, monkeypatch)
    found = [group["lr"] for group in optimizer.param_groups]
    reference = optimizer_of(names)
    expected = advance(reference, make(reference, names), LOSSES)
    if kind in WITH_FORMULA or kind == "SequentialLR":
        assert unknown == [] and found == pytest.approx(expected[steps - 1], rel=1e-12)
        assert advance(optimizer, scheduler, LOSSES[steps:]) == [
            pytest.approx(rates, rel=1e-12) for rates in expected[steps:]
        ]
    elif kind == "ReduceLROnPlateau":
        assert unknown == [] and found == saved_rates
    else:
        begun = optimizer_of(names)
        make(begun, names)
        assert unknown == [0, 1] and found == [group["lr"] for group in begun.param_groups]


def test_a_group_of_new_parameters_goes_on_from_its_own_rate_where_there_is_no_formula_of_the_position() -> None:
    optimizer = optimizer_of(["a", "new"])
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {**scheduler.state_dict(), "last_epoch": 5}
    scheduler.load_state_dict(state)
    assert apply_schedule(scheduler, optimizer.param_groups, [1], (state, state), [SavedRate(0, 0.1), None]) == [1]
    assert optimizer.param_groups[1]["lr"] == RATES["new"]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate, capturable=False, foreach=False)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state = {**scheduler.state_dict(), "last_epoch": 1}
    scheduler.load_state_dict(copy.deepcopy(state))
    assert apply_schedule(scheduler, optimizer.param_groups, [0], (state, state), [None]) == []
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.125

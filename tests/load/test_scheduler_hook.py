"""Schedulers that a framework restores after a load into other param groups, against ones that ran on such groups."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.load.scheduler_hook import (
    check_client_schedulers,
    expect_schedulers,
    forget_schedulers,
    unwatch_schedulers,
    watch_schedulers,
)
from elastic_ckpt.planning.param_groups import transferable
from tests.schedulers import FACTORIES, LOSSES, OF_TORCH, REBUILT, advance, engine_of, optimizer_of, plan_of, saved_run


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    before = {kind: vars(kind).get("load_state_dict") for kind in (lr_scheduler.LRScheduler, lr_scheduler.LambdaLR)}
    yield
    unwatch_schedulers()
    assert before == {kind: vars(kind).get("load_state_dict") for kind in before}


class Wrapper:
    """An optimizer around another one, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def loaded(old: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, sources: Sequence[int | None]) -> None:
    """What ``load_checkpoint`` does of it."""
    for group, source in zip(optimizer.param_groups, sources, strict=True):
        group.update({} if source is None else transferable(old.param_groups[source]))
    rates = [None if source is None else old.param_groups[source]["lr"] for source in sources]
    expect_schedulers(engine_of(optimizer), plan_of(sources, len(old.param_groups), rates))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REBUILT)
@pytest.mark.parametrize("kind", OF_TORCH)
def test_each_group_goes_on_with_its_own_rates(kind: str, case: str) -> None:
    was, now, sources = REBUILT[case]
    reference = optimizer_of(now)
    expected = advance(reference, FACTORIES[kind](reference, now), LOSSES)
    for steps in (1, 5, 8):
        old, state = saved_run(kind, was, steps)
        before, optimizer = copy.deepcopy(state), optimizer_of(now)
        scheduler = FACTORIES[kind](optimizer, now)
        loaded(old, optimizer, sources)
        scheduler.load_state_dict(state)
        assert repr(state) == repr(before), "it is the framework's"
        assert advance(optimizer, scheduler, LOSSES[steps:]) == expected[steps:]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"])
def test_a_new_group_begins_at_the_restored_position(kind: str) -> None:
    """Of the Trainer that unfreezes a norm: one group was saved, two are live."""
    names = ["a", "new"]
    reference = optimizer_of(names)
    expected = advance(reference, FACTORIES[kind](reference, names), LOSSES)
    old, state = saved_run(kind, ["a"], 5)
    optimizer = optimizer_of(names)
    scheduler = FACTORIES[kind](optimizer, names)
    loaded(old, optimizer, [0, None])
    scheduler.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == expected[4]
    assert list(scheduler.get_last_lr()) == expected[4]
    assert advance(optimizer, scheduler, LOSSES[5:]) == expected[5:]


def test_a_new_group_of_a_schedule_without_a_formula_goes_on_from_its_own_rate(caplog: Any) -> None:
    old, state = saved_run("StepLR", ["a"], 5)
    optimizer = optimizer_of(["a", "new"])
    scheduler = FACTORIES["StepLR"](optimizer, ["a", "new"])
    loaded(old, optimizer, [0, None])
    scheduler.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [old.param_groups[0]["lr"], 0.3]
    assert "not applied to param groups 1, which continue from lr 0.3" in caplog.text
    advance(optimizer, scheduler, LOSSES[5:6])  # step 6 halves both
    assert optimizer.param_groups[1]["lr"] == 0.15


def test_a_scheduler_on_a_wrapped_optimizer_is_found_and_one_of_another_optimizer_is_left() -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer, other = optimizer_of(["b", "a"]), optimizer_of(["b", "a"])
    scheduler, of_other = (FACTORIES["LambdaLR"](each, ["b", "a"]) for each in (optimizer, other))
    loaded(old, optimizer, [1, 0])
    scheduler.optimizer = Wrapper(optimizer)
    scheduler.load_state_dict(state_dict=state)
    assert scheduler.base_lrs == state["base_lrs"][::-1]
    of_other.load_state_dict(state)
    assert of_other.base_lrs == state["base_lrs"]


def test_only_the_next_state_is_put_in_order() -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    loaded(old, optimizer, [1, 0])
    scheduler.load_state_dict(state)
    own = copy.deepcopy(scheduler.state_dict())
    scheduler.load_state_dict(own)
    assert scheduler.base_lrs == own["base_lrs"] == state["base_lrs"][::-1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", ["by hand", "by the load"])
@pytest.mark.parametrize("case", REBUILT)
@pytest.mark.parametrize("kind", OF_TORCH)
def test_the_same_state_again_is_put_in_order_again(kind: str, case: str, first: str) -> None:
    """Of a script that restores what its framework or the load has restored, or that begins the same steps again."""
    was, now, sources = REBUILT[case]
    reference = optimizer_of(now)
    expected = advance(reference, FACTORIES[kind](reference, now), LOSSES)
    old, state = saved_run(kind, was, 5)
    optimizer = optimizer_of(now)
    scheduler = FACTORIES[kind](optimizer, now)
    loaded(old, optimizer, sources)
    scheduler.load_state_dict(copy.deepcopy(state))
    if first == "by the load":
        rates = [None if source is None else old.param_groups[source]["lr"] for source in sources]
        plan = plan_of(sources, len(old.param_groups), rates)
        expect_schedulers(engine_of(optimizer), plan, [scheduler], copy.deepcopy(state))
    scheduler.load_state_dict(copy.deepcopy(state))
    scheduler.load_state_dict(copy.deepcopy(state))
    assert advance(optimizer, scheduler, LOSSES[5:]) == expected[5:]


@pytest.mark.parametrize("end", ["another load", "uninstall", "groups as saved", "restored by the load"])
def test_what_is_over_replaces_nothing(end: str) -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    loaded(old, optimizer, [1, 0])
    if end == "another load":
        forget_schedulers(engine_of(optimizer))
    elif end == "uninstall":
        unwatch_schedulers()
    elif end == "restored by the load":
        expect_schedulers(engine_of(optimizer), plan_of([1, 0], 2), [scheduler])
    else:
        expect_schedulers(engine_of(optimizer), plan_of([0, 1], 2))
    scheduler.load_state_dict(state)
    assert scheduler.base_lrs == state["base_lrs"]


def test_a_state_that_has_as_many_entries_as_there_are_live_groups_is_not_the_checkpoints() -> None:
    old, _ = saved_run("LambdaLR", ["a"], 5)
    optimizer = optimizer_of(["a", "b"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["a", "b"])
    _, state = saved_run("LambdaLR", ["b", "a"], 5)
    loaded(old, optimizer, [0, None])
    scheduler.load_state_dict(state)
    assert scheduler.base_lrs == state["base_lrs"]


class Own(lr_scheduler.LambdaLR):
    """A class that keeps something by param group under a name of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.boosts = [1.0 for _ in optimizer.param_groups]
        super().__init__(optimizer, lambda step: 1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def test_what_cannot_be_put_in_order_is_an_error_at_that_call_and_before_it_in_a_client_state() -> None:
    state = copy.deepcopy(Own(optimizer_of(["a", "b"])).state_dict())
    optimizer = optimizer_of(["b", "a"])
    scheduler = Own(optimizer)
    own = repr(scheduler.state_dict())
    plan = plan_of([1, 0], 2)
    expect_schedulers(engine_of(optimizer), plan)
    with pytest.raises(MismatchError, match="boosts") as caught:
        scheduler.load_state_dict(state)
    assert repr(scheduler.state_dict()) == own
    assert "as they were saved" in str(caught.value.remedy) and "load_checkpoint" not in str(caught.value.remedy)
    client_state = {"lr_schedulers": [state], "epoch": 3}
    with pytest.raises(MismatchError, match="boosts"):
        check_client_schedulers(engine_of(optimizer), plan, client_state)
    check_client_schedulers(engine_of(optimizer), plan_of([0, 1], 2), client_state)
    check_client_schedulers(engine_of(optimizer_of(["b", "a"])), plan, client_state)  # no scheduler is there


def merged_plan(keeps_live: bool) -> LoadPlan:
    """Of two groups that are one now."""
    return replace(plan_of([0], 2), member_groups=((0, 1),), keeps_live=keeps_live)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["LambdaLR", "StepLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau"])
def test_merged_groups_that_keep_their_live_values_go_on_from_these(kind: str, caplog: Any) -> None:
    reference = optimizer_of(["new"])
    expected = advance(reference, FACTORIES[kind](reference, ["new"]), LOSSES)
    _, state = saved_run(kind, ["a", "b"], 3)
    optimizer = optimizer_of(["new"])
    scheduler = FACTORIES[kind](optimizer, ["new"])
    expect_schedulers(engine_of(optimizer), merged_plan(keeps_live=True))
    with caplog.at_level("INFO"):
        scheduler.load_state_dict(state)
    assert "param groups 0 were several" in caplog.text
    if kind == "StepLR":  # which goes on from the rate that is there, at its position
        assert advance(optimizer, scheduler, LOSSES[3:5]) == [[0.15], [0.15]]
    elif kind == "ReduceLROnPlateau":
        assert advance(optimizer, scheduler, LOSSES[3:4]) == [[0.1]]
    else:
        assert advance(optimizer, scheduler, LOSSES[3:]) == expected[3:]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_merged_groups_of_unequal_rates_are_refused_unless_live_values_are_kept() -> None:
    _, state = saved_run("LambdaLR", ["a", "b"], 3)
    optimizer = optimizer_of(["new"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["new"])
    before = repr(scheduler.state_dict())
    expect_schedulers(engine_of(optimizer), merged_plan(keeps_live=False))
    with pytest.raises(MismatchError, match="merged groups"):
        scheduler.load_state_dict(state)
    assert repr(scheduler.state_dict()) == before


@pytest.mark.parametrize("kind", ["LambdaLR", "SequentialLR"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_more_lambdas_than_groups_after_a_load_of_weights_alone_are_refused_in_words(kind: str) -> None:
    _, state = saved_run(kind, ["a", "b"], 3)
    optimizer = optimizer_of(["a"])
    scheduler = FACTORIES[kind](optimizer, ["a"])
    before = repr(scheduler.state_dict())
    expect_schedulers(engine_of(optimizer))
    with pytest.raises(MismatchError, match="as they were saved"):
        scheduler.load_state_dict(state)
    assert repr(scheduler.state_dict()) == before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sources", [[1, 0], [0, 1, None], [1], [None, None], [0, 0, 1]])
@pytest.mark.parametrize("kind", OF_TORCH)
def test_no_state_of_torch_in_a_client_state_is_refused(kind: str, sources: list[int | None]) -> None:
    _, state = saved_run(kind, ["a", "b"], 5)
    optimizer = optimizer_of(["a"] * len(sources))
    FACTORIES["LambdaLR"](optimizer, ["a"] * len(sources))
    check_client_schedulers(engine_of(optimizer), plan_of(sources, 2), {"lr_schedulers": [state]})


def shared(times: int) -> list[Any]:
    """A list of two values, in a list that has it twice, and so on."""
    found: list[Any] = [1, 2]
    for _ in range(times):
        found = [found, found]
    return found


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("entry", ["extra", "_schedulers"])
def test_a_state_of_few_bytes_that_comes_to_millions_of_values_is_refused(entry: str, is_early: bool) -> None:
    """As a file that the framework reads may have one: its text would be as long."""
    optimizer = optimizer_of(["a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["a"])
    before = copy.deepcopy(scheduler.state_dict())
    engine = engine_of(optimizer)
    if is_early:
        watch_schedulers(engine)
    else:
        expect_schedulers(engine, plan_of([0], 1, [0.1]))
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    for value in (shared(20), deep, 1 << 20000):
        with pytest.raises(MismatchError, match="a LambdaLR is given comes to more"):
            scheduler.load_state_dict({**before, entry: value})
        assert scheduler.state_dict() == before
    for value in ([0.5] * (1 << 20), shared(10)):
        scheduler.load_state_dict({**before, entry: value})

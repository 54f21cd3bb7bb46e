"""Schedulers that are restored before a load into other param groups, against ones that ran on such groups."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.errors import MismatchError
from elastic_ckpt.load.early_schedulers import EarlyStates, early_schedulers
from elastic_ckpt.load.scheduler_hook import (
    end_load,
    expect_schedulers,
    forget_schedulers,
    unwatch_schedulers,
    watch_schedulers,
)
from elastic_ckpt.planning.param_groups import transferable
from tests.schedulers import FACTORIES, LOSSES, OF_TORCH, REBUILT, advance, engine_of, optimizer_of, plan_of, saved_run


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    watch_schedulers()
    yield
    unwatch_schedulers()


def load(engine: Any, old: torch.optim.Optimizer, sources: list[int | None]) -> None:
    """What ``load_checkpoint`` does of a load."""
    forget_schedulers(engine)
    rates = [None if source is None else old.param_groups[source]["lr"] for source in sources]
    plan = plan_of(sources, len(old.param_groups), rates)
    states = EarlyStates(engine, plan)
    states.load()
    for group, source in zip(engine.optimizer.param_groups, sources, strict=True):
        group.update({} if source is None else transferable(old.param_groups[source]))
    engine.global_steps = 5
    expect_schedulers(engine, plan)


#: States that torch cannot restore before the load: a list of lambdas is longer than the live one.
TOO_LONG = list(product(("LambdaLR", "SequentialLR"), ("merged", "merged and in another order", "one fewer")))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REBUILT)
@pytest.mark.parametrize("kind", OF_TORCH)
def test_each_group_goes_on_with_its_own_rates(kind: str, case: str) -> None:
    if (kind, case) in TOO_LONG:
        return
    was, now, sources = REBUILT[case]
    reference = optimizer_of(now)
    expected = advance(reference, FACTORIES[kind](reference, now), LOSSES)
    for steps in (1, 5, 8):
        old, state = saved_run(kind, was, steps)
        before, optimizer = copy.deepcopy(state), optimizer_of(now)
        scheduler = FACTORIES[kind](optimizer, now)
        scheduler.load_state_dict(copy.deepcopy(state))
        load(engine_of(optimizer), old, sources)
        assert repr(state) == repr(before), "it is the framework's"
        assert advance(optimizer, scheduler, LOSSES[steps:]) == expected[steps:]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "case"), TOO_LONG)
def test_a_state_of_more_lambdas_than_groups_is_refused_and_restored_after_the_load(kind: str, case: str) -> None:
    was, now, sources = REBUILT[case]
    reference = optimizer_of(now)
    expected = advance(reference, FACTORIES[kind](reference, now), LOSSES)
    old, state = saved_run(kind, was, 5)
    optimizer = optimizer_of(now)
    scheduler = FACTORIES[kind](optimizer, now)
    before = repr(scheduler.state_dict())
    with pytest.raises(MismatchError, match="after load_checkpoint") as caught:
        scheduler.load_state_dict(state)
    assert isinstance(caught.value.__cause__, IndexError)
    assert repr(scheduler.state_dict()) == before
    load(engine_of(optimizer), old, sources)
    scheduler.load_state_dict(state)
    assert advance(optimizer, scheduler, LOSSES[5:]) == expected[5:]


def test_what_a_class_raises_of_a_state_for_as_many_groups_is_its_own() -> None:
    class Picky(lr_scheduler.LambdaLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("a key of its own")

    watch_schedulers()
    scheduler = Picky(optimizer_of(["a"]), lambda _: 1.0)
    with pytest.raises(KeyError, match="its own"):
        scheduler.load_state_dict(scheduler.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"])
def test_a_new_group_begins_at_the_restored_position(kind: str) -> None:
    names = ["new", "a"]
    reference = optimizer_of(names)
    expected = advance(reference, FACTORIES[kind](reference, names), LOSSES)
    old, state = saved_run(kind, ["a"], 5)
    optimizer = optimizer_of(names)
    scheduler = FACTORIES[kind](optimizer, names)
    scheduler.load_state_dict(state)
    load(engine_of(optimizer), old, [None, 0])
    assert list(scheduler.get_last_lr()) == [group["lr"] for group in optimizer.param_groups] == expected[4]
    assert advance(optimizer, scheduler, LOSSES[5:]) == expected[5:]


@pytest.mark.parametrize("times", [1, 2])
def test_a_load_puts_a_state_in_order_once_however_often_it_was_given(times: int) -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    for _ in range(times):
        scheduler.load_state_dict(copy.deepcopy(state))
    engine = engine_of(optimizer)
    for _ in range(times):
        load(engine, old, [1, 0])
        assert scheduler.base_lrs == state["base_lrs"][::-1]


def test_what_fails_later_in_the_load_leaves_the_state_as_it_was_given() -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    scheduler.load_state_dict(copy.deepcopy(state))
    given = copy.deepcopy(scheduler.state_dict())
    states = EarlyStates(engine_of(optimizer), plan_of([1, 0], 2, [0.1, 0.2]))
    states.load()
    assert scheduler.base_lrs == state["base_lrs"][::-1]
    states.undo()
    assert repr(scheduler.state_dict()) == repr(given)
    load(engine_of(optimizer), old, [1, 0])
    assert scheduler.base_lrs == state["base_lrs"][::-1]


def test_a_state_before_and_after_the_load_is_put_in_order_twice() -> None:
    old, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    scheduler.load_state_dict(copy.deepcopy(state))
    load(engine_of(optimizer), old, [1, 0])
    scheduler.load_state_dict(copy.deepcopy(state))
    assert scheduler.base_lrs == state["base_lrs"][::-1]


@pytest.mark.parametrize("first", [[0, 1], [1, 0]])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_run_that_goes_back_restores_its_schedule_for_that_load(first: list[int | None], is_early: bool) -> None:
    """In one process: a load, steps, and a load of an older checkpoint, whose groups were in another order."""
    names = ["b", "a"]
    optimizer = optimizer_of(names)
    engine, scheduler = engine_of(optimizer), FACTORIES["LambdaLR"](optimizer, names)
    saved = names if first == [0, 1] else names[::-1]
    old, state = saved_run("LambdaLR", saved, 5)
    for what in ("restore", "load") if is_early else ("load", "restore"):
        if what == "load":
            load(engine, old, first)
        else:
            scheduler.load_state_dict(copy.deepcopy(state))
    engine.global_steps += 1
    advance(optimizer, scheduler, LOSSES[5:6])
    older, state = saved_run("LambdaLR", ["a", "b"], 3)
    scheduler.load_state_dict(copy.deepcopy(state))
    load(engine, older, [1, 0])
    reference = optimizer_of(names)
    expected = advance(reference, FACTORIES["LambdaLR"](reference, names), LOSSES)
    assert advance(optimizer, scheduler, LOSSES[3:]) == expected[3:]


def test_a_schedule_of_groups_as_saved_keeps_its_state_in_the_next_load() -> None:
    names = ["b", "a"]
    old, state = saved_run("LambdaLR", names, 5)
    optimizer = optimizer_of(names)
    scheduler = FACTORIES["LambdaLR"](optimizer, names)
    load(engine_of(optimizer), old, [0, 1])
    scheduler.load_state_dict(copy.deepcopy(state))  # of this load, not for the next one
    older, _ = saved_run("LambdaLR", names[::-1], 3)
    load(engine_of(optimizer), older, [1, 0])
    assert scheduler.base_lrs == state["base_lrs"]


def test_schedulers_of_other_optimizers_and_those_that_are_gone_are_left() -> None:
    _, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer, other = optimizer_of(["b", "a"]), optimizer_of(["b", "a"])
    scheduler, of_other = (FACTORIES["LambdaLR"](each, ["b", "a"]) for each in (optimizer, other))
    for each in (scheduler, of_other):
        each.load_state_dict(copy.deepcopy(state))
    engine = engine_of(optimizer)
    assert early_schedulers(engine) == [scheduler]
    assert bool(EarlyStates(engine, plan_of([1, 0], 2)))
    assert not EarlyStates(engine, plan_of([1, 0], 2), restored_by_load=scheduler)
    assert not EarlyStates(engine, plan_of([0, 1], 2))
    del scheduler, each
    gc.collect()
    assert early_schedulers(engine) == []


@pytest.mark.parametrize(("result", "is_early"), [((None, None), True), (("/run/step/file.pt", {}), False)])
def test_a_state_after_deepspeeds_own_load_belongs_to_it(result: Any, is_early: bool) -> None:
    _, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["a", "b"])
    engine, scheduler = engine_of(optimizer), FACTORIES["LambdaLR"](optimizer, ["a", "b"])
    end_load(engine, result)
    scheduler.load_state_dict(state)
    assert early_schedulers(engine) == ([scheduler] if is_early else [])


def test_nothing_is_kept_without_the_patch() -> None:
    _, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    unwatch_schedulers()
    scheduler.load_state_dict(copy.deepcopy(state))
    assert early_schedulers(engine_of(optimizer)) == []


class Locked:
    """It cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


class Odd(lr_scheduler.StepLR):
    """A class of a script, which cannot say what it has."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


def test_a_state_that_cannot_be_looked_at_is_restored_as_without_the_patch() -> None:
    optimizer = optimizer_of(["a", "b"])
    scheduler = Odd(optimizer, 3)
    locked = Locked()
    scheduler.load_state_dict({"base_lrs": [1.0, 2.0], "mine": locked, "last_epoch": 4})
    assert scheduler.base_lrs == [1.0, 2.0] and scheduler.mine is locked  # type: ignore[attr-defined]
    assert early_schedulers(engine_of(optimizer)) == [scheduler]


def test_one_that_has_stepped_since_is_refused() -> None:
    _, state = saved_run("LambdaLR", ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    scheduler = FACTORIES["LambdaLR"](optimizer, ["b", "a"])
    scheduler.load_state_dict(state)
    scheduler.step()
    with pytest.raises(MismatchError, match="stepped since") as caught:
        EarlyStates(engine_of(optimizer), plan_of([1, 0], 2))
    assert "after load_checkpoint" in str(caught.value.remedy)
    assert not EarlyStates(engine_of(optimizer), plan_of([0, 1], 2))


class Foreign:
    """A class that is derived of none of torch's or DeepSpeed's, as Megatron's."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def test_an_engines_scheduler_of_any_class_is_seen() -> None:
    engine = engine_of(optimizer_of(["a"]))
    engine.lr_scheduler = Foreign()
    original = Foreign.load_state_dict
    watch_schedulers(engine)
    engine.lr_scheduler.load_state_dict({"steps": 3})
    assert engine.lr_scheduler.steps == 3 and early_schedulers(engine) == [engine.lr_scheduler]
    unwatch_schedulers()
    assert Foreign.load_state_dict is original


def test_the_patch_leaves_no_method_in_classes_that_have_none_of_their_own() -> None:
    optimizer = optimizer_of(["a"])
    engine = engine_of(optimizer)
    engine.lr_scheduler = lr_scheduler.StepLR(optimizer, 2)
    watch_schedulers(engine)
    unwatch_schedulers()
    assert "load_state_dict" not in vars(lr_scheduler.StepLR)


def test_a_patch_that_another_wrapper_keeps_in_place_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = lr_scheduler.LRScheduler.load_state_dict

    def around(scheduler: Any, state: Any) -> None:
        ours(scheduler, state)

    monkeypatch.setattr(lr_scheduler.LRScheduler, "load_state_dict", around)
    unwatch_schedulers()
    optimizer = optimizer_of(["a"])
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    scheduler.load_state_dict(scheduler.state_dict())
    assert early_schedulers(engine_of(optimizer)) == []
    monkeypatch.undo()
    watch_schedulers()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OF_TORCH)
def test_one_that_was_restored_without_the_patch_is_refused(kind: str) -> None:
    _, state = saved_run(kind, ["a", "b"], 5)
    optimizer = optimizer_of(["b", "a"])
    engine, scheduler = engine_of(optimizer), FACTORIES[kind](optimizer, ["b", "a"])
    assert not EarlyStates(engine, plan_of([1, 0], 2)), "it is at its beginning"
    unwatch_schedulers()
    scheduler.load_state_dict(copy.deepcopy(state))
    watch_schedulers()
    with pytest.raises(MismatchError, match="not at its beginning") as caught:
        EarlyStates(engine, plan_of([1, 0], 2))
    assert "after load_checkpoint" in str(caught.value.remedy)
    assert not EarlyStates(engine, plan_of([0, 1], 2))
    assert not EarlyStates(engine, plan_of([1, 0], 2), restored_by_load=scheduler)
    engine.global_steps = 3
    assert not EarlyStates(engine, plan_of([1, 0], 2)), "it has stepped with the engine"


def test_one_that_is_constructed_at_a_later_epoch_is_at_its_beginning() -> None:
    optimizer = optimizer_of(["b", "a"])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    scheduler = lr_scheduler.StepLR(optimizer, 2, last_epoch=5)
    assert scheduler.last_epoch == 6
    assert not EarlyStates(engine_of(optimizer), plan_of([1, 0], 2))


def test_an_engines_own_that_was_restored_without_the_patch_goes_on() -> None:
    for kind in ("StepLR", "SequentialLR", "ChainedScheduler", "WarmupLR", "OneCycle"):
        names = ["a", "b"]
        _, state = saved_run(kind, names, 5)
        optimizer = optimizer_of(names)
        engine = engine_of(optimizer)
        engine.lr_scheduler = FACTORIES[kind](optimizer, names)
        assert early_schedulers(engine) == [], kind
        unwatch_schedulers()
        engine.lr_scheduler.load_state_dict(state)
        watch_schedulers()
        assert early_schedulers(engine) == [engine.lr_scheduler], kind
        engine.global_steps = 5
        assert early_schedulers(engine) == [], kind

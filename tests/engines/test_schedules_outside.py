"""Schedules outside of the engine, in groups that keep the live lr: which return to the saved run's rates, and which not."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import NO_SCHEDULER
from elastic_ckpt.engines.schedules import with_others
from elastic_ckpt.load.early_schedulers import with_other_schedulers
from tests.schedulers import ALL_CLASSES, LOSSES, advance, by_name, optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = ["a", "b"]
ROOTS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
POSITIONS = range(1, 10)


class OfPosition(lr_scheduler.LambdaLR):
    """A class of the user's that inherits the rates of one of torch."""


class Own(lr_scheduler.LRScheduler):
    """A class of the user's, with rates of its own."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]


def of_positions(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    inner = [by_name(optimizer, names), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)]
    return lr_scheduler.SequentialLR(optimizer, inner, [4])


KINDS = {
    **{name: factory for name, factory in ALL_CLASSES.items() if hasattr(lr_scheduler, name) or name == "SWALR"},
    "ReduceLROnPlateau": lambda opt, _: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR of positions": of_positions,
    "OfPosition": lambda opt, _: OfPosition(opt, lambda step: 1 / (1 + step)),
    "Own": lambda opt, _: Own(opt),
}


def made(kind: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = optimizer_of(NAMES)
    scheduler = KINDS[kind](optimizer, NAMES)
    assert isinstance(scheduler, ROOTS) or kind == "ChainedScheduler"
    return optimizer, scheduler


def rates_after(kind: str, position: int) -> tuple[list[float], list[float]]:
    """Of the step after a position: those of the run that goes on, and those of one that keeps its own lr."""
    optimizer, scheduler = made(kind)
    advance(optimizer, scheduler, LOSSES[:position])
    state = copy.deepcopy(scheduler.state_dict())
    (wanted,) = advance(optimizer, scheduler, [9.0])
    other, live = made(kind)
    for group in other.param_groups:
        group["lr"] *= 1.5
    live.load_state_dict(state)
    (found,) = advance(other, live, [9.0])
    return wanted, found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_a_schedule_is_what_it_does(kind: str) -> None:
    _, scheduler = made(kind)
    plan = with_others(NO_SCHEDULER, [scheduler])
    name = type(scheduler).__name__
    assert (plan.sets_rates, plan.goes_on) in (((name,), ()), ((), (name,)))
    pairs = [rates_after(kind, position) for position in POSITIONS]
    returns = [wanted == pytest.approx(found, rel=1e-9) for wanted, found in pairs]
    assert all(returns) == bool(plan.sets_rates), returns


@pytest.mark.parametrize("keeps_live", [True, False])
def test_schedulers_of_the_engine_and_those_in_others_are_not_outside(keeps_live: bool) -> None:
    optimizer, scheduler = made("SequentialLR")
    own = by_name(optimizer, NAMES)
    engine: Any = SimpleNamespace(optimizer=optimizer, lr_scheduler=own, global_steps=0)
    config = ElasticConfig(param_groups="keep_live" if keeps_live else "match")
    gc.collect()
    plan = with_other_schedulers(NO_SCHEDULER, engine, config)
    assert (plan.sets_rates, plan.goes_on) == ((), ("SequentialLR",) * keeps_live)
    assert scheduler.optimizer is optimizer

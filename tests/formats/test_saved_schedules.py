"""Facts of real schedulers' states: those that another run, or another time of it, would have otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.formats.saved_schedules import schedule_facts

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LinearLR": lr_scheduler.LinearLR,
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


def state_of(make: Callable[[Any], Any], lr: float, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    scheduler = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_another_time_is_another_fact(name: str) -> None:
    make = SCHEDULERS[name]
    assert schedule_facts(state_of(make, 0.1, 3)) == schedule_facts(state_of(make, 0.1, 3))
    assert schedule_facts(state_of(make, 0.1, 3)) != schedule_facts(state_of(make, 0.1, 4))


@pytest.mark.parametrize("name", ["LinearLR", "SequentialLR"])
def test_another_rate_is_another_fact(name: str) -> None:
    make = SCHEDULERS[name]
    assert schedule_facts(state_of(make, 0.1, 3)) != schedule_facts(state_of(make, 0.2, 3))


def test_what_a_rank_measures_is_none() -> None:
    def measured(metric: float) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for value in (1.0, metric, metric):
            scheduler.step(value)
        return scheduler.state_dict()  # type: ignore[no-any-return]

    assert measured(2.0)["_last_lr"] != measured(0.5)["_last_lr"]
    assert schedule_facts(measured(2.0)) == schedule_facts(measured(0.5))


def test_no_scheduler_is_not_an_empty_one() -> None:
    assert schedule_facts(None) is None
    assert schedule_facts({}) == ()


def test_a_state_that_names_itself_is_looked_at_once() -> None:
    shared: list[Any] = [{"last_epoch": 1}]
    for _ in range(64):
        shared = [shared, shared]
    looped: dict[str, Any] = {"last_epoch": 2, "wide": [shared] * 1000}
    looped["itself"] = looped
    assert schedule_facts(looped) == (("last_epoch / ", [2]),)

"""A scheduler and its param groups become again what they were."""

from __future__ import annotations

import copy

import pytest

from elastic_ckpt.engines.schedule_undo import state_and_undo
from tests.schedulers import FACTORIES, LOSSES, advance, optimizer_of


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FACTORIES)
def test_what_a_state_changed_is_undone(kind: str) -> None:
    names = ["a", "b"]
    optimizer = optimizer_of(names)
    scheduler = FACTORIES[kind](optimizer, names)
    advance(optimizer, scheduler, LOSSES[:3])
    before = copy.deepcopy(scheduler.state_dict())
    groups = copy.deepcopy([{**group, "params": []} for group in optimizer.param_groups])
    state, undo = state_and_undo(scheduler, optimizer.param_groups)
    assert repr(state) == repr(before)
    later = optimizer_of(names)
    advance(later, of_later := FACTORIES[kind](later, names), LOSSES[:7])
    scheduler.load_state_dict(of_later.state_dict())
    advance(optimizer, scheduler, LOSSES[7:9])
    undo()
    assert repr(scheduler.state_dict()) == repr(before)
    assert [{**group, "params": []} for group in optimizer.param_groups] == groups


def test_a_scheduler_without_a_state_has_none() -> None:
    optimizer = optimizer_of(["a"])
    state, _ = state_and_undo(object(), optimizer.param_groups)
    assert state is None

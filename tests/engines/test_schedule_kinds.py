"""What entries of a saved lr scheduler state the live scheduler takes: those that it keeps, of the kind that it keeps."""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.engines.schedule_kinds import refuse_strange_entries, strange_entry
from elastic_ckpt.engines.schedule_states import OPTIONAL, fit_scheduler
from elastic_ckpt.errors import MismatchError
from tests.schedulers import ALL_CLASSES, OTHER_RELEASES, Decay, optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = ["a", "b"]
#: Values that no scheduler keeps for a number.
NO_NUMBERS = [
    "x",
    None,
    {},
    [],
    OrderedDict,
    torch.Size,
    argparse.Namespace(),
    float("nan"),
    1 << 80,
    1j,
    torch.ones(2),
]


def scheduler_of(name: str) -> Any:
    return ALL_CLASSES[name](optimizer_of(NAMES), NAMES)


def moved_on(scheduler: Any, steps: int) -> Any:
    """Its state after so many steps."""
    for _ in range(steps):
        scheduler.optimizer.step()
        with_measure = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(1.0) if with_measure else scheduler.step()
    return copy.deepcopy(scheduler.state_dict())


@pytest.mark.parametrize("name", ALL_CLASSES)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_its_own_states_are_taken(name: str, steps: int) -> None:
    was, live = scheduler_of(name), scheduler_of(name)
    assert strange_entry(live, live.state_dict(), moved_on(was, steps)) is None
    assert strange_entry(was, was.state_dict(), live.state_dict()) is None  # a later one that goes back


@pytest.mark.parametrize("name", ALL_CLASSES)
def test_states_of_other_releases_are_taken(name: str) -> None:
    live = scheduler_of(name)
    for change in OTHER_RELEASES:
        state = moved_on(scheduler_of(name), 1)
        if "last_batch_iteration" not in state:
            change(state)
        assert strange_entry(live, live.state_dict(), state) is None


def attributes_of(scheduler: Any) -> Iterator[str]:
    """All that an entry of a state would take the place of, methods first."""
    yield from (name for name in dir(scheduler) if name not in scheduler.state_dict())


@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if hasattr(lr_scheduler, name)])
def test_no_entry_takes_the_place_of_another_attribute(name: str) -> None:
    live = scheduler_of(name)
    own_state, names = live.state_dict(), list(attributes_of(live))
    assert {"step", "get_lr", "optimizer", "load_state_dict", "__class__"} <= {*names}
    for attribute in names:
        plain = [] if attribute in OPTIONAL else [1, "x", None]
        for value in (argparse.Namespace(param_groups=[]), OrderedDict, [OrderedDict], *plain):
            assert strange_entry(live, own_state, {**own_state, attribute: value}) is not None, attribute


def numbers_in(state: Any, *at: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every number in a state."""
    members = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in members:
        if isinstance(value, (int, float)):
            yield *at, key
        else:
            yield from numbers_in(value, *at, key)


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(state)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", ALL_CLASSES)
def test_no_number_becomes_something_else(name: str) -> None:
    live = scheduler_of(name)
    own_state = live.state_dict()
    paths = [path for path in numbers_in(own_state) if path[-1] not in ("verbose", "best", "mode_worse")]
    assert paths
    for path in paths:
        for value in NO_NUMBERS:
            assert strange_entry(live, own_state, replaced(own_state, path, value)) is not None, (path, value)


@pytest.mark.parametrize("value", [[], {}, None, [{}], [{"gamma": 0.9}, {"gamma": "x"}], [3, 4], "ab"])
def test_schedulers_in_a_sequence_are_looked_at(value: Any) -> None:
    live = scheduler_of("SequentialLR")
    assert strange_entry(live, live.state_dict(), {**live.state_dict(), "_schedulers": value}) is not None


def test_attributes_of_a_function_are_its_own() -> None:
    live = lr_scheduler.LambdaLR(optimizer_of(NAMES), [Decay(3.0), Decay(4.0)])
    own_state = live.state_dict()
    for strange in ({"__call__": OrderedDict}, {"half_life": OrderedDict}, {"half_life": 2.0, "more": 1}, 3):
        saved = {**own_state, "lr_lambdas": [{"half_life": 2.0}, strange]}
        assert strange_entry(live, own_state, saved) is not None, strange
    assert strange_entry(live, own_state, {**own_state, "lr_lambdas": [None, {"half_life": 9.0}]}) is None


def test_the_error_names_the_entry_and_the_way_out() -> None:
    live = scheduler_of("StepLR")
    with pytest.raises(MismatchError, match="step of lr_scheduler") as caught:
        refuse_strange_entries(live, live.state_dict(), {**live.state_dict(), "step": OrderedDict})
    assert caught.value.remedies[0].arguments == {"load_lr_scheduler_states": False}


@pytest.mark.parametrize(
    "change", [lambda values: values[:-1], lambda values: [*values, values[-1]], lambda values: []]
)
@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if hasattr(lr_scheduler, name)])
def test_lists_by_param_group_have_as_many_entries(name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    live = scheduler_of(name)
    own_state = live.state_dict()
    sources = [[0], [1]]
    assert fit_scheduler(own_state, own_state, sources, saved_groups=2) == own_state
    keys = [key for key in ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "lr_lambdas") if key in own_state]
    for key in keys:
        with pytest.raises(MismatchError, match=f"{key} of lr_scheduler"):
            fit_scheduler({**own_state, key: change(own_state[key])}, own_state, sources, saved_groups=2)


def test_a_sequence_changes_over_as_often_as_the_live_one() -> None:
    live = scheduler_of("SequentialLR")
    own_state = live.state_dict()
    for milestones in ([], [1, 2, 3]):
        assert strange_entry(live, own_state, {**own_state, "_milestones": milestones}) is not None

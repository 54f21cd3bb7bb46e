"""Which state dicts an lr scheduler takes: those of its own class, by the entries that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ckpt.engines.schedule_states import lacking_entries, refuse_other_scheduler, schedule_states
from elastic_ckpt.errors import MismatchError
from tests.schedulers import ALL_CLASSES, OTHER_RELEASES, optimizer_of

OF_DEEPSPEED = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}
#: Classes whose states have the same entries: whatever one saved is restored by the other.
SAME = [OF_DEEPSPEED, {"LambdaLR", "MultiplicativeLR"}]


class Own(lr_scheduler.LRScheduler):
    """A class of a user, with attributes of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, **attributes: Any) -> None:
        vars(self).update(attributes)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return list(self.base_lrs)


class Tolerant:
    """A class of a user, which looks for itself at what it loads; like Megatron's."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert "num_iters" in state_dict or "num_steps" in state_dict


def is_refused(saved_state: Any, scheduler: Any) -> bool:
    try:
        refuse_other_scheduler(scheduler, scheduler.state_dict(), saved_state)
    except MismatchError as error:
        assert "load_lr_scheduler_states=False" in str(error.remedy)
        assert type(scheduler).__name__ in str(error.expected)
        return True
    return False


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("was", ALL_CLASSES)
def test_a_state_is_refused_by_every_other_class_and_taken_by_its_own(was: str) -> None:
    names = ["a", "b"]
    state = ALL_CLASSES[was](optimizer_of(names), names).state_dict()
    same = next((group for group in SAME if was in group), {was})
    taken = {now for now in ALL_CLASSES if not is_refused(state, ALL_CLASSES[now](optimizer_of(names), names))}
    assert taken == same


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("change", OTHER_RELEASES)
@pytest.mark.parametrize("kind", sorted(ALL_CLASSES.keys() - OF_DEEPSPEED))
def test_a_state_of_another_release_of_torch_is_taken(kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    scheduler = ALL_CLASSES[kind](optimizer_of(["a", "b"]), ["a", "b"])
    state = dict(scheduler.state_dict())
    change(state)
    assert not is_refused(state, scheduler)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedulers_in_a_sequence_have_to_be_of_the_same_classes() -> None:
    def sequence(*kinds: str) -> Any:
        optimizer = optimizer_of(["a"])
        inner = [ALL_CLASSES[kind](optimizer, ["a"]) for kind in kinds]
        return lr_scheduler.SequentialLR(optimizer, inner, list(range(2, 2 * len(inner), 2)))

    state = sequence("LinearLR", "ConstantLR").state_dict()
    assert not is_refused(state, sequence("LinearLR", "ConstantLR"))
    for others in (("LinearLR", "CosineAnnealingLR"), ("LinearLR",), ("LinearLR", "ConstantLR", "ConstantLR")):
        assert is_refused(state, sequence(*others))


def test_classes_of_users_are_told_apart_where_nothing_is_common_and_nothing_would_check() -> None:
    optimizer = optimizer_of(["a"])
    mine = Own(optimizer, warmup=3, total=9)
    for others, refused in (
        ({"warmup": 3}, False),
        ({"warmup": 3, "more": 1}, False),
        ({"cycle": 3}, True),
        ({}, False),
    ):
        assert is_refused(Own(optimizer_of(["a"]), **others).state_dict(), mine) is refused
        assert is_refused({"num_iters": 4, **others}, Tolerant()) is False
    for kind in ("LambdaLR", "WarmupLR"):
        state = ALL_CLASSES[kind](optimizer_of(["a"]), ["a"]).state_dict()
        assert is_refused(state, mine) and is_refused(state, Tolerant())
        assert is_refused(mine.state_dict(), ALL_CLASSES[kind](optimizer_of(["a"]), ["a"]))
    assert lacking_entries(mine.state_dict(), {"warmup": 3, "more": 1}) == (
        "the saved state lacks total; the live scheduler's own state has no more"
    )


@pytest.mark.parametrize("state", [None, 3, [0.5], torch.tensor(4), np.array(["ab", "c"])])
def test_states_that_are_no_dicts_are_left_to_classes_of_others(state: Any) -> None:
    """torch's own take ``["ab", "c"]`` for pairs, and keep the first where they fail at the second."""
    assert not is_refused(state, Tolerant())
    for kind in ("LambdaLR", "WarmupLR"):
        assert is_refused(state, ALL_CLASSES[kind](optimizer_of(["a"]), ["a"])) is (state is not None)


def test_states_of_schedulers_are_found_in_a_client_state() -> None:
    of_torch = ALL_CLASSES["LambdaLR"](optimizer_of(["a"]), ["a"]).state_dict()
    for found in ({"lr_schedulers": [of_torch]}, {"mine": of_torch}, {"dcp": {"lr_scheduler": of_torch}}):
        assert list(schedule_states({"global_step": 3, "loops": {"epoch": [1, 2]}, **found})) == [of_torch]
    assert list(schedule_states({"lr_schedulers": [], "optimizer": {"gamma": 3}, "args": [1]})) == []

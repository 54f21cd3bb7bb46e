"""Hyperparameters that take their place in live param groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.core.flat_ranges import FlatRange, Placement
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.zero import Zero012Adapter
from elastic_ckpt.errors import UnsupportedError

Group = dict[str, Any]


def restored(live: Group, saved: Group) -> Group:
    """A live param group after a load that restores these hyperparameters."""
    plan: Any = SimpleNamespace(restores_states=True, hyperparameters=[saved], scalars=[])
    adapter: Any = SimpleNamespace(base=SimpleNamespace(param_groups=[live]))
    EngineAdapter.set_scalars_and_groups(adapter, plan)
    return live


def test_live_tensors_are_filled_wherever_they_are() -> None:
    """A captured graph reads them, and arithmetic with tensors of fp32 is not that with Python numbers."""
    first, second, learned = torch.tensor(0.5), torch.tensor([0.5]), torch.nn.Parameter(torch.tensor(0.5))
    live = {"lr": first, "betas": (0.5, second), "of": {"a": [learned]}}
    group = restored(live, {"lr": 0.25, "betas": (0.75, 0.125), "of": {"a": [2.0]}})
    assert group == {"lr": 0.25, "betas": (0.75, 0.125), "of": {"a": [2.0]}}
    assert (group["lr"], group["betas"][1], group["of"]["a"][0]) == (first, second, learned)
    assert all(found is mine for found, mine in zip([group["lr"], group["betas"][1]], [first, second], strict=True))


@pytest.mark.parametrize(
    "live",
    [(torch.tensor(0.5),), [torch.tensor(0.5), 1.0], torch.ones(2), None, (torch.tensor(3), torch.tensor(True))],
    ids=["of another length", "of another type", "of several elements", "none", "of integers"],
)
def test_what_is_of_another_form_is_replaced(live: Any) -> None:
    assert restored({"betas": live}, {"betas": (0.75, 0.125)}) == {"betas": (0.75, 0.125)}
    assert restored({"betas": live}, {"betas": 0.75}) == {"betas": 0.75}


def test_a_device_stays_that_of_the_live_group() -> None:
    live = {"where": torch.device("cpu"), "all": [torch.device("cpu"), 1]}
    saved = {"where": torch.device("cuda", 1), "all": [torch.device("cuda", 1), 2]}
    assert restored(live, saved) == {"where": torch.device("cpu"), "all": [torch.device("cpu"), 2]}


STEP = TensorValue("int32", (), (2,))


def test_saved_tensors_are_tensors_again_of_their_dtype() -> None:
    """One that the first step makes is not in a new group."""
    table = TensorValue("float64", (2,), (0.1, 0.2))
    group = restored({"betas": (0.5, 0.25)}, {"step": STEP, "betas": (STEP, 0.5), "of": {"a": [table]}})
    found = [group["step"], group["betas"][0], group["of"]["a"][0]]
    assert [(each.dtype, each.tolist()) for each in found[:2]] == [(torch.int32, 2)] * 2 and group["betas"][1] == 0.5
    assert torch.equal(found[2], torch.tensor([0.1, 0.2], dtype=torch.float64))


def test_a_live_tensor_like_the_saved_one_is_filled_in_place_and_no_other() -> None:
    like, other = torch.tensor(1, dtype=torch.int32), torch.tensor(1.0)
    group = restored({"a": like, "b": other}, {"a": STEP, "b": STEP})
    assert group["a"] is like and like == 2
    assert (group["b"].dtype, group["b"].item(), other.item()) == (torch.int32, 2, 1.0)


@pytest.mark.parametrize(
    ("keeps_touched", "numel", "is_known"), [(True, 9, True), (True, 6, False), (False, 6, True), (False, 9, False)]
)
def test_the_size_of_muons_momentum_is_that_known_of_the_class_of_optimizer(
    keeps_touched: bool, numel: int, is_known: bool
) -> None:
    """A partition of six elements, on the first of two ranks, of parameters of five and four."""
    adapter: Any = object.__new__(Zero012Adapter)
    adapter.members = [[torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(4))]]
    adapter.masters, adapter.keeps_touched, adapter.optimizer = [torch.zeros(6)], keeps_touched, SimpleNamespace()
    adapter._parts = {param: [SimpleNamespace(name=name)] for param, name in zip(adapter.members[0], "ab", strict=True)}
    adapter.placements = lambda flat: [Placement(0, FlatRange(0, 5), 0), Placement(1, FlatRange(0, 1), 5)]
    if is_known:
        adapter._check_momentum(0, torch.zeros(numel))
        return
    with pytest.raises(UnsupportedError, match="Muon's momentum") as caught:
        adapter._check_momentum(0, torch.zeros(numel))
    assert caught.value.parameter == "a" and str(numel) in str(caught.value.found)

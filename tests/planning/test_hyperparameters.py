"""Hyperparameters of a kind that the live optimizer cannot have are refused, whoever made them so."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.core.values import LeftInFile, PerRank, TensorValue
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.hyperparameters import refuse_strange_hyperparameters
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import ADAM, TWO, live, saved

LIVE = {**ADAM, "table": torch.ones(600), "foreach": None, "mode": "fast", "ratios": [0.1, 0.2], "initial_lr": 0.1}
MATRIX = TensorValue("float32", (2,), (1.0, 2.0))
COMPLEX = TensorValue("complex64", (), (1j,))
LEFT = LeftInFile("a tensor of torch.float32, shape (600,)")
NO_NUMBERS = ["x", {}, [], OrderedDict, math.nan, math.inf, 1 << 80, 1j, COMPLEX, MATRIX, (1.0,), LEFT]
#: What the constructors of torch's optimizers refuse, and a flag, which they take for 0 or 1.
BELOW_ZERO = [-1, -0.1, -5e-324, TensorValue("float32", (), (-0.1,)), True, False]
#: By hyperparameter of the live group, what no optimizer with it can have.
STRANGE: dict[str, list[Any]] = {
    "lr": [*NO_NUMBERS, *BELOW_ZERO, None],
    "eps": [*NO_NUMBERS, *BELOW_ZERO, None],
    "weight_decay": [*NO_NUMBERS, *BELOW_ZERO, None],
    "initial_lr": [*NO_NUMBERS, *BELOW_ZERO],
    "betas": [
        *((0.9, each) for each in (*BELOW_ZERO, 1, 1.0, 1e308)),
        (True, 0.9),
        [-1, 0.9],
        (0.9,),
        (0.9, 0.99, 0.999),
        [],
        None,
        0.9,
        (math.nan, 0.9),
        (0.9, "x"),
        {},
        (MATRIX, 0.9),
        (LEFT, 0.9),
        LEFT,
    ],
    "mode": [3, [], OrderedDict, LEFT],
    "ratios": [3, "x", ["x"], [[]]],
    "foreach": [OrderedDict, dict.get],
    "unheard_of": [OrderedDict, len],
}
#: What it can have all the same.
USUAL: dict[str, list[Any]] = {
    "lr": [1, 0.0, -0.0, TensorValue("float32", (), (0.1,)), TensorValue("float32", (1,), (0.1,))],
    "betas": [[0.5, 0.6], (0, 0.5)],
    "foreach": [True, None, 3],
    "amsgrad": [0, 1, False],
    "mode": ["slow", None],
    "ratios": [[], [0.1], [1, 2, 3]],
    "unheard_of": [None, 1, "x", [1], {"a": 1}, LEFT],
    "table": [LEFT],
}


def refuse(name: str, value: Any) -> None:
    metadata = saved(TWO)
    refuse_strange_hyperparameters(metadata, 0, LiveGroup(tuple(TWO), LIVE), {**ADAM, name: value})


@pytest.mark.parametrize("name", STRANGE)
def test_values_of_another_kind_are_refused_by_name(name: str) -> None:
    for value in STRANGE[name]:
        for each in (value, PerRank(((0, LIVE.get(name)), (1, value)))):
            with pytest.raises(MismatchError, match=name) as caught:
                refuse(name, each)
            assert caught.value.remedies[0].config == {"param_groups": "keep_live"}


@pytest.mark.parametrize("name", USUAL)
def test_values_of_the_same_kind_are_taken(name: str) -> None:
    for value in USUAL[name]:
        refuse(name, value)


@pytest.mark.parametrize("name", ["lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"])
@pytest.mark.parametrize("value", [-1.0, True, -0.5, 1.5])
def test_what_torch_refuses_is_refused(name: str, value: float) -> None:
    """By the constructors of its own optimizers, which take a flag for a number."""
    optimizer: Any = torch.optim.SGD if name == "momentum" else torch.optim.AdamW
    given = (0.9, value) if name == "betas" else value
    is_taken = type(value) is float
    try:
        optimizer([torch.ones(2)], **{"lr": 0.1, name.removeprefix("initial_"): given})
    except ValueError:
        is_taken = False
    group = LiveGroup(tuple(TWO), {**LIVE, "momentum": 0.9})
    for live_too in (False, True):
        own = LiveGroup(group.names, {**group.hyperparameters, name: given}) if live_too else group
        try:
            refuse_strange_hyperparameters(saved(TWO), 0, own, {name: given})
            assert is_taken or live_too
        except MismatchError:
            assert not is_taken and not live_too


def test_a_plan_without_an_engine_has_the_saved_groups() -> None:
    measured = PerRank(((0, 1.0), (1, 2.0)))
    group = LiveGroup(tuple(TWO), {**LIVE, "mood": measured})
    refuse_strange_hyperparameters(saved(TWO), 0, group, {"mood": measured})
    with pytest.raises(MismatchError, match="mood"):
        refuse_strange_hyperparameters(saved(TWO), 0, group, {"mood": PerRank(((0, 1.0), (1, "x")))})


def test_an_optimizer_that_finds_its_own_rate_may_have_none() -> None:
    group = LiveGroup(tuple(TWO), {"lr": 0.1, "relative_step": False})
    refuse_strange_hyperparameters(saved(TWO), 0, group, {"lr": None, "relative_step": True})


@pytest.mark.parametrize(
    ("flag", "usual", "needed"), [("amsgrad", "exp_avg_sq", "max_exp_avg_sq"), ("centered", "square_avg", "grad_avg")]
)
def test_a_flag_needs_the_state_that_each_step_takes_for_granted(flag: str, usual: str, needed: str) -> None:
    group = LiveGroup(tuple(TWO), {flag: False})
    with pytest.raises(MismatchError, match=needed):
        refuse_strange_hyperparameters(saved(TWO, states=(usual,)), 0, group, {flag: True})
    for states in ((usual, needed), ()):  # without states, the optimizer begins all of them
        refuse_strange_hyperparameters(saved(TWO, states=states), 0, group, {flag: True})


def test_a_plan_refuses_them_and_its_remedy_does_not() -> None:
    metadata = saved(TWO, hyperparameters=({**ADAM, "betas": (0.9,)},))
    with pytest.raises(MismatchError, match="betas"):
        plan_load(metadata, live(TWO), LoadOptions())
    assert plan_load(metadata, live(TWO), LoadOptions(ElasticConfig(param_groups="keep_live"))).hyperparameters == ({},)

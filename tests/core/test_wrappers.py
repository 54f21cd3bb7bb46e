"""Names of wrapped modules: what torch itself adds to them, and which saved name is which live one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.optim.swa_utils import AveragedModel

from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.metadata import FROZEN, MASTER
from elastic_ckpt.core.wrappers import (
    number_around,
    pattern_without_hidden,
    unwrapped,
    without_hidden,
    wrapped_otherwise,
)
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.live_names import adopt_wrappers
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import live, names_of, saved


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)


def plain_model() -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(4, 3), "blocks": nn.ModuleList([Block(), Block()])})


def holder_of(model: nn.Module) -> nn.Module:
    """A wrapper of the user's own."""
    holder = nn.Module()
    holder.module = model
    return holder


INSIDE = {"none": lambda each: each, "checkpoint": checkpoint_wrapper, "offload": offload_wrapper}
INSIDE |= {"compile": torch.compile, "checkpoint of compiled": lambda each: checkpoint_wrapper(torch.compile(each))}
AROUND = {"none": lambda each: each, "own": holder_of, "average": AveragedModel, "compile": torch.compile}


def wrapped_model(inside: str, around: str) -> nn.Module:
    model = plain_model()
    for number, block in enumerate(model["blocks"]):
        block.up = INSIDE[inside](block.up)
        model["blocks"][number] = INSIDE[inside](block)
    return AROUND[around](model)


@pytest.mark.parametrize(("inside", "around"), list(product(INSIDE, AROUND)))
def test_torchs_own_wrappers_are_known(inside: str, around: str) -> None:
    model = wrapped_model(inside, around)
    named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    entries = list(model.state_dict())
    assert {without_hidden(name) for name in named} == set(entries)
    bare = {unwrapped(name) for name in named} - {"n_averaged"}
    assert bare == set(plain_model().state_dict())
    assert wrapped_otherwise(entries, plain_model().state_dict().keys()).keys() >= {
        name for name in entries if name not in bare and name != "n_averaged"
    }


WRAPS = ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"]
PREFIXES = ["", "module.", "module.module.", "base_model.model.", "base_model.model.module.", "_orig_mod.module."]
NAMES = st.lists(st.sampled_from("abcd"), min_size=2, max_size=3).map(".".join)


@st.composite
def wrappings(draw: st.DrawFn, name: str) -> str:
    parts: list[str] = []
    for part in name.split("."):
        parts += [*draw(st.lists(st.sampled_from(WRAPS), max_size=2)), part]
    return draw(st.sampled_from(PREFIXES)) + ".".join(parts)


@given(st.data(), st.sets(NAMES, min_size=1, max_size=6))
def test_each_saved_name_gets_its_own_live_one_whatever_wraps_either(data: st.DataObject, names: set[str]) -> None:
    here = {data.draw(wrappings(name)): name for name in sorted(names)}
    there = {data.draw(wrappings(name)): name for name in sorted(names)}
    found = wrapped_otherwise(here, there.keys())
    for one, name in here.items():
        assert there[found.get(one, one)] == name
    assert found.keys().isdisjoint(there)


@given(st.sets(NAMES, max_size=6), st.sets(NAMES, max_size=6))
def test_names_without_wrappers_stay(here: set[str], there: set[str]) -> None:
    assert wrapped_otherwise(here, there) == {}
    assert {unwrapped(name) for name in here} == here


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["module.a.w", "base_model.model.a.w"], ["a.w"]),
        (["a.w"], ["module.a.w", "_orig_mod.a.w"]),
        (["module.a.w", "a.w"], ["a.w"]),
        (["a.w"], ["a.w", "module.a.w"]),
    ],
)
def test_what_may_be_either_stays(here: list[str], there: list[str]) -> None:
    assert wrapped_otherwise(here, there) == {}


def test_a_module_of_that_name_alone_is_no_wrapper() -> None:
    assert unwrapped("module") == "module"
    assert unwrapped("base_model.weight") == "base_model.weight"
    assert unwrapped("a.module.weight") == "a.module.weight"


def test_patterns_of_names_lose_the_hidden_part_too() -> None:
    assert pattern_without_hidden(r"^a\._checkpoint_wrapped_module\.w$") == r"^a\.w$"


def test_a_plan_restores_under_the_live_names_and_says_so() -> None:
    metadata = saved({"_orig_mod.a.w": (2, 3), "_orig_mod.b": (5,)})
    state = live({"a.w": (2, 3), "b": (5,)})
    assert adopt_wrappers(metadata, state).saved_names["a.w"] == "_orig_mod.a.w"
    plan = plan_load(metadata, state, LoadOptions())
    assert names_of(plan, MASTER, "restored") == names_of(plan, "exp_avg", "restored") == ("a.w", "b")


def test_a_rename_may_say_that_an_entry_of_the_module_is_a_masters() -> None:
    metadata = saved({"a.w": (2, 3)}, wholes={("a.kernel", FROZEN): ((2, 3), "bfloat16")})
    found = rename_saved(metadata, [(r"^a\.kernel$", "a.w")])
    assert found.names(FROZEN) == ()
    assert "a.kernel of a.w" in found.notes[0]
    other = saved({"a.w": (2, 3)}, wholes={("a.kernel", FROZEN): ((3, 2), "bfloat16")})
    with pytest.raises(MismatchError, match="two saved parameters one name"):
        rename_saved(other, [(r"^a\.kernel$", "a.w")])


@pytest.mark.parametrize("around", ["module.", "base_model.model.", "module.base_model.model."])
def test_a_name_of_many_wrappers_takes_work_in_proportion_to_its_length(around: str) -> None:
    """Counted in the parts that are looked at: a megabyte of them kept a load busy for minutes."""
    looked_at = 0

    class Parts(list[str]):
        def __getitem__(self, key: object) -> object:
            nonlocal looked_at
            found = super().__getitem__(key)  # type: ignore[index]
            looked_at += len(found) if isinstance(key, slice) else 1
            return found

    parts = Parts([*around.split(".")[:-1] * 2000, "weight"])
    assert number_around(parts) == len(parts) - 1
    assert looked_at <= 3 * len(parts)
    assert unwrapped(around * 2000 + "weight") == "weight"

"""Numbers of tensors in the param groups and in the states of one file: whatever does not fit is damage, not no state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.model_states import index_unpartitioned
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.shards import index_shard
from tests.attacks.seeds import TREES

OPTIONS = StateOptions()


def _base(count: int) -> dict[str, Any]:
    """The state dict of an optimizer with two param groups, the second of which has one tensor."""
    states = {number: {"step": torch.tensor(4.0), "exp_avg": torch.ones(6)} for number in range(count)}
    groups = [{"lr": 0.1, "params": [*range(count - 1)]}, {"lr": 0.2, "params": [count - 1]}]
    return {"state": states, "param_groups": groups}


def _unpartitioned() -> tuple[Any, Any]:
    base = _base(3)
    return {"optimizer": base}, base


def _zero1() -> tuple[Any, Any]:
    tree, base = copy.deepcopy(TREES["zero1"]), _base(2)
    state = tree["optimizer_state_dict"]
    flats = {"single_partition_of_fp32_groups": [torch.ones(6)] * 2, "group_paddings": [0, 0]}
    state |= {**flats, "partition_count": [2, 2], "param_slice_mappings": [{}, {}], "base_optimizer_state": base}
    return tree, base


def _zero3() -> tuple[Any, Any]:
    tree, base = copy.deepcopy(TREES["zero3"]), _base(2)
    tree["optimizer_state_dict"] |= {"fp32_flat_groups": [torch.ones(6)] * 2, "optimizer_state_dict": base}
    return tree, base


def _shard(file: PickledFile) -> Any:
    return index_shard(file, 0, OPTIONS)


SOURCES: dict[str, tuple[Callable[[], tuple[Any, Any]], Callable[[PickledFile], Any]]] = {
    "without ZeRO": (_unpartitioned, lambda file: index_unpartitioned(file, OPTIONS)),
    "ZeRO-1": (_zero1, _shard),
    "ZeRO-3": (_zero3, _shard),
}


def _renumber(base: Any, new: Any) -> None:
    base["state"][new] = base["state"].pop(0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a huge number in a group": lambda base: base["param_groups"][0]["params"].__setitem__(0, (1 << 62) - 1),
    "one number less": lambda base: base["param_groups"][0]["params"].pop(),
    "the number of another group": lambda base: base["param_groups"][0]["params"].append(
        base["param_groups"][1]["params"][0]
    ),
    "states of another number": lambda base: _renumber(base, 7),
    "states of a number beyond 64 bits": lambda base: _renumber(base, 1 << 70),
    "states of a number below 0": lambda base: _renumber(base, -1),
    "states beside all others": lambda base: base["state"].__setitem__(99, base["state"][0]),
}


def _read(source: str, change: Callable[[Any], object], folder: Path) -> Any:
    make, index = SOURCES[source]
    tree, base = make()
    change(base)
    path = folder / "file.pt"
    torch.save(tree, path)
    return index(open_pickled(str(path)))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("change", CHANGES)
def test_states_that_no_group_lists_are_damage(source: str, change: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedError) as caught:
        _read(source, CHANGES[change], tmp_path)
    assert "param" in f"{caught.value.problem} {caught.value.expected}"


@pytest.mark.parametrize("source", ["ZeRO-1", "ZeRO-3"])
def test_flat_tensors_without_states_that_no_group_lists_are_damage(source: str, tmp_path: Path) -> None:
    def change(base: Any) -> None:
        base["state"].clear()
        base["param_groups"][1]["params"].clear()

    with pytest.raises(DamagedError, match="no param group has the flat tensor 1"):
        _read(source, change, tmp_path)


@pytest.mark.parametrize("source", SOURCES)
def test_keys_that_are_no_numbers_are_the_optimizers_own(source: str, tmp_path: Path) -> None:
    assert _read(source, lambda base: base["state"].__setitem__("own", {"count": 3}), tmp_path) is not None


def test_a_group_may_list_a_parameter_twice_as_torch_lets_it(tmp_path: Path) -> None:
    assert _read("without ZeRO", lambda base: base["param_groups"][0]["params"].append(0), tmp_path) is not None

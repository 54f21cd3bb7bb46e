"""Types of DeepSpeed's own entries: each of them, in turn, of another type, is damage that is named."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.errors import DamagedError, LayoutError, UnsupportedError
from elastic_ckpt.formats.own_entries import check_groups, check_optimizer_file, check_own_entries, module_entries
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.stacked_experts import stacked_experts
from tests.attacks.seeds import TREES

MODEL = ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "ds_version")
PARTITIONS = ("zero_stage", "loss_scaler", "group_paddings", "partition_count", "param_slice_mappings")


def opened(folder: Path, tree: Any) -> PickledFile:
    torch.save(tree, folder / "file.pt")
    return open_pickled(str(folder / "file.pt"))


@pytest.mark.parametrize("name", ["model", "zero1", "zero2", "zero3"])
def test_what_deepspeed_writes_is_not_refused(name: str, tmp_path: Path) -> None:
    check_own_entries(opened(tmp_path, TREES[name]))


@pytest.mark.parametrize("value", [-1, 1.5, torch.ones(2), range(3)], ids=str)
@pytest.mark.parametrize("key", [*MODEL, *PARTITIONS])
def test_an_entry_of_another_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    if key in MODEL:
        tree = {**TREES["model"], key: value}
    else:
        tree = {"optimizer_state_dict": {**TREES["zero1"]["optimizer_state_dict"], key: value}}
    with pytest.raises(DamagedError) as caught:
        check_own_entries(opened(tmp_path, tree))
    assert key in str(caught.value.expected)
    assert caught.value.found
    assert not isinstance(caught.value, LayoutError), "DeepSpeed's own loader does not get it"


GROUP = {"lr": 0.1, "params": [0]}


@pytest.mark.parametrize(
    "groups",
    [None, 7, {}, [], "text", [7], [[]], [{"lr": 0.1}], [{"params": 7}], [{"params": [None]}], [{"params": [-1]}]]
    + [[{**GROUP, key: "text"}] for key in ("lr", "betas", "eps", "fused", "decoupled_weight_decay", "param_names")],
    ids=str,
)
def test_param_groups_that_are_none(groups: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        check_groups(opened(tmp_path, {}), groups)
    assert check_groups(opened(tmp_path, {}), [GROUP]) == [GROUP]


@pytest.mark.parametrize(
    "tree", [5, [], None, {"zero_stage": 9}, {"loss_scaler": 7}, {"optimizer_state_dict": []}], ids=str
)
def test_optimizers_files_that_are_none(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        check_optimizer_file(opened(tmp_path, tree))


def nested(levels: int) -> dict[str, Any]:
    """A few dictionaries that hold the one below twice."""
    value: dict[str, Any] = {"last_epoch": 1}
    for _ in range(levels):
        value = {"a": value, "b": [value, value]}
    return value


def test_a_schedule_that_is_endless_written_out_is_a_limit(tmp_path: Path) -> None:
    check_own_entries(opened(tmp_path, {**TREES["model"], "lr_scheduler": nested(6)}))
    with pytest.raises(UnsupportedError, match="up to a limit"):
        check_own_entries(opened(tmp_path, {**TREES["model"], "lr_scheduler": nested(40)}))
    held: dict[str, Any] = {"last_epoch": 1}
    held["itself"] = [held, held]
    check_own_entries(opened(tmp_path, {**TREES["model"], "lr_scheduler": held}))


@pytest.mark.parametrize("entry", ["param_groups", "param_shapes", "a list of the converter's"])
def test_a_container_that_is_held_many_times_counts_each_time(entry: str, tmp_path: Path) -> None:
    """Sixty param groups that share one list are a small file, and a minute of work."""
    path = str(tmp_path / "file.pt")
    if entry == "param_groups":
        numbers = list(range(20_000))
        torch.save({"groups": [{"lr": 0.1, "params": numbers} for _ in range(60)]}, path)
        file = open_pickled(path, False)
        check = partial(check_groups, file, file.tree["groups"])
    elif entry == "param_shapes":
        shapes = {str(number): torch.Size([1]) for number in range(10_000)}
        torch.save({"module": {}, "param_shapes": [shapes] * 60}, path)
        check = partial(check_own_entries, open_pickled(path, False))
    else:
        names = [str(number) for number in range(20_000)]
        torch.save({"param_groups": [], "files": [[["fp32"], names]] * 60}, path)
        check = partial(check_optimizer_file, open_pickled(path, False))
    with pytest.raises(UnsupportedError, match="up to a limit"):
        check()


AUTOEP = {"num_local_experts": 1 << 17, "ep_size": 1, "num_experts": 1 << 17, "expert_key_prefix": "moe"}


@pytest.mark.parametrize("layers", [1, 200])
@pytest.mark.parametrize("entry", ["num_experts", "ds_autoep_layers", "autoep_layers"])
def test_experts_of_all_layers_together_have_a_limit(entry: str, layers: int, tmp_path: Path) -> None:
    """A number takes two bytes of a file, and each expert that it counts a name: gigabytes."""
    each = 1 << 17 if entry == "num_experts" else AUTOEP
    file = opened(tmp_path, {**TREES["model"], entry: [each] * layers})
    with nullcontext() if layers == 1 else pytest.raises(UnsupportedError, match="up to a limit") as caught:
        check_own_entries(file)
        stacked_experts(file)
    assert layers == 1 or caught.value.file == file.path


def test_names_of_nested_modules_do_not_multiply() -> None:
    """Each entry is named by all modules around it, whose names the file has once."""
    long = "x" * 100_000
    few = {long: {"a": {"b": 1, "c": 2}}, "d": 3}
    assert module_entries(few) == {f"{long}.a.b": 1, f"{long}.a.c": 2, "d": 3}
    with pytest.raises(UnsupportedError) as caught:
        module_entries({long: {f"k{number}": number for number in range(1000)}})
    assert "characters in nested modules" in str(caught.value.expected)


def test_a_name_that_is_in_the_module_twice_is_damage() -> None:
    """Flat, and nested: loaders would take one or the other."""
    with pytest.raises(DamagedError, match="what DeepSpeed writes") as raised:
        module_entries({"a.b": 1, "a": {"b": 2}}, "file")
    assert (raised.value.parameter, raised.value.file) == ("a.b", "file")

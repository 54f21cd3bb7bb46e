"""Sizes and steps of flat tensors, of files that ``torch.save`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.formats.flat_facts import counted_steps, partition_numels, steps_of_flats
from elastic_ckpt.formats.pickled import PickledFile, open_pickled


def opened(folder: Path, stage: int, momentum: int, states: dict[int, Any]) -> PickledFile:
    """A file of one flat tensor of 6 elements, and of 2 more of padding that ZeRO-1 and 2 cut off."""
    states = {0: {"exp_avg": torch.zeros(momentum), "step": torch.tensor(4.0)}, **states}
    base = {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}
    if stage == 3:
        state = {"fp32_flat_groups": [torch.zeros(8)], "optimizer_state_dict": base}
    else:
        masters = [torch.zeros(6)]
        state = {"single_partition_of_fp32_groups": masters, "group_paddings": [2], "base_optimizer_state": base}
    torch.save({"optimizer_state_dict": state}, folder / "file.pt")
    return open_pickled(str(folder / "file.pt"))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_partition_has_one_size_with_its_padding(stage: int, tmp_path: Path) -> None:
    assert partition_numels(opened(tmp_path, stage, 8, {}), zero3=stage == 3) == [8]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_of_another_size_leaves_none(stage: int, tmp_path: Path) -> None:
    assert partition_numels(opened(tmp_path, stage, 6, {}), zero3=stage == 3) == [None]


def test_steps_are_those_of_each_flat_tensor_that_counts(tmp_path: Path) -> None:
    file = opened(tmp_path, 1, 8, {1: {"step": 3}, 2: {"exp_avg": torch.zeros(8)}})
    assert steps_of_flats(file) == {0: 4, 1: 3}
    assert counted_steps(file) == {3, 4}

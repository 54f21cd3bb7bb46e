"""Sizes and steps of the flat tensors in an optimizer-states file, as DeepSpeed's own loader takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.formats import saved_config
from elastic_ckpt.formats.pickled import PickledFile, opened_once
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import plain_numbers


def partition_numels(file: PickledFile, zero3: bool) -> list[int | None]:
    """Elements of each partition with its padding, which ZeRO-1 and 2 cut off the masters; ``None``: no one number."""
    state = file.section("optimizer_state_dict")
    states = saved_config.base_state(file).get("state", {})
    refs: Sequence[TensorRef] = state["fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"]
    paddings = [0] * len(refs) if zero3 else state["group_paddings"]
    numels: list[int | None] = []
    for index, (ref, padding) in enumerate(zip(refs, paddings, strict=True)):
        # a flat state keeps its padding
        flat = (v.numel for v in states.get(index, {}).values() if isinstance(v, TensorRef) and v.shape)
        numel = ref.numel + padding
        numels.append(numel if next(flat, numel) == numel else None)
    return numels


@opened_once
def counted_steps(file: PickledFile) -> frozenset[int]:
    return frozenset(steps_of_flats(file).values())


def steps_of_flats(file: PickledFile) -> dict[Any, int]:
    """What an optimizer has counted, by the number of the flat tensor."""
    states = saved_config.base_state(file).get("state", {}).items()
    steps = {number: state["step"] for number, state in states if isinstance(state, Mapping) and "step" in state}
    return {number: int(plain_numbers(file, {"step": step})["step"]) for number, step in steps.items()}

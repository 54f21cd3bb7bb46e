"""Splits a checkpoint that one rank saved into one of many ranks, as DeepSpeed would have written it.

DeepSpeed itself needs a process for each rank. Files are those of the real save but for what differs between ranks:
partitions, paddings, counts, and where each parameter is in them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ckpt.core.chunks import group_rules, placements
from elastic_ckpt.core.flat_ranges import group_offsets, per_parameter_numel

#: ZeRO-1 and 2 pad each group to a multiple of this many elements per rank (``nccl_start_alignment_factor``).
_START_ALIGNMENT = 2
#: Divides the flat tensor of one rank over all.
_Divide = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def split(saved: Path, target: Path, ranks: int) -> None:
    """Write the checkpoint of ``ranks`` ranks into ``target``; ``saved`` is the tag's folder of a ZeRO-1 or 3 save."""
    target.mkdir(parents=True)
    (optimizer,) = saved.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (model,) = saved.glob("*_model_states.pt")
    tree, states = (torch.load(path, map_location="cpu", weights_only=False) for path in (model, optimizer))
    if tree.get("frozen_param_fragments"):
        raise ValueError("frozen parameters are not split")
    tree["dp_world_size"] = ranks
    for config in (tree["ds_config"], states["ds_config"]):  # fewer samples than ranks would mean that ranks share them
        config["train_batch_size"] *= ranks
    numels = [[shape.numel() for shape in shapes.values()] for shapes in tree["param_shapes"]]
    is_zero3 = "fp32_flat_groups" in states["optimizer_state_dict"]
    files = _zero3_files(states, numels, ranks) if is_zero3 else _zero1_files(states, tree, numels, ranks)
    for rank, mine in enumerate(files):
        torch.save(mine, target / optimizer.name.replace("rank_0_", f"rank_{rank}_", 1))
    for rank in range(ranks if is_zero3 else 1):
        torch.save(tree, target / model.name.replace("pp_rank_0_", f"pp_rank_{rank}_", 1))


def _zero3_files(states: Any, numels: Sequence[Sequence[int]], ranks: int) -> Iterator[Any]:
    """Each parameter in equal padded parts."""
    source = states["optimizer_state_dict"]
    inner = source["optimizer_state_dict"]
    divide = [partial(_by_parameter, numels=members, ranks=ranks) for members in numels]
    masters = [divided(flat) for divided, flat in zip(divide, source["fp32_flat_groups"], strict=True)]
    moments = {key: _divided_state(state, divide[key]) for key, state in inner["state"].items()}
    for rank in range(ranks):
        mine = {key: {name: of_rank(rank) for name, of_rank in state.items()} for key, state in moments.items()}
        partitioned = {
            "partition_count": ranks,
            "fp32_flat_groups": [flats[rank] for flats in masters],
            "optimizer_state_dict": {**inner, "state": mine},
        }
        yield {**states, "optimizer_state_dict": {**source, **partitioned}}


def _by_parameter(flat: torch.Tensor, numels: Sequence[int], ranks: int) -> list[torch.Tensor]:
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for whole in flat.split(list(numels)):
        step = per_parameter_numel(whole.numel(), ranks)
        padded = torch.cat([whole, whole.new_zeros(step * ranks - whole.numel())])
        for part, piece in zip(parts, padded.split(step), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]


def _zero1_files(states: Any, tree: Any, numels: Sequence[Sequence[int]], ranks: int) -> Iterator[Any]:
    """Each group as one flat buffer, in equal parts; masters without the padding, unless they are of BF16_Optimizer."""
    source = states["optimizer_state_dict"]
    base, keeps_padding = source["base_optimizer_state"], "zero_stage" not in source
    sums = [sum(members) for members in numels]
    sizes = [-(-numel // (ranks * _START_ALIGNMENT)) * _START_ALIGNMENT for numel in sums]
    divide = [partial(_by_group, used=used, size=size, ranks=ranks) for used, size in zip(sums, sizes, strict=True)]
    masters = [divided(flat) for divided, flat in zip(divide, source["single_partition_of_fp32_groups"], strict=True)]
    moments = {key: _divided_state(state, divide[key]) for key, state in base["state"].items()}
    for rank in range(ranks):
        paddings = [min(max((rank + 1) * size - used, 0), size) for used, size in zip(sums, sizes, strict=True)]
        kept = [0 if keeps_padding else padding for padding in paddings]
        mine = {key: {name: of_rank(rank) for name, of_rank in state.items()} for key, state in moments.items()}
        partitioned = {
            "single_partition_of_fp32_groups": [
                flats[rank][: flats[rank].numel() - cut].clone() for flats, cut in zip(masters, kept, strict=True)
            ],
            "base_optimizer_state": {**base, "state": mine},
            "group_paddings": paddings,
            "partition_count": [ranks] * len(sums),
            "param_slice_mappings": [
                _slices(addresses, list(shapes), members, size, rank)
                for addresses, shapes, members, size in zip(
                    source["param_slice_mappings"], tree["param_shapes"], numels, sizes, strict=True
                )
            ],
        }
        yield {**states, "optimizer_state_dict": {**source, **partitioned}}


def _by_group(flat: torch.Tensor, used: int, size: int, ranks: int) -> Sequence[torch.Tensor]:
    return torch.cat([flat[:used], flat.new_zeros(size * ranks - used)]).split(size)


def _divided_state(state: dict[str, Any], divide: _Divide) -> dict[str, Callable[[int], Any]]:
    """By state, what a rank has of it; counts are the same for all, each in a tensor of its own."""

    def of_rank(value: Any) -> Callable[[int], Any]:
        if isinstance(value, torch.Tensor) and value.dim():
            parts = divide(value)
            return lambda rank: parts[rank].clone()
        return lambda rank: copy.deepcopy(value)

    return {name: of_rank(value) for name, value in state.items()}


def _slices(addresses: Any, names: Sequence[str], numels: Sequence[int], size: int, rank: int) -> Any:
    """``param_slice_mappings`` of one rank: where its parameters are in its partition."""
    address = type(next(iter(addresses.values())))
    placed = placements(group_rules(numels, group_offsets(numels), size), rank)
    return type(addresses)(
        (names[each.index], address(numel=each.range.numel, start=each.flat_offset)) for each in placed
    )

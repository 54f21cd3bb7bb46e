"""Whole masters and moments of a checkpoint's files, merged by rules of their own: elastic_ckpt is not involved."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

COPIES, COLUMNS, SUM, ROWS = "copies", "columns", "sum", "rows"
#: A pattern of names, and how ranks' shards become one: the widths of parts that are fused, or one of these words.
Rule = tuple[str, str | tuple[int, ...]]
Rules = Sequence[Rule]
#: The first that fits counts; without any, shards follow each other in rows.
RULES: Rules = (
    (r"norm|position_embeddings|(attention\.dense|dense_4h_to_h|linear2)\.bias|^\d+\.(weight|bias)$", COPIES),
    (r"(attention\.dense|dense_4h_to_h|linear2)\.weight", COLUMNS),
)
#: (parameter, ``fp32`` or a state) -> tensor.
States = dict[tuple[str, str], torch.Tensor]


class _Unpickler(pickle.Unpickler):
    """Reads arguments whose classes are a codebase's, which is not imported here, as ``None``."""

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *args: None) if module.startswith("megatron") else super().find_class(module, name)


def _read(path: Path) -> Any:
    module = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)


def whole(folder: Path, tp: int, rules: Rules, experts: int = 0, ep: int = 1) -> States:
    """Every whole tensor of a native checkpoint; ``rules`` go before those of all codebases.

    ``experts`` and ``ep`` are the number of each layer's experts and their expert-parallel degree. Such checkpoints
    record no shapes: their tensors are flat.
    """
    shapes = {
        int(path.name.split("_")[-3]): _read(path).get("param_shapes")
        for path in folder.glob("*mp_rank_*_model_states.pt")
        if "_expert_" not in path.name
    }
    ranks = [_of_rank(folder, rank, shapes[rank], experts // ep, ep) for rank in sorted(shapes)]
    found: States = {}
    for first in range(0, len(ranks), tp):  # a stage each; the first that has a tied parameter counts
        for key in ranks[first].keys() - found.keys():
            found[key] = _merged(key, [rank[key] for rank in ranks[first : first + tp]], (*rules, *RULES))
    return found


def _of_rank(
    folder: Path, rank: int, param_shapes: Sequence[Mapping[str, torch.Size]] | None, experts: int, ep: int
) -> States:
    """The shards of one model-parallel rank, each of whose ``ep`` expert-parallel ranks numbers its own experts."""
    fragments: dict[tuple[str, str], list[torch.Tensor]] = {}
    paths = list(folder.glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt"))
    for number in range(len(paths)):
        (path,) = (path for path in paths if f"pp_rank_{number}_" in path.name)
        saved = _read(path)["optimizer_state_dict"]
        is_zero3 = "fp32_flat_groups" in saved
        states = saved["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]["state"]
        for group, master in enumerate(saved["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"]):
            moments = {key: state for key, state in states[group].items() if key.startswith("exp_avg")}
            if is_zero3:
                assert param_shapes is not None
                places = _zero3_places(param_shapes[group], len(paths))
            else:
                places = {name: (at.start, at.numel) for name, at in saved["param_slice_mappings"][group].items()}
            for key, vector in {"fp32": master, **moments}.items():
                for name, (start, numel) in places.items():
                    at = _numbered(name, number % ep * experts), key
                    fragments.setdefault(at, []).append(vector.detach()[start : start + numel])
    flat = {at: torch.cat(of_all) for at, of_all in fragments.items()}
    if param_shapes is None:
        return flat
    found = {name: shape for group in param_shapes for name, shape in group.items()}
    return {at: tensor[: found[at[0]].numel()].view(found[at[0]]) for at, tensor in flat.items()}


def _numbered(name: str, first: int) -> str:
    """A parameter's name, with the number of its expert, if any, among those of all ranks."""
    return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda number: str(int(number[0]) + first), name)


def _zero3_places(shapes: Mapping[str, torch.Size], ranks: int) -> dict[str, tuple[int, int]]:
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = start, math.ceil(shape.numel() / ranks)
        start += places[name][1]
    return places


def _merged(key: tuple[str, str], shards: list[torch.Tensor], rules: Rules) -> torch.Tensor:
    name, state = key
    if len(shards) == 1:
        return shards[0]
    rule = next((rule for pattern, rule in rules if re.search(pattern, name)), ROWS)
    if rule == COPIES or (rule == SUM and state != "fp32"):
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"copies of {name} differ"
        return shards[0]
    if rule == SUM:
        return torch.stack(shards).sum(0)
    if isinstance(rule, str):
        return torch.cat(shards, dim=int(rule == COLUMNS))
    parts = [shard.split([len(shard) * width // sum(rule) for width in rule]) for shard in shards]
    return torch.cat([part for same in zip(*parts, strict=True) for part in same])


def differing(saved: States, loaded: States) -> list[str]:
    """Names of what is not bit by bit the same."""
    same = {key for key in saved.keys() & loaded.keys() if torch.equal(saved[key], loaded[key])}
    return sorted(f"{name} ({key})" for name, key in saved.keys() | loaded.keys() if (name, key) not in same)

"""Whole masters and moments of a checkpoint's files, merged by rules of this test's own: nothing of elastic_ckpt runs."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

#: What a name matches first tells how the ranks' shards become one; else they follow each other along dimension 0.
COPIES, COLUMNS, SUM, ROWS = "copies", "columns", "sum", "rows"
RULES: tuple[tuple[str, str | tuple[int, ...]], ...] = (
    (r"qk_layernorm", ROWS),
    (r"norm|position_embeddings|(attention\.dense|dense_4h_to_h|linear2)\.bias|^\d+\.(weight|bias)$", COPIES),
    (r"(attention\.dense|dense_4h_to_h|linear2)\.weight", COLUMNS),
)
Rules = Sequence[tuple[str, str | tuple[int, ...]]]
States = dict[tuple[str, str], torch.Tensor]


def whole(folder: Path, tp: int, rules: Rules) -> States:
    """(parameter, ``fp32`` or state) -> the whole tensor; ``rules`` go before those of all codebases."""
    ranks: dict[int, States] = {}
    for path in sorted(folder.glob("*mp_rank_*_model_states.pt")):
        rank = int(re.search(r"mp_rank_(\d+)_", path.name)[1])  # type: ignore[index]
        ranks.setdefault(rank, _of_rank(folder, rank, _read(path)["param_shapes"]))
    found: States = {}
    for first in range(0, len(ranks), tp):  # the stages, of which the first with a tied parameter has it
        for key in ranks[first]:
            if key not in found:
                found[key] = _merged(key, [ranks[first + number][key] for number in range(tp)], (*rules, *RULES))
    return found


class _Unpickler(pickle.Unpickler):
    """Reads files whose arguments have classes of a codebase, which is not imported here."""

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *args: None) if module.startswith("megatron") else super().find_class(module, name)


def _read(path: Path) -> Any:
    module = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)


def _of_rank(folder: Path, rank: int, param_shapes: Sequence[Mapping[str, torch.Size]]) -> States:
    paths = sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt"), key=_data_rank)
    fragments: dict[tuple[str, str], list[torch.Tensor]] = {}
    for saved in (_read(path)["optimizer_state_dict"] for path in paths):
        is_zero3 = "fp32_flat_groups" in saved
        flat = saved["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"]
        states = saved["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]["state"]
        for group, master in enumerate(flat):
            vectors = {"fp32": master} | {k: v for k, v in states[group].items() if torch.is_tensor(v) and v.numel() > 1}
            if is_zero3:
                places = _zero3_places(param_shapes[group], len(paths))
            else:
                mappings = saved["param_slice_mappings"][group]
                places = {name: (place.start, place.numel) for name, place in mappings.items()}
            for name, (start, numel) in places.items():
                for key, vector in vectors.items():
                    fragments.setdefault((name, key), []).append(vector.detach()[start : start + numel])
    shapes = {name: shape for group in param_shapes for name, shape in group.items()}
    return {
        (name, key): torch.cat(parts)[: math.prod(shapes[name])].reshape(shapes[name])
        for (name, key), parts in fragments.items()
    }


def _data_rank(path: Path) -> int:
    return int(re.search(r"pp_rank_(\d+)_", path.name)[1])  # type: ignore[index]


def _zero3_places(shapes: Mapping[str, torch.Size], ranks: int) -> dict[str, tuple[int, int]]:
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = start, -(-math.prod(shape) // ranks)
        start += places[name][1]
    return places


def _merged(key: tuple[str, str], shards: Sequence[torch.Tensor], rules: Rules) -> torch.Tensor:
    name, state = key
    rule = next((rule for pattern, rule in rules if re.search(pattern, name)), ROWS)
    if rule == COLUMNS:
        return torch.cat(list(shards), dim=1)
    if rule == COPIES or (rule == SUM and state != "fp32"):
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"copies of {name} differ"
        return shards[0]
    if rule == SUM:
        return torch.stack(list(shards)).sum(0)
    if rule == ROWS:
        return torch.cat(list(shards))
    parts = [shard.split([len(shard) * int(width) // sum(map(int, rule)) for width in rule]) for shard in shards]
    return torch.cat([part for parts_of_all in zip(*parts, strict=True) for part in parts_of_all])


def differing(saved: States, loaded: States) -> list[str]:
    """Names that do not have the same bits on both sides; vocabularies may differ in rows of padding."""
    different = sorted({name for name, _ in saved.keys() ^ loaded.keys()})
    for key in saved.keys() & loaded.keys():
        rows = min(len(saved[key]), len(loaded[key])) if re.search(r"word_embeddings\.weight|final_linear|lm_head", key[0]) else None
        if not torch.equal(saved[key][:rows], loaded[key][:rows]):
            different.append(f"{key[0]} ({key[1]})")
    return different

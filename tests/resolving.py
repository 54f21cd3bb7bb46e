"""Decisions of who holds what, carried out on real shards."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import ParamAffineMap

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LiveShards, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata, SavedParameter, SourceFacts, TensorMetadata
from elastic_ckpt.core.shard_specs import ShardSpec, declared_by
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.sharding.resolve import STRICT, ReshardPlan, resolve
from elastic_ckpt.sharding.rules import Preset, ShardingRules

Tensors = Sequence[torch.Tensor]


def logical(name: str, key: str, shards: Tensors) -> TensorMetadata:
    shapes = tuple(tuple(shard.shape) for shard in shards)
    whole = (
        chunks_of(StorageChunk(FlatRange(0, math.prod(s)), r, 0)) if math.prod(s) else chunks_of()
        for r, s in enumerate(shapes)
    )
    dtype = str(shards[0].dtype).removeprefix("torch.")
    return TensorMetadata(
        name, key, shapes[0], dtype, tuple(chain.from_iterable(whole)), shards=shapes if len(shapes) > 1 else ()
    )


def checkpoint(shards: Mapping[str, Tensors], key: str = MASTER, info: Any = None, **more: Any) -> CheckpointMetadata:
    return CheckpointMetadata(
        SourceFacts("native", "/ckpt/tag", "tag", 1, 1, "0.19.8"),
        (),
        {name: SavedParameter(tuple(held[0].shape), 0, ()) for name, held in shards.items()},
        {(name, key): logical(name, key, held) for name, held in shards.items()},
        ({},),
        declared=declared_by(info),
        **more,
    )


def layout(live: Tensors, **more: Any) -> LiveShards:
    return LiveShards(tuple(tuple(shard.shape) for shard in live), **more)


def decided(
    metadata: CheckpointMetadata,
    name: str,
    held: LiveShards,
    rank: int = 0,
    book: ShardingRules | None = None,
    policy: str = STRICT,
) -> ReshardPlan:
    model = ModelLayout(RankCoordinates(tp=len(held.shapes), tp_rank=rank), {name: held})
    return resolve(metadata, model, [name], book or ShardingRules(), policy)


def arrives(resharding: ReshardPlan, name: str, saved: Tensors, like: torch.Tensor, key: str = MASTER) -> torch.Tensor:
    """What a live rank gets; NaN: nothing."""
    transfer = resharding.transfers.get((name, key)) or resharding.transfers.get((name, ""))
    if transfer is None and len(saved) == 1:
        return saved[0]  # as it was saved
    assert transfer is not None
    found = torch.full((like.numel(),), torch.nan)
    if transfer.scale is not None:
        return (torch.stack(list(saved)).sum(0) * transfer.scale).view(like.shape)
    for shard, band in transfer.copies:
        for row in range(band.rows):
            source, target = band.source + row * band.source_stride, band.target + row * band.target_stride
            found[target : target + band.width] = saved[shard].flatten()[source : source + band.width]
    return found.view(like.shape)


def check(
    name: str,
    saved: Tensors,
    live: Tensors,
    *,
    book: ShardingRules | None = None,
    policy: str = STRICT,
    said: Mapping[str, Any] | None = None,
    **more: Any,
) -> ReshardPlan:
    """Every live rank gets its shard; returns what was decided for the last one."""
    metadata = checkpoint({name: saved}, **more)
    for rank, expected in enumerate(live):
        found = decided(metadata, name, layout(live, **(said or {})), rank, book, policy)
        assert torch.equal(arrives(found, name, saved, expected), expected), found
    return found


def refused(name: str, saved: Tensors, live: Tensors, book: ShardingRules | None = None, **more: Any) -> MismatchError:
    said = more.pop("said", {})
    with pytest.raises(MismatchError) as caught:
        decided(checkpoint({name: saved}, **more), name, layout(live, **said), 0, book)
    assert caught.value.parameter == name
    return caught.value


def rules(name: str, **rule: Any) -> ShardingRules:
    return ShardingRules((ShardSpec(pattern=re.escape(name), **rule),))


def preset(name: str, **rule: Any) -> ShardingRules:
    return ShardingRules(preset=Preset(name="mine", description="", rules=[ShardSpec(pattern=re.escape(name), **rule)]))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


def merged_halves(whole: torch.Tensor, degree: int) -> list[torch.Tensor]:
    first, second = whole.chunk(2)
    return [torch.cat(pair) for pair in zip(first.chunk(degree), second.chunk(degree), strict=True)]


def affine(name: str, recorded: ParamAffineMap) -> dict[str, Any]:
    return {"affine_map": {"version": 1, "params": {f"^{re.escape(name)}$": recorded.to_dict()}}}

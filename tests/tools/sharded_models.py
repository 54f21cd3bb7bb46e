"""Tensor-parallel models of jobs that do not run."""

from __future__ import annotations

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.formats.merging import merge_shards, merge_stages
from elastic_ckpt.sharding.rules import ShardingRules
from tests.simulation import Shape, saved

RULES = ShardingRules(
    (
        ShardSpec(pattern=r".*\.up", kind="column"),
        ShardSpec(pattern=r".*\.down", kind="row"),
        ShardSpec(pattern=r".*\.norm", kind="replicated"),
        ShardSpec(pattern="words", kind="vocabulary"),
    )
)


SHARDS = {"words": (10, 4), "0.up": (8, 4), "0.down": (4, 8), "0.norm": (4,)}


def sharded(tp: int, shapes: dict[str, Shape] = SHARDS) -> CheckpointMetadata:
    return merge_stages([merge_shards([saved(shapes) for _ in range(tp)])])

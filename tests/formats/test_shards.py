"""Optimizer-states files of all ranks."""

from __future__ import annotations

import pytest

from elastic_ckpt.core.values import Features
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, with_own_padding
from elastic_ckpt.formats.torch_archive.tensors import TensorRef


def shard(rank: int, saved: int, padding: int) -> OptimizerShard:
    """A file of one rank, with so many elements of a param group's masters and so much padding in ``group_paddings``."""
    flat = FlatShard(TensorRef("float32", (saved,), (1,), 0), saved + padding, StatesOfOne({}))
    return OptimizerShard(
        path=f"{rank}.pt",
        nbytes=0,
        partition_count=(2,),
        zero_stage=1,
        ds_version="0.14.5",
        flats=(flat,),
        groups=({},),
        flat_groups=(0,),
        loss_scaler=None,
        loss_scale=1.0,
        overflow=False,
        features=Features(),
    )


@pytest.mark.parametrize(
    ("ranks", "whole", "numel"), [(2, 4096, 600), (2, 4096, 4090), (8, 2, 5), (8, 2, 14), (4, 2, 1), (3, 10, 29)]
)
def test_all_padding_may_be_counted_as_the_last_ranks(ranks: int, whole: int, numel: int) -> None:
    """As DeepSpeed 0.14 and 0.15 save; from 0.16 on each rank's file has its own padding."""
    padding = ranks * whole - numel
    last = len(range(whole)[: whole - padding])
    saved = [shard(rank, whole, 0) for rank in range(ranks - 1)] + [shard(ranks - 1, last, padding)]
    assert [each.flats[0].partition_numel for each in with_own_padding(saved)] == [whole] * ranks


def test_another_size_of_the_last_partition_is_left_to_be_refused() -> None:
    saved = [shard(0, 8, 0), shard(1, 3, 6)]
    assert with_own_padding(saved) == saved

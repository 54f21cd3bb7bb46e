"""Optimizer-states files of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import Features
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, index_shard, with_own_padding
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


@pytest.mark.parametrize(
    "optimizer",
    [
        {"single_partition_of_fp32_groups": [torch.ones(4)], "zero_stage": 1, "base_optimizer_state": {"a": 1, "b": 2}},
        {"fp32_flat_groups": [torch.ones(4)], "zero_stage": 3, "optimizer_state_dict": {"a": 1, "b": 2}},
    ],
    ids=["ZeRO-1", "ZeRO-3"],
)
def test_an_optimizers_own_kind_of_state_dict_is_refused_by_name(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, path)
    with pytest.raises(UnsupportedError, match="of its own kind"):
        index_shard(open_pickled(str(path)), 0, StateOptions())

"""What changes in Megatron's client state with the topology."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.engines.coordinates import follow_topology

PLACE = RankCoordinates(partition_degree=2, partition_rank=1, tp=4, tp_rank=3, pp=2, pp_rank=1)
CUDA_STATE = torch.zeros(16, dtype=torch.uint8)


def state_of(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_topology_fields_of_arguments_follow_the_live_job() -> None:
    saved = Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        data_parallel_size=8,
        world_size=16,
        rank=5,
        lr=0.1,
    )
    live = follow_topology(saved, PLACE, rank=13)
    assert vars(live) == {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "world_size": 16,
        "rank": 13,
        "lr": 0.1,
    }
    assert saved.rank == 5, "the saved arguments were changed"


def test_arguments_of_gpt_neox_are_a_dict() -> None:
    saved = {"model_parallel_size": 2, "pipe_parallel_size": 4, "world_size": 8, "hidden_size": 64}
    live = follow_topology(saved, PLACE, rank=0)
    assert live == {"model_parallel_size": 4, "pipe_parallel_size": 2, "world_size": 16, "hidden_size": 64}


@pytest.mark.parametrize("saved", [None, "text", [1]])
def test_what_is_no_arguments_stays(saved: Any) -> None:
    assert follow_topology(saved, PLACE, rank=0) is saved

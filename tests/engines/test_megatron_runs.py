"""What changes in Megatron's client state with the topology."""

from __future__ import annotations

import random
import struct
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.engines.megatron_runs import follow_topology, reseed

PLACE = RankCoordinates(dp=2, dp_rank=1, tp=4, tp_rank=3, pp=2, pp_rank=1)
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


def test_random_states_are_those_of_a_new_run_with_the_same_seed() -> None:
    saved = {
        "args": Namespace(seed=1234),
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": state_of(0),
        "cuda_rng_state": CUDA_STATE,
        "rng_tracker_states": {"model-parallel-rng": state_of(1), "data-parallel-rng": state_of(2)},
        "iteration": 7,
    }
    entries, seed = reseed(saved, PLACE)
    assert seed == 1234
    assert sorted(entries) == sorted(key for key in saved if "rng" in key)
    assert entries["random_rng_state"] == random.Random(1334).getstate()  # 1234 + 100 for each stage before
    assert (entries["np_rng_state"][1] == np.random.RandomState(1334).get_state()[1]).all()
    assert torch.equal(entries["torch_rng_state"], state_of(1334))
    assert entries["cuda_rng_state"].numpy().tobytes() == struct.pack("<Qq", 1334, 0)
    trackers = entries["rng_tracker_states"]
    assert torch.equal(trackers["model-parallel-rng"], state_of(1334 + 2718 + 3))
    assert torch.equal(trackers["data-parallel-rng"], state_of(1334))


def test_every_tensor_parallel_rank_drops_out_otherwise() -> None:
    saved = {"args": Namespace(seed=1), "rng_tracker_states": {"model-parallel-rng": state_of(0)}}
    states = [
        reseed(saved, RankCoordinates(tp=2, tp_rank=rank))[0]["rng_tracker_states"]["model-parallel-rng"]
        for rank in (0, 1)
    ]
    assert not torch.equal(*states)


def test_data_parallel_ranks_differ_where_the_run_asked_for_it() -> None:
    saved = {"args": Namespace(seed=1, data_parallel_random_init=True), "torch_rng_state": state_of(0)}
    assert torch.equal(reseed(saved, PLACE)[0]["torch_rng_state"], state_of(1 + 100 + 10))


def test_states_of_newer_versions_are_a_list() -> None:
    saved = {
        "args": Namespace(seed=5),
        "rng_state": [{"torch_rng_state": state_of(0)}, {"torch_rng_state": state_of(1)}],
    }
    entries, _ = reseed(saved, RankCoordinates(tp=2))
    assert len(entries["rng_state"]) == 1
    assert torch.equal(entries["rng_state"][0]["torch_rng_state"], state_of(5))


@pytest.mark.parametrize("args", [None, Namespace(), Namespace(seed="1"), Namespace(seed=True)])
def test_without_a_seed_nothing_is_made_up(args: Any) -> None:
    assert reseed({"args": args, "torch_rng_state": state_of(0)}, PLACE) == ({}, None)


def test_without_states_there_is_nothing_to_seed() -> None:
    assert reseed({"args": Namespace(seed=1)}, PLACE) == ({}, None)

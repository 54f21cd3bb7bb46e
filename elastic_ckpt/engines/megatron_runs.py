"""Topology-dependent entries of Megatron's client state: arguments and random states.

After a change of the tensor- or pipeline-parallel degree, some ranks have no saved random state, and others must not
share one. They start as a new run with the same seed would, by Megatron's formulas: ``_set_random_seed``
(training/initialize.py) and ``model_parallel_cuda_manual_seed`` (core/tensor_parallel/random.py).
"""

from __future__ import annotations

import argparse
import copy
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from elastic_ckpt.core.local_state import RankCoordinates

#: Seed offsets of generators that differ between tensor-parallel ranks (dropout in parallel regions).
_OFFSETS = {"model-parallel-rng": 2718, "expert-parallel-rng": 1024}
_TRACKER = "rng_tracker_states"
#: Keys of states that derive from a seed.
_STATES = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", _TRACKER)
#: Bytes of a CUDA generator's state: seed and offset (``CUDAGeneratorImpl::get_state``).
_CUDA_NBYTES = 16


def live_arguments(engine: Any) -> dict[str, Any]:
    """Plain values among the arguments of the live run; empty unless its code base keeps them where it is known to."""
    args = getattr(engine.module, "neox_args", None)  # gpt-neox
    variables = sys.modules.get("megatron.global_vars")  # Megatron-DeepSpeed, bigscience's too
    if args is None and variables is not None:
        args = getattr(variables, "_GLOBAL_ARGS", None)
    values = dict(vars(args)) if args is not None else {}
    for layer in engine.module.modules():
        if hasattr(layer, "gqa_project"):  # until commit 96c242eb gpt-neox took q, k and v from each head
            values["gqa_contiguous"] = "new_query_shape" in layer.gqa_project.__code__.co_varnames
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float, bool, type(None)))}


def follow_topology(args: Any, coordinates: RankCoordinates, rank: int) -> Any:
    """A copy of saved arguments (Megatron's namespace or gpt-neox's dict) with the topology of the live job.

    Anything else is returned unchanged. ``rank`` is the global rank.
    """
    if not isinstance(args, (argparse.Namespace, dict)):
        return args
    live = {
        "tensor_model_parallel_size": coordinates.tp,
        "pipeline_model_parallel_size": coordinates.pp,
        "data_parallel_size": coordinates.dp,
        "transformer_pipeline_model_parallel_size": coordinates.pp,
        "model_parallel_size": coordinates.tp,
        "pipe_parallel_size": coordinates.pp,
        "world_size": coordinates.dp * coordinates.tp * coordinates.pp,
        "rank": rank,
        "tensor_model_parallel_rank": coordinates.tp_rank,
        "pipeline_model_parallel_rank": coordinates.pp_rank,
    }
    changed = copy.copy(args)
    values = vars(changed) if isinstance(changed, argparse.Namespace) else changed
    for key, value in live.items():
        if isinstance(values.get(key), int):
            values[key] = value
    return changed


def reseed(saved: Mapping[str, Any], coordinates: RankCoordinates) -> tuple[dict[str, Any], int | None]:
    """Random states for a rank of another model-parallel topology.

    Returns the entries of the client state to replace, and their seed; none if it has no such states or no seed.
    """
    args = saved.get("args")
    values = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    seed = values.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        return {}, None
    rank_seed = seed + 100 * coordinates.pp_rank
    if values.get("data_parallel_random_init"):
        rank_seed += 10 * coordinates.dp_rank
    found = {key: _state(key, saved[key], rank_seed, coordinates) for key in _STATES if saved.get(key) is not None}
    states = saved.get("rng_state")
    if isinstance(states, list) and states and isinstance(states[0], Mapping):
        first = states[0]
        found["rng_state"] = [{key: _state(key, first[key], rank_seed, coordinates) for key in first if key in _STATES}]
    return found, seed if found else None


def _state(key: str, saved: Any, seed: int, coordinates: RankCoordinates) -> Any:
    """A generator's state after seeding, of the saved one's kind."""
    if key == "random_rng_state":
        return random.Random(seed).getstate()  # not for secrets
    if key == "np_rng_state":
        return np.random.RandomState(seed % 2**32).get_state()
    if key == _TRACKER:
        offsets = {name: offset + coordinates.tp_rank for name, offset in _OFFSETS.items()}
        return {name: _state("", state, seed + offsets.get(name, 0), coordinates) for name, state in saved.items()}
    if isinstance(saved, torch.Tensor) and saved.numel() == _CUDA_NBYTES:
        return torch.frombuffer(bytearray(struct.pack("<Qq", seed % 2**64, 0)), dtype=torch.uint8)
    return torch.Generator().manual_seed(seed).get_state()

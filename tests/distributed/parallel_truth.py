"""What a tensor and pipeline parallel job holds, whole and by parameter name, put together without elastic_ckpt."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.distributed import truth as plain
from tests.distributed.parallel_layouts import cut_of, whole_of, whole_shape
from tests.distributed.parallel_models import Parallel, initial, place_of


def gather(engine: Any, parallel: Parallel) -> dict[str, Any]:
    """Masters, states, weights and buffers by name, all whole; hyperparameters by parameter; counters. Collective.

    Replicated parameters have to be bit-equal on all tensor parallel ranks, tied ones on all stages, and everything
    on all data parallel ranks.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    # others keep states that are not one value for each element, or 8-bit codes of one
    dist.all_gather_object(everyone, local(engine, has_states=parallel.optimizer == "adamw"))
    truth = {kind: merged(parallel, everyone, kind) for kind in ("masters", "states", "weights", "buffers")}
    truth["groups"] = union([held["groups"] for held in everyone])
    truth["steps"] = sorted({step for held in everyone for step in held["steps"]})
    for kind in ("counters", "scale"):
        assert all(held[kind] == everyone[0][kind] for held in everyone), (kind, everyone)
        truth[kind] = everyone[0][kind]
    return truth | {"scheduler": engine.lr_scheduler.state_dict(), "parallel": asdict(parallel)}


def local(engine: Any, has_states: bool = True) -> dict[str, Any]:
    """What this rank's shard of this rank's stage has, put together over data parallel ranks alone. Collective."""
    keys = plain.state_keys(engine) if has_states and any(plain.base_of(engine).state.values()) else []
    held: dict[str, Any] = {"masters": {}, "states": {}, "weights": plain.low_precision(engine)}
    if engine.zero_optimization_stage() == 0 and not isinstance(engine.optimizer, BF16_Optimizer):
        plain.gather_unpartitioned(engine, keys, held)
    else:
        gather_partitioned(engine, keys, held)
    persistent = engine.module.state_dict().keys()
    held["buffers"] = {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
    groups = plain.hyperparameters(engine)
    held["groups"] = {name: values for names, values in zip(engine.members, groups, strict=True) for name in names}
    held["steps"] = plain.steps(engine)
    held["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    return held | {"scale": plain.loss_scale(engine)}


def gather_partitioned(engine: Any, keys: list[str], held: dict[str, Any]) -> None:
    """Masters and states by DeepSpeed's getters, which know nothing of shards without an element."""
    if keys:
        plain.relink(engine)
    for name, param in engine.module.named_parameters():
        shape = getattr(param, "ds_shape", param.shape)
        nothing = torch.empty(shape) if 0 in shape else None
        held["masters"][name] = safe_get_full_fp32_param(param).clone() if nothing is None else nothing
        for key in keys:
            state = safe_get_full_optimizer_state(param, key).clone() if nothing is None else nothing
            held["states"][name, key] = state


def merged(parallel: Parallel, everyone: list[dict[str, Any]], kind: str) -> dict[Any, torch.Tensor]:
    """One kind of tensor, whole: shards put together, stages united."""
    by_place = {place_of(parallel, rank): held[kind] for rank, held in enumerate(everyone)}
    for place, held in by_place.items():
        first = next(other for at, other in by_place.items() if (at.tp, at.pp) == (place.tp, place.pp))
        assert first.keys() == held.keys(), (kind, place)
        for key, value in held.items():
            assert torch.equal(value, first[key]), f"{kind} {key} differs between data parallel ranks"
    stages = []
    for stage in range(parallel.pp):
        shards = [held for place, held in by_place.items() if place.pp == stage and place.dp == 0]
        assert len(shards) == parallel.tp and all(held.keys() == shards[0].keys() for held in shards), (kind, stage)
        stages.append({key: whole(parallel, key, [held[key] for held in shards]) for key in shards[0]})
    return union(stages)


def whole(parallel: Parallel, key: Any, pieces: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all tensor parallel ranks; ``key`` is a name, or a name and a state's."""
    name = key if isinstance(key, str) else key[0]
    shape = whole_shape(parallel, name, [piece.shape for piece in pieces])
    return whole_of(pieces, cut_of(parallel, name, shape), str(key))


def union(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    """What all of them hold; where several hold the same, it has to be equal."""
    found: dict[Any, Any] = {}
    for part in parts:
        for key, value in part.items():
            other = found.setdefault(key, value)
            is_equal = torch.equal(other, value) if torch.is_tensor(value) else other == value
            assert is_equal, f"{key} differs between ranks"
    return found


def assert_fresh(engine: Any, parallel: Parallel, seed: int) -> None:
    """An engine that has not stepped holds what it was filled with: a proof of the cuts. Collective."""
    truth = gather(engine, parallel)
    # without ZeRO, DeepSpeed makes states in fp16 by a step of no gradient, with which masters decay, and not weights
    decays = parallel.stage == 0 and parallel.precision.startswith("fp16")
    for name, value in truth["weights" if decays else "masters"].items():
        dtype = truth["weights"][name].dtype  # some of DeepSpeed's engines round weights before they make masters
        expected = initial(name, list(value.shape), seed)
        assert torch.equal(value.to(dtype), expected.to(dtype)), f"{parallel.name}: {name} is put together wrongly"


def differences(engine: Any, parallel: Parallel, truth: dict[str, Any]) -> dict[str, str]:
    """What of an engine is not exactly ``truth``. Collective."""
    now = gather(engine, parallel)
    found = tensor_differences(now, truth)
    for state in (truth, now):
        state["progress"] = {key: state["scheduler"][key] for key in ("last_epoch", "_step_count")}
    return found | plain.compare(now, {kind: truth[kind] for kind in ("steps", "groups", "counters", "progress")})


def tensor_differences(now: dict[str, Any], truth: dict[str, Any]) -> dict[str, str]:
    """The tensors that are not bit-equal; where a vocabulary has other padding, in the rows that both have."""
    kinds = ("masters", "states", "weights", "buffers")
    found, expected = ({kind: dict(state[kind]) for kind in kinds} for state in (now, truth))
    expected["weights"] = {name: truth["masters"][name] for name in truth["weights"]}
    if truth["parallel"]["rows"] != now["parallel"]["rows"]:
        for kind in kinds:
            for key in found[kind].keys() & expected[kind].keys():
                here, there = found[kind][key], expected[kind][key]
                if here.shape[1:] == there.shape[1:]:
                    common = min(len(here), len(there))
                    found[kind][key], expected[kind][key] = here[:common], there[:common]
    return plain.compare(found, expected)

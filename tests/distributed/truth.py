"""What an engine holds, by parameter name, read through DeepSpeed's public getters alone."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def relink(engine: Any) -> None:
    """ZeRO-1/2 of DeepSpeed 0.19 links only the first group's states by itself; link them all."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def state_keys(engine: Any) -> list[str]:
    """Names of the elementwise states of the first flat tensor."""
    state = next(iter(engine.optimizer.optimizer.state.values()))
    return sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim() == 1)


def gather(engine: Any, keys: list[str]) -> dict[str, Any]:
    """Masters, states, buffers, steps, hyperparameters, counters and scheduler of a whole job. Collective."""
    truth: dict[str, Any] = {"masters": {}, "states": {}, "weights": {}}
    if engine.zero_optimization_stage() < 3 and engine.zero_round_robin_gradients():
        gather_by_address(engine, keys, truth)
    else:
        for name, param in engine.module.named_parameters():
            truth["masters"][name] = safe_get_full_fp32_param(param).clone()
            for key in keys:
                truth["states"][name, key] = safe_get_full_optimizer_state(param, key).clone()
    truth["buffers"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    truth["weights"] = low_precision(engine)
    truth["steps"] = steps(engine)
    truth["groups"] = hyperparameters(engine)
    truth["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    truth["scheduler"] = engine.lr_scheduler.state_dict()
    return truth


def gather_by_address(engine: Any, keys: list[str], truth: dict[str, Any]) -> None:
    """Masters and states with ``round_robin_gradients``, where DeepSpeed's own getters read the wrong fragments.

    Parameters are views of their group's flat buffer, so their addresses tell where they lie in it, and in the
    concatenated partitions of all ranks, whatever order DeepSpeed believes in.
    """
    optimizer = engine.optimizer
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        flat = optimizer.bit16_groups_flat[group]
        whole = {key: _whole(optimizer.optimizer.state[master][key]) for key in keys}
        whole["fp32"] = _whole(master.data)
        for param in optimizer.bit16_groups[group]:
            start = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
            name = engine.param_names[param]
            for key, values in whole.items():
                piece = values[start : start + param.numel()].view(param.shape).clone()
                if key == "fp32":
                    truth["masters"][name] = piece
                else:
                    truth["states"][name, key] = piece


def _whole(partition: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partition.contiguous())
    return torch.cat(parts)


def low_precision(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that the forward pass sees, whole. Collective."""
    import deepspeed

    weights = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.data.clone()
    return weights


def steps(engine: Any) -> list[float]:
    """The distinct step counts over all flat tensors of this rank."""
    return sorted({float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state})


def hyperparameters(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "initial_lr", "name") if key in group}
        for group in engine.optimizer.param_groups
    ]


def assert_equal(engine: Any, truth: dict[str, Any], where: str) -> None:
    """The engine holds exactly ``truth``. Collective."""
    keys = sorted({key for _, key in truth["states"]})
    if keys:
        relink(engine)
    now = gather(engine, keys)
    assert now["masters"].keys() == truth["masters"].keys(), where
    for kind in ("masters", "states", "weights", "buffers"):
        for key, expected in truth[kind].items():
            found = now[kind][key]
            assert found.dtype == expected.dtype, f"{where}: dtype of {kind} {key}: {found.dtype} {expected.dtype}"
            assert torch.equal(found, expected), f"{where}: {kind} {key} differs by {(found - expected).abs().max()}"
    for kind in ("steps", "groups", "counters", "scheduler"):
        assert now[kind] == truth[kind], f"{where}: {kind}: {now[kind]} instead of {truth[kind]}"
    counts = [state.get("step") for state in engine.optimizer.optimizer.state.values()]
    held = [id(count) for count in counts if torch.is_tensor(count)]
    assert len(held) == len(set(held)), f"{where}: flat tensors share one step tensor"


def fingerprint(engine: Any) -> dict[str, str]:
    """Hashes of everything that a load could touch on this rank: to prove that a refused load touched nothing."""
    optimizer = engine.optimizer
    return {
        "weights": _digest(list(engine.module.state_dict().values())),
        "partitions": _digest([getattr(p, "ds_tensor", p) for p in engine.module.parameters()]),
        "masters": _digest(_flats(optimizer)),
        "states": _digest([value for flat in _flats(optimizer) for value in _state_values(optimizer, flat)]),
        "groups": repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
        "scheduler": repr(engine.lr_scheduler.state_dict()),
        "counters": repr((engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)),
        "scaler": repr(vars(getattr(optimizer, "loss_scaler", Exception())))
        + repr(getattr(optimizer, "overflow", None)),
        "dp": repr(engine.loaded_checkpoint_dp_world_size),
    }


def _flats(optimizer: Any) -> list[torch.Tensor]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def _state_values(optimizer: Any, flat: torch.Tensor) -> list[Any]:
    state = optimizer.optimizer.state.get(flat, {})
    return [state[key] for key in sorted(state)]


def _digest(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if torch.is_tensor(value):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def agree(value: Any) -> None:
    """Every rank holds the same value. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert all(other == everyone[0] for other in everyone), everyone

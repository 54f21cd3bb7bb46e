"""What an engine holds, by parameter name, read through DeepSpeed's public getters alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def base_of(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that the user made."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def relink(engine: Any) -> None:
    """ZeRO-1/2 of DeepSpeed 0.19 links only the first group's states by itself; link them all."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def state_keys(engine: Any) -> list[str]:
    """Names of the elementwise states of the first tensor."""
    state = next(iter(base_of(engine).state.values()))
    return sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim())


def gather(engine: Any, keys: list[str], may_lack: bool = False) -> dict[str, Any]:
    """Masters, states, buffers, steps, hyperparameters, counters and scheduler of a whole job. Collective.

    ``may_lack``: whether parameters may have no states, of which DeepSpeed's getters raise errors, on some ranks.
    """
    truth: dict[str, Any] = {"masters": {}, "states": {}, "weights": {}}
    # BF16_Optimizer partitions without ZeRO too, as bf16 was trained until DeepSpeed 0.16
    # DeepSpeed 0.17.6 does not in ZeRO-1 either, for bf16 with gradients in fp32
    if engine.zero_optimization_stage() < 2 and not hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        gather_unpartitioned(engine, keys, truth)
    elif engine.zero_optimization_stage() < 3 and engine.zero_round_robin_gradients():
        gather_by_address(engine, keys, truth)
    else:
        for name, param in engine.module.named_parameters():
            if not param.requires_grad or not is_full(param):
                continue
            truth["masters"][name] = safe_get_full_fp32_param(param).clone()
            for key in keys:
                if not may_lack or has_state(param, key):
                    truth["states"][name, key] = safe_get_full_optimizer_state(param, key).clone()
    # since DeepSpeed 0.18
    dtype = getattr(engine.optimizer, "master_weights_and_grads_dtype", torch.float32)
    if engine.zero_optimization_stage() == 3 and dtype != torch.float32:
        truth["states"] = zero3_states(engine, keys)
    truth["buffers"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    truth["weights"] = low_precision(engine)
    for kind in ("masters", "states", "buffers", "weights"):  # of an offloaded engine, getters answer from two devices
        truth[kind] = {name: value.cpu() for name, value in truth[kind].items()}
    truth["steps"] = steps(engine)
    truth["groups"] = hyperparameters(engine)
    truth["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    truth["scheduler"] = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    truth["scale"] = loss_scale(engine)
    return truth


def has_state(param: Any, key: str) -> bool:
    """Whether all ranks that hold a piece of a parameter have this state of it. Collective in its data-parallel group."""
    if hasattr(param, "_z3_optimizer"):
        optimizer = param._z3_optimizer
        sub_group, _, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        has = key in optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[sub_group]]
    else:
        has = param._hp_mapping is None or key in param._hp_mapping.optim_fragment
    everyone = torch.tensor(int(has))
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group=getattr(param, "_dp_group", None))
    return bool(everyone)


def is_full(param: Any) -> bool:
    """Whether a parameter has elements: DeepSpeed's getters answer ``None`` for what is empty, or raise."""
    return bool(getattr(param, "ds_numel", param.numel()))


def gather_unpartitioned(engine: Any, keys: list[str], truth: dict[str, Any]) -> None:
    """Without ZeRO: DeepSpeed has no getters for it, but everything lies whole in the optimizer."""
    optimizer, base = engine.optimizer, base_of(engine)
    for group, values in enumerate(base.param_groups):
        params = optimizer.fp16_groups[group] if hasattr(optimizer, "fp16_groups") else values["params"]
        flat = hasattr(optimizer, "fp32_groups_flat")
        position = 0
        for number, param in enumerate(params):
            holder = values["params"][0 if flat else number]
            part = slice(position, position + param.numel()) if flat else slice(None)
            name = engine.param_names[param]
            if not is_full(param):
                continue
            truth["masters"][name] = holder.detach().reshape(-1)[part].view(param.shape).clone()
            for key in keys:
                if key in base.state.get(holder, {}):
                    truth["states"][name, key] = base.state[holder][key].reshape(-1)[part].view(param.shape).clone()
            position += param.numel()


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """What moves in the loss scaler of an fp16 run."""
    if not engine.fp16_enabled():
        return None
    names = ("loss_scale_config", "loss_scaler")  # until DeepSpeed 0.17, some optimizers are their own scaler
    scaler = next((each for name in names if (each := getattr(engine.optimizer, name, None))), engine.optimizer)
    moving = ("cur_scale", "cur_iter", "last_overflow_iter") if engine.dynamic_loss_scale() else ("cur_scale",)
    return {"dynamic": engine.dynamic_loss_scale(), **{key: getattr(scaler, key) for key in moving}}


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


def zero3_states(engine: Any, keys: list[str]) -> dict[tuple[str, str], torch.Tensor]:
    """States of ZeRO-3 in their own dtype: DeepSpeed's getter rounds them to that of the masters.

    A sub-group's flat tensor holds a piece of ``ds_tensor.ds_numel`` elements of each of its parameters, in order.
    """
    optimizer = engine.optimizer
    states = {}
    for flat, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        for key in keys:
            world = _whole(optimizer.optimizer.state[flat][key]).view(dist.get_world_size(), -1)
            start = 0
            for param in params:
                pieces = world[:, start : start + param.ds_tensor.ds_numel].reshape(-1)
                states[engine.param_names[param], key] = pieces[: param.ds_numel].view(param.ds_shape).clone()
                start += param.ds_tensor.ds_numel
    return states


def _whole(partition: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partition.contiguous())
    return torch.cat(parts)


def low_precision(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that the forward pass sees, whole. Collective."""
    import deepspeed

    weights = {}
    for name, param in engine.module.named_parameters():
        if not is_full(param):
            weights[name] = param.data.new_empty(getattr(param, "ds_shape", param.shape))
            continue
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.data.clone()
    return weights


def steps(engine: Any) -> list[float]:
    """The distinct step counts over all flat tensors of this rank."""
    counts = sorted({float(state["step"]) for state in base_of(engine).state.values() if "step" in state})
    # FusedAdam counts for a whole group, in the state of the last tensor that got a gradient, and uses that count alone
    return counts[-1:] if type(base_of(engine)).__name__ == "FusedAdam" else counts


def hyperparameters(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "initial_lr", "name") if key in group}
        for group in base_of(engine).param_groups
    ]


def differences(engine: Any, truth: dict[str, Any]) -> dict[str, str]:
    """What of an engine is not exactly ``truth``, with weights and buffers in its own precision. Collective."""
    keys = sorted({key for _, key in truth["states"]})
    if keys:
        relink(engine)
    now = gather(engine, keys)
    kinds = ("masters", "states", "weights", "buffers", "steps", "groups", "counters", "scheduler")
    expected = {kind: truth[kind] for kind in kinds}
    expected["weights"] = truth["weights"] | truth["masters"]
    # of what the checkpoint has not, a live state is zero
    new = {key: torch.zeros_like(value) for key, value in now["states"].items() if key not in truth["states"]}
    expected["states"] = truth["states"] | new
    was, is_now = truth.get("scale"), now["scale"]
    if was and is_now and was["dynamic"] == is_now["dynamic"]:
        expected["scale"] = was
    found = compare(now, expected)
    counts = [id(state["step"]) for state in base_of(engine).state.values() if torch.is_tensor(state.get("step"))]
    return found | ({"step": "flat tensors share one tensor"} if len(counts) > len(set(counts)) else {})


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, str]:
    """By kind and name, what of ``expected`` was not found. Expected weights and buffers get the dtypes of those found."""
    wrong: dict[str, str] = {}
    for kind, values in expected.items():
        here = found[kind]
        if kind not in ("masters", "states", "weights", "buffers"):
            wrong |= {} if here == values else {kind: f"{here} instead of {values}"}
            continue
        if here.keys() != values.keys():
            wrong[kind] = f"not on both sides: {sorted(map(str, here.keys() ^ values.keys()))}"
        for key in here.keys() & values.keys():
            value, wanted = here[key], values[key]
            wanted = wanted.to(value.dtype) if kind in ("weights", "buffers") else wanted
            if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
                wrong[f"{kind} {key}"] = f"{value.dtype} {value.shape} instead of {wanted.dtype} {wanted.shape}"
            elif not torch.equal(value, wanted):
                wrong[f"{kind} {key}"] = f"off by {(value - wanted).abs().max()}"
    return wrong


def fingerprint(engine: Any, skipped: Sequence[str] = ()) -> dict[str, str]:
    """Hashes of everything that a load could touch on this rank, but for the states named in ``skipped``."""
    optimizer = engine.optimizer
    return {
        "weights": _digest(list(engine.module.state_dict().values())),
        "partitions": _digest([getattr(p, "ds_tensor", p) for p in engine.module.parameters()]),
        "masters": _digest(flats(optimizer)),
        "states": _digest([value for flat in flats(optimizer) for value in _state_values(optimizer, flat, skipped)]),
        "groups": repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
        "scheduler": repr(None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()),
        "counters": repr((engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)),
        "scaler": repr(vars(getattr(optimizer, "loss_scaler", Exception())))
        + repr(getattr(optimizer, "loss_scale_config", None))
        + repr(getattr(optimizer, "overflow", None)),
        "dp": repr(engine.loaded_checkpoint_dp_world_size),
    }


def flats(optimizer: Any) -> list[torch.Tensor]:
    """What the user's optimizer steps: masters with ZeRO, parameters without."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    base = getattr(optimizer, "optimizer", optimizer)
    return [param for group in base.param_groups for param in group["params"]]


def _state_values(optimizer: Any, flat: torch.Tensor, skipped: Sequence[str]) -> list[Any]:
    state = getattr(optimizer, "optimizer", optimizer).state.get(flat, {})
    return [state[key] for key in sorted(state) if key not in skipped]


def _digest(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if torch.is_tensor(value):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()

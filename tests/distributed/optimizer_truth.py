"""What optimizers of every kind hold, by parameter name and in fp32: decoded by code of its own.

Flat partitions of all ranks are decoded where they lie and put one behind the other; where a parameter lies in them is
told by memory addresses (ZeRO-1/2) or by the sizes of DeepSpeed's own pieces (ZeRO-3).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.distributed.truth import base_of

BLOCKS = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
NOT_ELEMENTWISE = {"step", "mu_product", "absmax1", "absmax2", "qmap1", "qmap2", "unorm_vec", "table", "my_map"}
States = dict[tuple[str, str], torch.Tensor]


def decoded(engine: Any, skipped: set[str]) -> tuple[States, States]:
    """All elementwise states of a whole job, and the scale of the block that each element lies in. Collective.

    Both have the shape of the parameter, behind a leading dimension of rows. Scales of states in fp32 are zero. States
    named in ``skipped`` are left out.
    """
    values: States = {}
    scales: States = {}
    for flat, pieces in _layout(engine):
        state = base_of(engine).state.get(flat, {})
        for key in sorted(state):
            if key in NOT_ELEMENTWISE | skipped or not torch.is_tensor(state[key]) or not state[key].dim():
                continue
            if state[key].numel() % flat.numel():
                assert engine.zero_optimization_stage() == 0, f"{key}: {state[key].shape} beside {flat.numel()}"
                continue  # see whole_states
            decoded_here = decode_flat(state, key, flat.numel())
            for name, shape, parts in pieces:
                values[name, key], scales[name, key] = (_whole(part, parts, shape) for part in decoded_here)
    return values, scales


def decode_flat(state: dict[str, Any], key: str, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales ``[rows, numel]`` of one partition."""
    raw = state[key].detach().cpu().reshape(-1, numel)
    if raw.dtype != torch.uint8:
        return raw.float(), torch.zeros_like(raw, dtype=torch.float32)
    absmax, qmap = (state[name].detach().cpu().numpy() for name in BLOCKS[key])
    rows = []
    for row, of_blocks in zip(raw.numpy(), absmax.reshape(len(raw), -1), strict=True):
        every = np.repeat(of_blocks, 256)[:numel]
        rows.append((qmap[row] * every, every))
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))  # type: ignore[return-value]


def _layout(engine: Any) -> list[tuple[torch.Tensor, list[tuple[str, tuple[int, ...], list[tuple[int, int, int]]]]]]:
    """Per flat tensor, its parameters: (name, shape, [(rank, start in its partition, elements)] in order)."""
    optimizer, stage, dp = engine.optimizer, engine.zero_optimization_stage(), dist.get_world_size()
    found = []
    if stage == 0:
        for number, group in enumerate(base_of(engine).param_groups):
            params = getattr(optimizer, "fp16_groups", None)  # FP16_UnfusedOptimizer
            for master, param in zip(group["params"], params[number] if params else group["params"], strict=True):
                found.append((master, [(engine.param_names[param], tuple(param.shape), [(-1, 0, param.numel())])]))
    elif stage == 3:
        for flat, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            start, pieces = 0, []
            for param in params:
                each, left, parts = param.ds_tensor.ds_numel, param.ds_numel, []
                for rank in range(dp):
                    parts.append((rank, start, max(0, min(each, left))))
                    left -= each
                pieces.append((engine.param_names[param], tuple(param.ds_shape), parts))
                start += each
            found.append((flat, pieces))
    else:
        in_bf16 = hasattr(optimizer, "bf16_groups")  # BF16_Optimizer
        flats = optimizer.fp32_groups_flat_partition if in_bf16 else optimizer.single_partition_of_fp32_groups
        for group, flat in enumerate(flats):
            whole = (optimizer.bf16_groups_flat if in_bf16 else optimizer.bit16_groups_flat)[group]
            pieces = []
            for param in (optimizer.bf16_groups if in_bf16 else optimizer.bit16_groups)[group]:
                first = (param.data_ptr() - whole.data_ptr()) // whole.element_size()
                parts = []
                for rank in range(dp):
                    start, stop = max(first, rank * flat.numel()), min(first + param.numel(), (rank + 1) * flat.numel())
                    parts.append((rank, start - rank * flat.numel(), max(0, stop - start)))
                pieces.append((engine.param_names[param], tuple(param.shape), parts))
            found.append((flat, pieces))
    return found


def _whole(mine: torch.Tensor, parts: list[tuple[int, int, int]], shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter's values from those of all ranks' partitions."""
    if parts[0][0] < 0:
        everyone = {-1: mine}
    else:
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine.contiguous())
        everyone = dict(enumerate(gathered))
    pieces = [everyone[rank][:, start : start + numel] for rank, start, numel in parts if numel]
    return torch.cat(pieces, dim=1).reshape(len(mine), *shape).clone()


def muon_momentum(engine: Any) -> States:
    """ZeRO-1/2: momentum of whole parameters, as every rank that has some of them holds it. Collective.

    The Adam half of the optimizer is left to :func:`decoded`.
    """
    optimizer, mine = engine.optimizer, {}
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        buffer = base_of(engine).state.get(flat, {}).get("momentum_buffer")
        if buffer is None:
            continue
        position = 0
        for param in optimizer.params_in_partition[group]:
            name = engine.param_names[param]
            mine[name] = buffer[position : position + param.numel()].reshape(param.shape).clone()
            position += param.numel()
        assert position == buffer.numel()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: States = {}
    for held in everyone:
        for name, values in held.items():
            assert torch.equal(found.setdefault((name, "momentum_buffer"), values), values), f"ranks disagree on {name}"
    return found


def whole_states(engine: Any) -> dict[str, Any]:
    """Without ZeRO: every tensor that is not elementwise, as it is."""
    found = {}
    for param, state in base_of(engine).state.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() and value.numel() % param.numel() and key not in NOT_ELEMENTWISE:
                found[engine.param_names[param], key] = value.clone()
    return found


def scalars(engine: Any) -> dict[str, list[float]]:
    """Distinct values of each scalar state, wherever it lives."""
    found: dict[str, set[float]] = {}
    for state in base_of(engine).state.values():
        for key in ("step", "mu_product", "eta", "mu", "count"):
            if key in state:
                found.setdefault(key, set()).add(float(state[key]))
    for group in base_of(engine).param_groups:
        if "step" in group and "step" not in found:
            found["step"] = {float(group["step"])}
    # FusedAdam counts for a whole group, in the state of its last tensor alone: the others stay at 0
    return {key: sorted(values - {0.0} or values) for key, values in found.items()}


def tables(engine: Any) -> list[torch.Tensor]:
    """The table of every tensor on this rank, of an optimizer that has one."""
    return [state["table"] for state in base_of(engine).state.values() if "table" in state]


def maps(engine: Any) -> list[list[float]]:
    """The distinct 256-element maps on this rank, of an optimizer that has them."""
    found = {tuple(state["my_map"].tolist()) for state in base_of(engine).state.values() if "my_map" in state}
    return sorted(map(list, found))


def shared_maps(engine: Any) -> dict[str, int]:
    """How many different tensor objects stand for each quantization map."""
    objects: dict[str, set[int]] = {}
    for state in base_of(engine).state.values():
        for key in ("qmap1", "qmap2"):
            if key in state:
                objects.setdefault(key, set()).add(id(state[key]))
    return {key: len(found) for key, found in objects.items()}


def numel_of_blocks(engine: Any) -> int:
    """8-bit blocks on this rank."""
    states = base_of(engine).state.values()
    return sum(math.prod(state[key].shape) for state in states for key in ("absmax1", "absmax2") if key in state)

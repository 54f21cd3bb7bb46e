"""Experts of a live engine. Local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from elastic_ckpt.core.fqn import EXPERTS, ExpertName
from elastic_ckpt.errors import UnsupportedError


def expert_fqns(engine: Any) -> Mapping[str, str]:
    """Name in the live module -> FQN, of each tensor of an expert of an ``MoE`` layer."""
    fqns: dict[str, str] = {}
    for path, layer in _moe_layers(engine):
        ep_rank = groups._get_expert_parallel_rank(layer.expert_group_name)
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for name, _ in chain(expert.named_parameters(), expert.named_buffers()):
                live = ExpertName(path, number, name)
                fqns[str(live)] = str(live.on(ep_rank, layer.num_local_experts))
    return fqns


def _moe_layers(engine: Any) -> Iterator[tuple[str, Any]]:
    """Each ``MoE`` layer, and what precedes the names in it."""
    for path, layer in engine.module.named_modules() if engine.has_moe_layers else ():
        if isinstance(layer, MoE):
            yield f"{path}." if path else "", layer


def stacked_experts(engine: Any) -> Mapping[str, tuple[int, ...]]:
    """Stacked parameter of AutoEP -> the numbers of the experts in it, in order (``AutoEPMoELayer``)."""
    if not engine.has_moe_layers:
        return {}
    records = ((name, getattr(param, "ds_autoep_uc_meta", None)) for param, name in engine.param_names.items())
    found = {name: tuple(record["local_experts"]) for name, record in records if record}
    if not found and not any(_moe_layers(engine)):
        problem = "AutoEP of this version of DeepSpeed does not record which rank holds which experts"
        raise UnsupportedError(problem, expected="DeepSpeed 0.19.8 or later")
    return found


def unsliced_experts(engine: Any) -> Iterator[str]:
    """Names in the live module of the tensors of experts that tensor-parallel ranks do not slice."""
    if engine.has_moe_layers and engine.mp_world_size > 1:
        yield from stacked_experts(engine)
        for path, layer in _moe_layers(engine):
            if not layer.enable_expert_tensor_parallelism:
                experts = layer.deepspeed_moe.experts.deepspeed_experts
                yield from (f"{path}{EXPERTS}{name}" for name, _ in experts.named_parameters())
                yield from (f"{path}{EXPERTS}{name}" for name, _ in experts.named_buffers())


def expert_parallel(engine: Any) -> tuple[int, int]:
    """The largest expert-parallel degree of a live engine, and this rank's expert-parallel rank."""
    if not engine.has_moe_layers:
        return 1, 0
    largest = groups._get_max_expert_size_name()
    return groups._get_expert_parallel_world_size(largest), groups._get_expert_parallel_rank(largest)

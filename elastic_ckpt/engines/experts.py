"""Experts of a live engine. Local."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from elastic_ckpt.core.experts import ExpertName


def expert_fqns(engine: Any) -> Mapping[str, str]:
    """Name in the live module -> FQN, of each tensor of an expert of an ``MoE`` layer."""
    fqns: dict[str, str] = {}
    if not engine.has_moe_layers:
        return fqns
    for path, layer in engine.module.named_modules():
        if not isinstance(layer, MoE):
            continue
        ep_rank = groups._get_expert_parallel_rank(layer.expert_group_name)
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for name, _ in chain(expert.named_parameters(), expert.named_buffers()):
                live = ExpertName(f"{path}." if path else "", number, name)
                fqns[str(live)] = str(live.on(ep_rank, layer.num_local_experts))
    return fqns


def expert_parallel(engine: Any) -> tuple[int, int]:
    """The largest expert-parallel degree of a live engine, and this rank's expert-parallel rank."""
    if not engine.has_moe_layers:
        return 1, 0
    largest = groups._get_max_expert_size_name()
    return groups._get_expert_parallel_world_size(largest), groups._get_expert_parallel_rank(largest)


def has_autoep(engine: Any) -> bool:
    """Whether AutoEP has replaced layers of the model (since DeepSpeed 0.19)."""
    return engine.has_moe_layers and not any(isinstance(module, MoE) for module in engine.module.modules())

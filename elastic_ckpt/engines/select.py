"""Which adapter fits a live engine, and what no adapter can restore yet."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt.engines.base import EngineAdapter
from elastic_ckpt.engines.zero3 import Zero3Adapter
from elastic_ckpt.engines.zero12 import Zero12Adapter
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.states.schema import schema_of, unknown_states

# Exact classes: a subclass (MiCS, ZenFlow) lays out or steps its partitions in its own way.
_ADAPTERS: dict[type, type[Zero12Adapter] | type[Zero3Adapter]] = {
    DeepSpeedZeroOptimizer: Zero12Adapter,
    DeepSpeedZeroOptimizer_Stage3: Zero3Adapter,
}


def _is_partly_offloaded(optimizer: Any) -> bool:
    """Twin-Flow: some sub-groups step on a second base optimizer, whose states are neither saved nor loaded."""
    return bool(getattr(optimizer, "offload_optimizer", False)) and getattr(optimizer, "partial_offload", 1.0) < 1.0


def select_adapter(engine: Any, with_states: bool) -> EngineAdapter:
    """The adapter of a live engine. Local, changes nothing.

    Args:
        engine: the live engine.
        with_states: whether optimizer states will be restored; if not, any optimizer will do.

    Raises:
        UnsupportedError: naming the feature that cannot be restored yet.
    """
    for present, what in (
        (isinstance(engine.module, PipelineModule), "pipeline parallelism (PipelineModule)"),
        (engine.mp_world_size > 1, "tensor or model parallelism"),
        (engine.has_moe_layers, "mixture of experts"),
        (engine.zero_nvme_offload_optimizer(), "optimizer states offloaded to NVMe"),
        (getattr(engine, "zenflow", False), "ZenFlow"),
        (getattr(engine.optimizer, "swap_optimizer", False), "swapped optimizer states"),
        (getattr(engine.optimizer, "params_in_nvme_and_cpu", False), "parameters offloaded to NVMe"),
        (_is_partly_offloaded(engine.optimizer), "partly offloaded optimizer states (offload_optimizer.ratio < 1)"),
        (bool(getattr(engine.optimizer, "offloaded_states", None)), "engine.offload_states() in effect"),
    ):
        if present:
            raise UnsupportedError(f"the live engine uses {what}, which is not supported yet")
    adapter = _ADAPTERS.get(type(engine.optimizer))
    if adapter is None:
        raise UnsupportedError(
            "the live engine's optimizer is not supported yet",
            expected="ZeRO stage 1, 2 or 3 with fp32 gradient accumulation left at its default",
            found=f"{type(engine.optimizer).__name__} at ZeRO stage {engine.zero_optimization_stage()}",
            remedy='"zero_optimization": {"stage": 1}, 2 or 3 in the DeepSpeed config',
        )
    base = engine.optimizer.optimizer
    chosen = adapter(engine, schema_of(base) if with_states else unknown_states(base))
    masters = {master.dtype for master in chosen.masters}
    if masters - {torch.float32}:
        raise UnsupportedError(
            "the live engine keeps master weights in low precision, which is not supported yet",
            expected="float32",
            found=", ".join(sorted(map(str, masters))),
            remedy='remove "bf16_master_weights_and_grads" / "fp16_master_weights_and_gradients" from the config',
        )
    return chosen

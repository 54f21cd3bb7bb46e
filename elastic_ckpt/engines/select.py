"""Which adapter fits a live engine, and what no adapter can restore yet."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt.engines.base import EngineAdapter, base_optimizer, has_optimizer
from elastic_ckpt.engines.features import live_features
from elastic_ckpt.engines.optimizers import schema_of
from elastic_ckpt.engines.state_schema import NoStates
from elastic_ckpt.engines.unpartitioned import FusedAdapter, PlainAdapter, UnfusedAdapter
from elastic_ckpt.engines.without_optimizer import PartitionedWeightsAdapter, WholeWeightsAdapter
from elastic_ckpt.engines.zero3 import Zero3Adapter
from elastic_ckpt.engines.zero3_nvme import Zero3NvmeAdapter
from elastic_ckpt.engines.zero12 import Bf16Adapter, Zero12Adapter
from elastic_ckpt.errors import UnsupportedError

Adapter = Zero12Adapter | Zero3Adapter | PlainAdapter | WholeWeightsAdapter
# Exact classes: a subclass (MiCS, ZenFlow) lays out or steps its partitions in its own way.
_ADAPTERS: dict[type, type[Adapter]] = {
    DeepSpeedZeroOptimizer: Zero12Adapter,
    DeepSpeedZeroOptimizer_Stage3: Zero3Adapter,
    BF16_Optimizer: Bf16Adapter,
    FP16_UnfusedOptimizer: UnfusedAdapter,
    FP16_Optimizer: FusedAdapter,
}


#: float32, or what ``bf16_master_weights_and_grads`` and ``fp16_master_weights_and_grads`` make of it.
_MASTER_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def _is_partly_offloaded(optimizer: Any) -> bool:
    """Twin-Flow: some sub-groups step on a second base optimizer, whose states are neither saved nor loaded."""
    return bool(getattr(optimizer, "offload_optimizer", False)) and getattr(optimizer, "partial_offload", 1.0) < 1.0


def _swaps(optimizer: Any) -> bool:
    """Whether a ZeRO-3 optimizer swaps states or parameters to NVMe."""
    return bool(optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu)


def _keeps_muon_apart(optimizer: Any) -> bool:
    """Muon's momentum in buffers of DeepSpeed's own, beside the optimizer's state."""
    return bool(getattr(optimizer, "use_muon", False) and optimizer.save_muon_momentum_buffer_in_memory)


def _adapter_of(engine: Any) -> type[Adapter] | None:
    kind = type(engine.optimizer)
    if not has_optimizer(engine):
        return PartitionedWeightsAdapter if kind is DeepSpeedZeRoOffload else WholeWeightsAdapter
    if kind is DeepSpeedZeroOptimizer_Stage3 and _swaps(engine.optimizer):
        return Zero3NvmeAdapter
    if kind in _ADAPTERS:
        return _ADAPTERS[kind]
    plain = engine.zero_optimization_stage() == 0 and isinstance(engine.optimizer, torch.optim.Optimizer)
    return PlainAdapter if plain else None


def _refuse_special(engine: Any) -> None:
    """Refuse by name what a live engine has that no adapter can restore."""
    features = live_features(engine).names
    for present, what in (
        (features, features),
        (isinstance(engine, DeepSpeedHybridEngine), "the hybrid engine"),
        (getattr(engine, "zenflow", False), "ZenFlow"),
        (_is_partly_offloaded(engine.optimizer), "partly offloaded optimizer states (offload_optimizer.ratio < 1)"),
        (bool(getattr(engine.optimizer, "offloaded_states", None)), "engine.offload_states() in effect"),
        (_keeps_muon_apart(engine.optimizer), '"save_muon_momentum_buffer_in_memory"'),
    ):
        if present:
            raise UnsupportedError(f"the live engine uses {what}, which is not supported yet")


def select_adapter(engine: Any, with_states: bool) -> EngineAdapter:
    """The adapter of a live engine. Local, changes nothing.

    Args:
        engine: the live engine.
        with_states: whether optimizer states will be restored; if not, any optimizer will do.

    Raises:
        UnsupportedError: naming the feature that cannot be restored yet.
    """
    _refuse_special(engine)
    adapter = _adapter_of(engine)
    if adapter is None:
        raise UnsupportedError(
            "the live engine's optimizer is not supported yet",
            expected="an optimizer, at ZeRO stage 0, 1, 2 or 3",
            found=f"{type(engine.optimizer).__name__} at ZeRO stage {engine.zero_optimization_stage()}",
            remedy='"zero_optimization": {"stage": 0}, 1, 2 or 3 in the DeepSpeed config',
        )
    base = base_optimizer(engine)
    chosen = adapter(engine, schema_of(base) if with_states else NoStates(base))
    masters = {master.dtype for master in chosen.masters}
    if masters - _MASTER_DTYPES:
        raise UnsupportedError(
            "the live engine keeps master weights of a dtype that is not supported",
            expected=", ".join(sorted(map(str, _MASTER_DTYPES))),
            found=", ".join(sorted(map(str, masters))),
        )
    return chosen

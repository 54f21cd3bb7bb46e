"""Selects the adapter and state schema of a live engine, and refuses what none restores. Local; changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from elastic_ckpt.core.values import ONE_BIT_OPTIMIZERS, Features
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.compat import base_optimizer, has_optimizer, swaps_to_nvme
from elastic_ckpt.engines.optimizers import KNOWN, BitsAndBytesSchema, StateSchema, class_name, is_bitsandbytes
from elastic_ckpt.engines.versions import EXPERTS, LOAD, NVME, ZERO3, refuse_missing
from elastic_ckpt.engines.zero import LISTS, Zero012Adapter, Zero3Adapter
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, UnsupportedError

#: float32, or the result of ``bf16_master_weights_and_grads`` and ``fp16_master_weights_and_grads``.
_MASTER_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def live_features(engine: Any) -> Features:
    """Features of a live engine that decide who restores it."""
    base = base_optimizer(engine)
    groups = getattr(base, "param_groups", ())
    # DeepSpeed 0.19 dropped MiCS; older engines are a subclass of ZeRO-3's
    mics = type(engine.optimizer).__name__ == "MiCS_Optimizer"
    return Features(
        experts=tuple(engine.num_experts) if engine.has_moe_layers else (),
        expert_groups=tuple(sorted({str(group.get("name")) for group in groups if group.get("moe")})),
        one_bit=type(base).__name__.lower() in ONE_BIT_OPTIMIZERS,
        mics=engine.seq_dp_world_size if mics else 0,
    )


def same_features(engine: Any, saved: Features) -> bool:
    """Whether a checkpoint has the features of the live engine, as DeepSpeed's own loader expects."""
    live, dp = live_features(engine), engine.seq_dp_world_size
    # the files of a MiCS group that spans the job are those of ZeRO-3
    return replace(live, mics=live.mics or dp) == replace(saved, mics=saved.mics or dp)


def schema_of(base: torch.optim.Optimizer) -> StateSchema:
    """The schema of a live base optimizer; raises :class:`UnsupportedError` if its states cannot be resharded."""
    if class_name(base).startswith("torchao."):
        problem = "torchao's optimizers keep their states in tensor classes of their own, which cannot be resharded"
        remedy = f"load with load_optimizer_states=False, or {AT_ITS_TOPOLOGY}"
        raise UnsupportedError(problem, found=class_name(base), remedy=remedy)
    if is_bitsandbytes(base):
        return BitsAndBytesSchema(base)
    return KNOWN.get(class_name(base), StateSchema)(base)


def select_adapter(engine: Any, with_states: bool) -> EngineAdapter:
    """The adapter of a live engine; without ``with_states``, any optimizer is accepted.

    Raises :class:`UnsupportedError` naming a feature that cannot be restored, or what DeepSpeed lacks for it.
    """
    _refuse_special(engine)
    kind = type(engine.optimizer)  # exactly: a subclass (MiCS, ZenFlow) lays out or updates its partitions differently
    zero3 = kind in (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeRoOffload)
    plain = engine.zero_optimization_stage() == 0 and isinstance(engine.optimizer, torch.optim.Optimizer)
    if not (zero3 or plain or kind in LISTS) and has_optimizer(engine):
        found = f"{type(engine.optimizer).__name__} at ZeRO stage {engine.zero_optimization_stage()}"
        raise UnsupportedError("the live engine's optimizer is not supported", found=found)
    if has_optimizer(engine):  # DeepSpeed sets up nothing else for weights alone
        uses = {LOAD: True, ZERO3: zero3, NVME: zero3 and swaps_to_nvme(engine), EXPERTS: engine.has_moe_layers}
        refuse_missing(engine, [use for use, is_needed in uses.items() if is_needed])
    base = base_optimizer(engine)
    schema = schema_of(base) if with_states else StateSchema(base, known=())
    chosen = Zero3Adapter(engine, schema) if zero3 else Zero012Adapter(engine, schema)
    masters = {master.dtype for master in chosen.masters}
    if masters - _MASTER_DTYPES:
        expected, found = (", ".join(sorted(map(str, dtypes))) for dtypes in (_MASTER_DTYPES, masters))
        raise UnsupportedError("master weights of this dtype are not supported", expected=expected, found=found)
    return chosen


def _refuse_special(engine: Any) -> None:
    """Refuse, by name, features that no adapter restores."""
    optimizer, features = engine.optimizer, live_features(engine).names
    # Twin-Flow: a second base optimizer updates some sub-groups; its states are neither saved nor loaded
    partly_offloaded = getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "partial_offload", 1.0) < 1
    # Muon's momentum in DeepSpeed's own buffers, beside the optimizer's state
    keeps_muon_apart = getattr(optimizer, "use_muon", False) and optimizer.save_muon_momentum_buffer_in_memory
    for present, what in (
        (features, features),
        (isinstance(engine, DeepSpeedHybridEngine), "the hybrid engine"),
        (getattr(engine, "zenflow", False), "ZenFlow"),
        (partly_offloaded, "partly offloaded optimizer states (offload_optimizer.ratio < 1)"),
        (getattr(optimizer, "offloaded_states", None), "engine.offload_states() in effect"),
        (keeps_muon_apart, '"save_muon_momentum_buffer_in_memory"'),
    ):
        if present:
            raise UnsupportedError(f"the live engine uses {what}, which is not supported yet")

"""Features that only DeepSpeed's own loader restores, in a live engine. Local."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_ckpt.core.features import ONE_BIT_OPTIMIZERS, Features
from elastic_ckpt.engines.base import base_optimizer


def live_features(engine: Any) -> Features:
    """What is special about a live engine."""
    base = base_optimizer(engine)
    groups = getattr(base, "param_groups", ())
    # MiCS left DeepSpeed with 0.19; older engines are a subclass of ZeRO-3's
    mics = type(engine.optimizer).__name__ == "MiCS_Optimizer"
    return Features(
        experts=tuple(engine.num_experts) if engine.has_moe_layers else (),
        expert_groups=tuple(sorted({str(group.get("name")) for group in groups if group.get("moe")})),
        one_bit=type(base).__name__.lower() in ONE_BIT_OPTIMIZERS,
        mics=engine.seq_dp_world_size if mics else 0,
    )


def same_features(engine: Any, saved: Features) -> bool:
    """Whether a checkpoint has what the live engine has, as DeepSpeed's own loader expects."""
    live, dp = live_features(engine), engine.seq_dp_world_size
    # a MiCS group as big as the job lies in files as ZeRO-3 does
    return replace(live, mics=live.mics or dp) == replace(saved, mics=saved.mics or dp)

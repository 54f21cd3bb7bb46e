"""Features that only DeepSpeed's own loader restores, in a live engine. Local."""

from __future__ import annotations

from typing import Any

from elastic_ckpt.formats import Found
from elastic_ckpt.formats.features import ONE_BIT_OPTIMIZERS, Features, features_in
from elastic_ckpt.formats.pickled import open_pickled


def live_features(engine: Any) -> Features:
    """What is special about a live engine."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    groups = getattr(base, "param_groups", ())
    # MiCS left DeepSpeed with 0.19; older engines are a subclass of ZeRO-3's
    mics = type(engine.optimizer).__name__ == "MiCS_Optimizer"
    return Features(
        experts=tuple(engine.num_experts) if engine.has_moe_layers else (),
        expert_groups=tuple(sorted({str(group.get("name")) for group in groups if group.get("moe")})),
        one_bit=type(base).__name__.lower() in ONE_BIT_OPTIMIZERS,
        mics=engine.seq_dp_world_size if mics else 0,
    )


def same_features(engine: Any, found: Found) -> bool:
    """Whether the files have what the live engine has, as DeepSpeed's own loader expects. Opens two files."""
    files = found.files
    models = list(files.model.values()) + list(files.model_zero3.values())
    # without ZeRO, the optimizer of experts has files of its own
    optimizers = [name for name in files.experts if name.startswith("expp_rank_0_")] + list(files.optimizer.values())
    saved = Features()
    for name in models[:1] + optimizers[:1]:
        saved |= features_in(open_pickled(found.path(name)))
    live, dp = live_features(engine), engine.seq_dp_world_size
    return (live.experts, live.expert_groups, live.one_bit, live.mics or dp) == (
        saved.experts,
        saved.expert_groups,
        saved.one_bit,
        saved.mics or dp,
    )

"""The Python side of a checkpoint: counters, batch sizes, scheduler, loss scale, client state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.sequence import SequenceParallel
from elastic_ckpt.core.training_state import BatchSizes, HostState, LossScale
from elastic_ckpt.formats.model_states import COUNTERS
from elastic_ckpt.formats.pickled import PickledFile, materialise
from elastic_ckpt.formats.saved_config import config_section, saved_config

#: State of a dynamic scaler as ``DynamicLossScaler`` and ``FP16_Optimizer.state_dict`` name it (loss_scaler.py).
_DYNAMIC = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "cur_hysteresis",
    "delayed_shift",
    "consecutive_hysteresis",
    "min_scale",
    "raise_error_at_min_scale",
)


def read_host_state(
    file: PickledFile,
    loss_scale: LossScale | None,
    overflow: bool,
    same_ranks: bool,
    sequence: SequenceParallel,
) -> HostState:
    """The Python side of a model-states file, with its small tensors read.

    Weights stay where they are; frozen fragments too, which DeepSpeed's own loader hands out as "client state".
    """
    left_out = ("module", "optimizer", "lr_scheduler", "frozen_param_fragments")
    rest = {key: value for key, value in file.tree.items() if key not in left_out}
    return HostState(
        counters={key: file.tree[key] for key in COUNTERS if key in file.tree},
        batch=_batch_sizes(file, sequence),
        lr_scheduler=materialise(file, file.tree.get("lr_scheduler")),
        loss_scale=loss_scale if _trained_in_fp16(file, loss_scale) else None,
        overflow=overflow,
        checkpoint=materialise(file, rest),
        same_ranks=same_ranks,
    )


def loss_scale_of(scaler: Any) -> LossScale | None:
    """From the scaler object that the partitioned optimizers pickle.

    They write one in every precision; only one of an fp16 run scales anything.
    """
    if scaler is None:
        return None
    dynamic = bool(getattr(scaler, "dynamic", False))
    keys = _DYNAMIC if dynamic else ("cur_scale",)
    return LossScale(dynamic, {key: getattr(scaler, key) for key in keys if hasattr(scaler, key)})


def loss_scale_from(optimizer: Mapping[str, Any]) -> LossScale | None:
    """From the entries that ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` write."""
    if "cur_scale" not in optimizer:
        return None
    dynamic = bool(optimizer.get("dynamic_loss_scale"))
    keys = _DYNAMIC if dynamic else ("cur_scale",)
    return LossScale(dynamic, {key: optimizer[key] for key in keys if key in optimizer})


def _trained_in_fp16(file: PickledFile, loss_scale: LossScale | None) -> bool:
    if loss_scale is None:
        return False
    if saved_config(file) is not None:
        return bool(config_section(file, "fp16").get("enabled"))
    return loss_scale.dynamic or loss_scale.values["cur_scale"] != 1.0


def _batch_sizes(file: PickledFile, sequence: SequenceParallel) -> BatchSizes:
    """From the saved config, where it tells."""
    config = saved_config(file) or {}

    def positive(key: str) -> int | None:
        value = config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    dp = sequence.data_degree(int(file.tree.get("dp_world_size") or 0))
    whole, micro, steps = map(
        positive, ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    # completed as DeepSpeedConfig._set_batch_related_parameters does
    if whole is not None and micro is None and steps is None:
        steps = 1
    if whole is None and micro is not None and dp:
        whole = micro * (steps or 1) * dp
    if steps is None and whole and micro and dp:
        steps = whole // (micro * dp)
    if micro is None and whole and steps and dp:
        micro = whole // (steps * dp)
    return BatchSizes(whole, micro, steps)

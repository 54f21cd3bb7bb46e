"""The training state of a checkpoint (counters, batch sizes, scheduler, loss scale, client state)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.training_state import BatchSizes, LossScale, TrainingState
from elastic_ckpt.errors import LayoutError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.objects import materialise_entries
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_config import config_section, positive_int, read_counters, saved_config

#: A dynamic scaler's state as in ``FP16_Optimizer.state_dict``; ``DynamicLossScaler`` adds more (loss_scaler.py).
_DYNAMIC = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_STATIC = ("cur_scale", "cur_iter")
_HYSTERESIS = ("cur_hysteresis", "delayed_shift", "consecutive_hysteresis", "min_scale", "raise_error_at_min_scale")
#: Larger scales are infinite.
_MOST_SCALE = 2.0**1023
_DEFAULTS = MetadataOptions()
#: Entries that are DeepSpeed's and not the client's.
_DEEPSPEEDS = frozenset({"lr_scheduler", "random_ltd", "data_sampler"})
#: Entries that are no training state; DeepSpeed's own loader returns frozen fragments as client state.
_NOT_READ = frozenset({"module", "optimizer", "lr_scheduler", "frozen_param_fragments"})


def read_training_state(
    file: PickledFile,
    loss_scale: LossScale | None,
    overflow: bool,
    same_ranks: bool,
    sequence: SequenceParallel,
    options: MetadataOptions = _DEFAULTS,
) -> TrainingState:
    """The training state in a model-states file; ``checkpoint`` is empty without client state."""
    entries = {key: value for key, value in file.tree.items() if key not in _NOT_READ}
    scheduler = {"lr_scheduler": file.tree.get("lr_scheduler")}
    wanted = entries | scheduler if options.with_client_state else scheduler
    read, refused = materialise_entries(file, wanted, lambda key: options.skip_unreadable and key not in _DEEPSPEEDS)
    in_fp16 = loss_scale is not None and (loss_scale.dynamic or loss_scale.values["cur_scale"] != 1.0)
    if saved_config(file) is not None:
        in_fp16 = bool(config_section(file, "fp16").get("enabled"))
    return TrainingState(
        counters=read_counters(file),
        batch=_batch_sizes(file, sequence),
        lr_scheduler=read.pop("lr_scheduler"),
        loss_scale=loss_scale if in_fp16 else None,
        overflow=overflow,
        checkpoint=read,
        same_ranks=same_ranks,
        left_out={str(key): f"{error.problem}: {error.found}; it is left out" for key, error in refused.items()},
    )


def loss_scale_of(saved: Any) -> LossScale | None:
    """The loss scale in the scaler that partitioned optimizers pickle, or in the entries that others write.

    ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` write entries. Partitioned optimizers write a scaler in every
    precision, which scales anything only in fp16.
    """
    if saved is None or (isinstance(saved, Mapping) and "cur_scale" not in saved):
        return None
    values = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    dynamic = values.get("dynamic_loss_scale" if values is saved else "dynamic") is True
    keys = (*_DYNAMIC, *_HYSTERESIS) if dynamic else _STATIC
    found = {key: values[key] for key in keys if key in values}
    wrong = [key for key, value in found.items() if not isinstance(value, (int, float)) or abs(value) > _MOST_SCALE]
    if wrong or "cur_scale" not in found:
        raise LayoutError(
            "the loss scaler of this checkpoint has values that are none",
            expected="numbers, cur_scale among them",
            found=f"{', '.join(wrong)} of other types" if wrong else sorted(map(str, values))[:12],
            remedy="take another tag, or load with load_optimizer_states=False",
        )
    return LossScale(dynamic, found)


def _batch_sizes(file: PickledFile, sequence: SequenceParallel) -> BatchSizes:
    """Batch sizes of the saved config, completed as in ``DeepSpeedConfig._set_batch_related_parameters``.

    The global batch follows from the others where it can, as in ``compare_batches`` (engines/training_state.py).
    """
    config = saved_config(file) or {}
    dp = sequence.data_degree(int(file.tree.get("dp_world_size") or 0))
    batch = positive_int(config, "train_batch_size")
    micro = positive_int(config, "train_micro_batch_size_per_gpu")
    steps = positive_int(config, "gradient_accumulation_steps")
    if batch is not None and micro is None and steps is None:
        steps = 1
    if batch is None and micro is not None and dp:
        batch = micro * (steps or 1) * dp
    if steps is None and batch and micro and dp:
        steps = batch // (micro * dp)
    if micro is None and batch and steps and dp:
        micro = batch // (steps * dp)
    if micro and steps and dp:
        batch = micro * steps * dp
    return BatchSizes(batch, micro, steps)

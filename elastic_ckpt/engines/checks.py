"""Refuses or warns of live engines for reasons other than an unsupported feature; commits a save that is under way."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.core.training_state import BatchSizes, TrainingState
from elastic_ckpt.engines.compat import holds_gradients, partition_group
from elastic_ckpt.engines.coordinates import sequence_of
from elastic_ckpt.errors import DamagedError, MismatchError

logger = logging.getLogger(__name__)
_REMEDY = (
    "Pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize instead of "
    '"sequence_parallel_size" and "data_parallel_size" in the config (or mesh_param), as Accelerate does.'
)
_LOST = (
    "elastic_ckpt: checkpoints of this engine will be incomplete and cannot be resumed: with a device mesh for "
    "sequence parallelism (degree %d), ZeRO-3 of this DeepSpeed cuts the model into %d partitions and saves %d. "
    + _REMEDY
)
_TORN = (
    "elastic_ckpt: checkpoints of this engine may be damaged: with a device mesh for sequence parallelism (degree %d), "
    "all ranks of a sequence-parallel group write the same files at the same time. " + _REMEDY
)


def warn_of_incomplete_saves(engine: Any) -> None:
    """Warn on rank 0 if DeepSpeed's saves of this engine will be incomplete.

    With a device mesh for sequence parallelism, the ranks of a sequence-parallel group write files of the same names at
    the same time (``DeepSpeedEngine._get_zero_ckpt_name`` counts data-parallel ranks only), and in ZeRO-3 of different
    partitions.
    """
    if dist.get_rank() != 0 or engine.sequence_parallel_size == 1:
        return
    group = getattr(engine.optimizer, "dp_process_group", None)
    if engine.zero_optimization_stage() == 3:
        partitions = dist.get_world_size(group=partition_group(engine))
        written = partitions if group is None else dist.get_world_size(group=group)
        if written < partitions:
            logger.warning(_LOST, engine.sequence_parallel_size, partitions, written)
    elif not sequence_of(engine, engine.seq_dp_world_size)[0].partitioned:
        logger.warning(_TORN, engine.sequence_parallel_size)


def refuse_pending_gradients(engine: Any) -> None:
    """Refuse gradients of the old weights, which would enter the next step (:class:`MismatchError`)."""
    if holds_gradients(engine):
        raise MismatchError(
            "the engine holds gradients that no step has used yet; they would be mixed into the restored run",
            expected="a load right after engine.step(), or before the first backward",
            found="gradients of micro-batches that were backpropagated since the last step",
            remedy="finish the step with engine.step() (its result is overwritten), then load",
        )


def compare_batches(engine: Any, data_degree: int, saved: BatchSizes, refuse: bool) -> tuple[str, ...]:
    """Warnings about changes of the global batch and of the micro-batches per step.

    ``engine.train_batch_size()`` counts the tensor-parallel ranks of AutoTP too, each of which has the same samples.

    Raises:
        MismatchError: something changed, and ``refuse`` is set.
    """
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    live = BatchSizes(micro * steps * data_degree, micro, steps)
    changes = []
    if saved.global_batch is not None and saved.global_batch != live.global_batch:
        changes.append(
            f"global batch: {saved.global_batch} -> {live.global_batch} samples; steps and learning rate no longer "
            "mean the same"
        )
    if saved.accumulation_steps is not None and saved.accumulation_steps != live.accumulation_steps:
        changes.append(
            f"gradient_accumulation_steps: {saved.accumulation_steps} -> {live.accumulation_steps}, "
            f"micro-batch: {saved.micro_batch} -> {live.micro_batch}"
        )
    if changes and refuse:
        raise MismatchError(
            "; ".join(changes),
            expected=_shown(saved) + ", as in the checkpoint",
            found=_shown(live) + " in the live engine",
            remedy=(
                'set "train_batch_size" and "gradient_accumulation_steps" to fit the number of ranks, or '
                '"elastic_checkpoint": {"on_change": "warn"}'
            ),
        )
    return tuple(changes)


def _shown(sizes: BatchSizes) -> str:
    return (
        f'"train_batch_size": {sizes.global_batch}, "train_micro_batch_size_per_gpu": {sizes.micro_batch}, '
        f'"gradient_accumulation_steps": {sizes.accumulation_steps}'
    )


def warn_of_unscaled_gradients(engine: Any, saved: TrainingState, saved_zero_stage: int) -> tuple[str, ...]:
    """A warning if a load crosses into or out of fp16 without ZeRO, where Adam's moments have another unit.

    In DeepSpeed 0.19 ``engine.backward`` scales the loss only for ``ZeROOptimizer``, but the step of ``FP16_Optimizer``
    and ``FP16_UnfusedOptimizer`` divides gradients by the scale regardless.
    """
    was_unscaled = saved.loss_scale is not None and saved_zero_stage == 0
    is_unscaled = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
    if was_unscaled == is_unscaled:
        return ()
    this, other = ("the saved", "the live") if was_unscaled else ("the live", "the saved")
    return (
        "DeepSpeed's fp16 without ZeRO divides gradients by a loss scale that it never multiplied the loss with: "
        f"{this} run's gradients, and its Adam moments, are that much smaller than {other} run's; both are restored "
        "exactly, but they do not fit together",
    )


def commit_pending_save(engine: Any) -> None:
    """Commit a save of this engine that is still being written, as the next step would. Collective.

    ``DecoupledCheckpointEngine`` and DataStates' engine write in the background, and commit a save at the next boundary
    ``step()``. Until then its files are incomplete, ``latest`` names an older save, and its writers read live tensors,
    which a load overwrites.

    Raises :class:`DamagedError` on every rank if the process that writes it is no longer there.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if writer is None or not getattr(writer, "is_decoupled", bool)():  # DeepSpeed before 0.17.1 has no such method
        return

    def look() -> bool:
        if writer.commit_info is None:
            return False
        process = getattr(writer, "ckpt_process", None)
        if process is not None and not process.is_alive():
            info = writer.commit_info
            raise DamagedError(
                "the last save of this engine is incomplete: the process that wrote it in the background has died",
                file=os.path.join(info.save_dir, info.tag),
                expected="a process that writes until the save is committed",
                found=f"exit code {process.exitcode}",
                remedy="start the job again and load an older tag; the process's output says why it died",
            )
        return True

    if any(distributed.all_gather("look for a save that is still being written", look)):
        engine._commit_decoupled_checkpoint()
        if writer.commit_info is not None:  # DataStates' engine, whose get_commit_info() DeepSpeed does not define
            writer.commit(writer.commit_info)

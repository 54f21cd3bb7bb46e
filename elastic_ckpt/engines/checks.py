"""Refuses or warns of live engines for reasons other than an unsupported feature; commits a save that is under way."""

from __future__ import annotations

import os
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.training_state import BatchSizes, TrainingState
from elastic_ckpt.engines.compat import holds_gradients
from elastic_ckpt.errors import DamagedError, MismatchError


def refuse_pending_gradients(engine: Any) -> None:
    """Refuse gradients of the old weights, which would enter the next step (:class:`MismatchError`)."""
    if holds_gradients(engine):
        problem = "the engine holds gradients that no step has used yet; they would be mixed into the restored run"
        expected = "a load right after engine.step(), or before the first backward"
        remedy = "finish the step with engine.step() (its result is overwritten), then load"
        raise MismatchError(problem, expected=expected, remedy=remedy)


def compare_batches(engine: Any, data_degree: int, saved: BatchSizes, refuse: bool) -> tuple[str, ...]:
    """Warnings about changes of the global batch and of the micro-batches per step.

    ``engine.train_batch_size()`` counts the tensor-parallel ranks of AutoTP too, each of which has the same samples.

    Raises:
        MismatchError: something changed, and ``refuse`` is set.
    """
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    live, changes = BatchSizes(micro * steps * data_degree, micro, steps), []
    if saved.global_batch not in (None, live.global_batch):
        sizes = f"{saved.global_batch} -> {live.global_batch} samples"
        changes.append(f"global batch: {sizes}; steps and learning rate no longer mean the same")
    if saved.accumulation_steps not in (None, live.accumulation_steps):
        micro_batches = f"micro-batch: {saved.micro_batch} -> {live.micro_batch}"
        changes.append(
            f"gradient_accumulation_steps: {saved.accumulation_steps} -> {live.accumulation_steps}, {micro_batches}"
        )
    if changes and refuse:
        before, now = (
            f'"train_batch_size": {sizes.global_batch}, "train_micro_batch_size_per_gpu": {sizes.micro_batch}, '
            f'"gradient_accumulation_steps": {sizes.accumulation_steps}'
            for sizes in (saved, live)
        )
        raise MismatchError(
            "; ".join(changes),
            expected=f"{before}, as in the checkpoint",
            found=f"{now} in the live engine",
            remedy='set them to fit the number of ranks, or "elastic_checkpoint": {"on_change": "warn"}',
        )
    return tuple(changes)


def warn_of_unscaled_gradients(engine: Any, saved: TrainingState, saved_zero_stage: int) -> tuple[str, ...]:
    """A warning if a load crosses into or out of fp16 without ZeRO, where Adam's moments have another unit.

    In DeepSpeed 0.19 ``engine.backward`` scales the loss only for ``ZeROOptimizer``, but the step of ``FP16_Optimizer``
    and ``FP16_UnfusedOptimizer`` divides gradients by the scale regardless.
    """
    was_unscaled = saved.loss_scale is not None and saved_zero_stage == 0
    is_unscaled = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
    this, other = ("the saved", "the live") if was_unscaled else ("the live", "the saved")
    warning = (
        "DeepSpeed's fp16 without ZeRO divides gradients by a loss scale that the loss was not multiplied with: "
        f"{this} run's gradients and Adam moments are that much smaller than {other} run's, and do not fit together"
    )
    return () if was_unscaled == is_unscaled else (warning,)


def commit_pending_save(engine: Any) -> None:
    """Commit a save of this engine that is still being written, as the next step would. Collective.

    ``DecoupledCheckpointEngine`` and DataStates' engine write in the background until the next boundary ``step()``. So
    far files are incomplete, ``latest`` names an older save, and a load would overwrite the tensors that are written.

    Raises :class:`DamagedError` on every rank if the process that writes it is no longer there.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if writer is None or not getattr(writer, "is_decoupled", bool)():  # DeepSpeed before 0.17.1 has no such method
        return

    def is_pending() -> bool:
        info, process = writer.commit_info, getattr(writer, "ckpt_process", None)
        if info is not None and process is not None and not process.is_alive():
            problem = "the last save of this engine is incomplete: the process that wrote it in the background has died"
            file, found = os.path.join(info.save_dir, info.tag), f"exit code {process.exitcode}"
            remedy = "start the job again and load an older tag; the process's output says why it died"
            raise DamagedError(problem, file, found=found, remedy=remedy)
        return info is not None

    if any(distributed.all_gather("look for a save that is still being written", is_pending)):
        engine._commit_decoupled_checkpoint()
        if writer.commit_info is not None:  # DataStates' engine, whose get_commit_info() DeepSpeed does not define
            writer.commit(writer.commit_info)

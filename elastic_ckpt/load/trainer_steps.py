"""Resumes Transformers' ``Trainer`` from a save within a step, as its just-in-time checkpoint makes one.

Accelerate's ``backward`` takes the engine's step. What saves at ``on_pre_optimizer_step`` saves an engine that has
stepped, and a Trainer that has not: ``checkpoint-4/global_step5``. The engine's counters say what was trained on. So
the Trainer does what is left of its own step before its first epoch begins: it counts it, and steps its scheduler.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of

logger = logger_of(__name__)
#: Schedulers that the Trainer steps with an evaluation, not with a step.
_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")
#: Attribute of a Trainer: the next epoch, if the saved step was the last of one; infinite if it was the run's last.
_NEXT_EPOCH = "_elastic_ckpt_next_epoch"
#: Attributes of a Trainer: the steps from which on it counts for its logs.
_STEPS_LOGGED = ("_globalstep_last_logged", "_initial_global_step")
#: Of an epoch, less than any batch's part.
_ROUNDING = 1e-9


def steps_ahead(trainer: Any) -> int:
    """Steps that a Trainer's engine has counted and the Trainer itself has not."""
    engine = getattr(trainer, "deepspeed", None)
    return 0 if engine is None else int(engine.global_steps) - int(trainer.state.global_step)


def finish_saved_step(trainer: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run's first epoch, behind the step in which its checkpoint was saved, if it was. Local.

    ``call``: the arguments of ``Trainer._run_epoch``. Ends the training if that step was the last one.
    """
    setattr(trainer, _NEXT_EPOCH, None)
    if call["resume_from_checkpoint"] is None or steps_ahead(trainer) != 1:
        return call
    state = trainer.state
    in_step = trainer.args.gradient_accumulation_steps
    _step_scheduler(trainer)
    state.epoch = _epoch_after_step(trainer, call)
    state.global_step += 1
    for name in _STEPS_LOGGED:
        setattr(trainer, name, state.global_step)
    epoch, steps = divmod(state.global_step, max(math.ceil(call["steps_in_epoch"] / in_step), 1))
    if epoch > call["epoch"]:
        setattr(trainer, _NEXT_EPOCH, epoch)
    if state.global_step >= state.max_steps:
        setattr(trainer, _NEXT_EPOCH, math.inf)
        trainer.control.should_training_stop = True
    if distributed.rank() == 0:
        text = "elastic_ckpt: the checkpoint was saved within a step, which the engine had taken and the Trainer not "
        logger.warning("%scounted: it continues after it, at step %d", text, state.global_step)
    skipped = 0 if trainer.args.ignore_data_skip else steps * in_step
    return {**call, "epochs_trained": epoch, "steps_trained_in_current_epoch": skipped}


def is_done(trainer: Any, epoch: int) -> bool:
    """Whether the saved step was the last of an epoch that the Trainer is about to run."""
    following: float | None = getattr(trainer, _NEXT_EPOCH, None)
    return following is not None and epoch < following


def is_over(trainer: Any) -> bool:
    """Whether the saved step was the last of the run."""
    return getattr(trainer, _NEXT_EPOCH, None) == math.inf


def at_first_epoch(trainer: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an epoch, as those of the first one if all before it was done at the save."""
    if getattr(trainer, _NEXT_EPOCH, None) != call["epoch"]:
        return call
    return {**call, "epochs_trained": call["epoch"], "steps_trained_in_current_epoch": 0}


def _step_scheduler(trainer: Any) -> None:
    """Step the Trainer's own scheduler, unless the step was one that overflowed."""
    scheduler = trainer.lr_scheduler
    state = trainer.state
    engine = trainer.deepspeed
    if isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ in _BY_METRIC:
        return
    taken = getattr(getattr(scheduler, "scheduler", scheduler), "last_epoch", None)
    overflowed = isinstance(taken, int) and taken + engine.skipped_steps == state.global_step + 1
    if not (engine.skipped_steps and overflowed):
        scheduler.step()


def is_epoch(state: Any) -> bool:
    """Whether a Trainer's state has as many epochs as its steps can have taken: each takes one step at least."""
    return type(state.epoch) in (int, float) and 0 <= state.epoch <= state.global_step


def _epoch_after_step(trainer: Any, call: dict[str, Any]) -> float:
    """The Trainer's count of epochs after one more step of the saved run, which ends with its epoch."""
    state = trainer.state
    report = trainer.deepspeed.elastic_report
    part = float(trainer.args.gradient_accumulation_steps / max(call["steps_in_epoch"], 1))
    epoch = float(state.epoch if is_epoch(state) else state.global_step * part)
    batch = None if report is None or report.batch is None else report.batch.global_batch
    if epoch and batch != trainer.get_total_train_batch_size(trainer.args):  # the mean of its steps tells
        part = epoch / int(state.global_step)
    return min(epoch + part, math.floor(epoch + _ROUNDING) + 1.0)

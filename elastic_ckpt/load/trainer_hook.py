"""The patch of Transformers' ``Trainer``: a resumed run goes on at the sample where the saved one ended.

The Trainer counts optimizer steps, and skips as many batches of the present size. Its epoch loop is given the epoch and
the batches that hold the samples which were trained on, and the sampler leaves out what is less than a step.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from elastic_ckpt import distributed
from elastic_ckpt.data import ElasticSampler
from elastic_ckpt.engines.data_position import bind_sampler, registered, saved_position
from elastic_ckpt.patches import unwrap, wrap

logger = logging.getLogger(__name__)
_TRAINER, _METHOD = "transformers.trainer", "_run_epoch"
_PARAMETERS = {"epoch", "train_dataloader", "steps_in_epoch", "resume_from_checkpoint"}
_PARAMETERS |= {"epochs_trained", "steps_trained_in_current_epoch"}


@dataclass
class _Run:
    """A call of ``Trainer.train``: what counts its samples, if that is known, and whether it has run no epoch yet."""

    counter: ElasticSampler | None
    begins: bool = True


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def watch_trainer() -> None:
    """Patch the ``Trainer`` if it is imported, as it is when it makes an engine. Idempotent."""
    trainer = getattr(sys.modules.get(_TRAINER), "Trainer", None)
    method = getattr(trainer, _METHOD, None)
    if method is not None and inspect.signature(method).parameters.keys() >= _PARAMETERS:
        wrap(trainer, _METHOD, _run_epoch)


def unwatch_trainer() -> None:
    """Undo :func:`watch_trainer`."""
    if hasattr(trainer := getattr(sys.modules.get(_TRAINER), "Trainer", None), _METHOD):
        unwrap(trainer, _METHOD)


def _run_epoch(original: Callable[..., None], trainer: Any, **call: Any) -> None:
    """Run the epoch that the Trainer asks for from where the saved run ended, and any before it that is not done.

    An epoch that was done on fewer steps than the Trainer supposes is not run again.
    """
    epoch, length = call["epoch"], _length(trainer, call["train_dataloader"])
    if epoch == call["epochs_trained"]:  # the first of this run
        _runs[trainer] = _Run(_counter_at_start(trainer, length, call) if length else None)
    run = _runs[trainer]
    if (counter := run.counter) is None or not length:
        original(trainer, **call)
        return
    dropped = _per_batch(trainer) - 1 if trainer.args.dataloader_drop_last else 0
    while (position := counter.samples_consumed) // length <= epoch:
        each, offset = divmod(position, length)
        if length - offset > dropped:
            with _from_sample(trainer, call, each, offset) as changed:
                original(trainer, **call | changed | {"epochs_trained": each if run.begins else -1})
            run.begins = False
            if trainer.control.should_training_stop:
                return
        counter.move_to((each + 1) * length)


def _per_batch(trainer: Any) -> int:
    """Samples of all ranks in one batch of their loaders."""
    return int(trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps)


def _length(trainer: Any, loader: Any) -> int | None:
    """Samples of an epoch; ``None`` if their order is not one that can be begun anywhere."""
    sampler, engine = getattr(_batch_sampler(loader), "sampler", None), getattr(trainer, "deepspeed", None)
    if sampler is None or engine is None or trainer.args.ignore_data_skip:
        return None
    return None if trainer.accelerator.split_batches or trainer.get_sp_size() > 1 else len(sampler)


def _batch_sampler(loader: Any) -> Any:
    """That of the whole job, inside those of Accelerate."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def _counter_at_start(trainer: Any, length: int, call: dict[str, Any]) -> ElasticSampler | None:
    """What counts the samples of a Trainer for its saves, at the first of this run; ``None`` if that is not known."""
    engine, epoch = trainer.deepspeed, call["epochs_trained"]
    known = _runs[trainer].counter if trainer in _runs else None
    if registered(engine) not in (None, known):  # the script has a sampler of its own
        return None
    position = epoch * length
    if call["resume_from_checkpoint"] is not None:
        saved = _saved_position(trainer, length)
        if saved is None:
            return None
        skipped = position + min(call["steps_trained_in_current_epoch"] * _per_batch(trainer), length)
        off = f"; by its own count of steps, it would be {abs(skipped - saved)} samples off" * (skipped != saved)
        if distributed.rank() == 0:
            where = f"after sample {saved % length} of {length} in epoch {saved // length}"
            logger.warning("elastic_ckpt: the Trainer goes on %s%s", where, off)
        position = saved
    counter = _new_counter(length)
    bind_sampler(engine, counter)
    counter.move_to(position)
    return counter


def _new_counter(length: int) -> ElasticSampler:
    return ElasticSampler(length, shuffle=False, num_replicas=1, rank=0)


def _saved_position(trainer: Any, length: int) -> int | None:
    """Samples after which a save was made: as it says, or by its part of an epoch and the batch of the saved run."""
    engine = trainer.deepspeed
    if (position := saved_position(engine)) is not None:
        is_trainers = {**position, "samples_consumed": 0} == _new_counter(length).state_dict()
        return int(position["samples_consumed"]) if is_trainers else None
    report = engine.elastic_report
    if report is None or report.batch is None or None in (trainer.state.epoch, *vars(report.batch).values()):
        return None
    per_batch = report.batch.global_batch // report.batch.accumulation_steps
    batches = length // per_batch if trainer.args.dataloader_drop_last else math.ceil(length / per_batch)
    epoch, batch = divmod(round(trainer.state.epoch * batches), batches)
    return int(epoch * length + min(batch * per_batch, length))


@contextmanager
def _from_sample(trainer: Any, call: dict[str, Any], epoch: int, offset: int) -> Iterator[dict[str, Any]]:
    """The arguments with which an epoch begins at a sample: the steps before it; the sampler leaves out the rest."""
    steps, batches = trainer.args.gradient_accumulation_steps, _batch_sampler(call["train_dataloader"])
    (done, shift), sampler = divmod(offset, _per_batch(trainer) * steps), batches.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    changed = {"epoch": epoch, "steps_trained_in_current_epoch": done * steps}
    if shift:
        left = (len(sampler) - offset) / _per_batch(trainer)
        left = math.floor(left) if trainer.args.dataloader_drop_last else math.ceil(left)
        changed["steps_in_epoch"] = done * steps + left
        batches.sampler = list(islice(sampler, shift, None))
    try:
        yield changed
    finally:
        batches.sampler = sampler

"""The patch of Transformers' ``Trainer``: a resumed run goes on at the sample where the saved one ended.

The Trainer counts optimizer steps, and skips as many batches of the present size. Its epoch loop is given the epoch and
the batches that hold the samples which were trained on, and the sampler leaves out what is less than a step.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.data import ElasticSampler, Trained
from elastic_ckpt.engines.data_position import registered, saved_position, set_registered
from elastic_ckpt.load.trainer_steps import at_first_epoch, finish_saved_step, is_done, is_over, steps_ahead
from elastic_ckpt.patches import unwrap, wrap

logger = logger_of(__name__)
_TRAINER, _METHOD, _COUNTER = "transformers.trainer", "_run_epoch", "_elastic_ckpt_counter"
_PARAMETERS = {"epoch", "train_dataloader", "steps_in_epoch", "resume_from_checkpoint"}
_PARAMETERS |= {"epochs_trained", "steps_trained_in_current_epoch"}


class _Counter(ElasticSampler):
    """Counts the samples of a call of ``Trainer.train`` by its optimizer steps; no load moves it.

    DeepSpeed's own count is another one where the config leaves ``gradient_accumulation_steps`` out.

    Attributes:
        begins: whether the call has run no epoch yet.
        is_off: whether the Trainer's own count begins at another sample, so that its epochs are not those of the data.
    """

    def __init__(self, trainer: Any, length: int) -> None:
        super().__init__(length, shuffle=False, num_replicas=1, rank=0)
        self.begins, self.is_off = True, False
        self._state, self._batch = trainer.state, int(trainer.get_total_train_batch_size(trainer.args))
        self._trainer, self._ahead = trainer, steps_ahead(trainer)

    def _trained(self) -> Trained:
        # within a step, the engine has trained on its samples already
        is_within_step = steps_ahead(self._trainer) == self._ahead + 1
        return Trained((self._state.global_step + is_within_step) * self._batch, 1)

    def check(self, state: Any) -> None:
        """Nothing: its place is that of the Trainer's own run."""

    def load_state_dict(self, state: Any) -> None:
        """Nothing, as well."""


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


def _run_epoch(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Run the epoch that the Trainer asks for from where the saved run ended, and any before it that is not done.

    An epoch that was done on fewer steps than the Trainer supposes is not run again. If ``max_steps`` takes more epochs
    than it supposes, they follow on its last one.
    """
    call = inspect.signature(original).bind(trainer, *args, **kwargs).arguments
    epoch, state = call["epoch"], trainer.state
    if epoch == call["epochs_trained"]:  # the first of this run
        call = finish_saved_step(trainer, call)
        setattr(trainer, _COUNTER, _counter_at_start(trainer, call))
    counter: _Counter | None = getattr(trainer, _COUNTER, None)
    if is_over(trainer):
        return
    if counter is None:
        if not is_done(trainer, epoch):
            original(**at_first_epoch(trainer, call))
        return
    ends_by_steps = counter.is_off and trainer.args.max_steps > 0 and epoch + 1 >= state.num_train_epochs
    is_another = False
    while counter.samples_consumed // counter.length <= epoch or (
        ends_by_steps and state.global_step < state.max_steps
    ):
        each, offset = divmod(counter.samples_consumed, counter.length)
        if is_another:
            trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, state, trainer.control)
        with _from_sample(trainer, call, each, offset) as changed:
            original(**call | changed | {"epochs_trained": each if counter.begins else -1})
        counter.begins, is_another = False, True
        if trainer.control.should_training_stop:
            return
        counter.move_to((each + 1) * counter.length)


def _per_batch(trainer: Any) -> int:
    """Samples of all ranks in one batch of their loaders."""
    return int(trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps)


def _batches(trainer: Any, length: int, per_batch: int) -> int:
    """Of an epoch."""
    return length // per_batch if trainer.args.dataloader_drop_last else math.ceil(length / per_batch)


def _length(trainer: Any, call: dict[str, Any]) -> int | None:
    """Samples of an epoch; ``None`` unless its batches are plain ones of an order that follows from the epoch alone."""
    loader, accelerator = call["train_dataloader"], trainer.accelerator
    batches = _batch_sampler(loader)
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not hasattr(sampler, "__len__") or not hasattr(loader, "set_epoch"):
        return None
    if type(sampler) is not SequentialSampler and not hasattr(sampler, "set_epoch"):
        return None
    if accelerator.split_batches or not accelerator.even_batches or trainer.get_sp_size() > 1:
        return None
    found = len(sampler), batches.batch_size, batches.drop_last, call["steps_in_epoch"]
    per_batch, ranks = _per_batch(trainer), trainer.args.world_size // trainer.get_tp_size() // trainer.get_cp_size()
    expected = found[0], per_batch // ranks, trainer.args.dataloader_drop_last
    is_plain = found == (*expected, _batches(trainer, found[0], per_batch))
    return found[0] if is_plain and call["steps_in_epoch"] else None


def _batch_sampler(loader: Any) -> Any:
    """That of the whole job, inside those of Accelerate."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def _counter_at_start(trainer: Any, call: dict[str, Any]) -> _Counter | None:
    """What counts the samples of a Trainer for its saves, at the first of this run; ``None`` if that is not known."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is None or not isinstance(registered(engine), _Counter | None):  # the script has a sampler of its own
        return None
    set_registered(engine, None)
    if trainer.args.ignore_data_skip:
        return None
    length, saved, skipped = _length(trainer, call), 0, 0
    if call["resume_from_checkpoint"] is not None:
        if length is None or (position := _saved_position(trainer, length)) is None:
            _say_left(trainer, call)
            return None
        skipped = min(call["steps_trained_in_current_epoch"] * _per_batch(trainer), length)
        saved, skipped = position, skipped + call["epochs_trained"] * length
        off = f"; by its own count of steps, it would be {abs(skipped - saved)} samples off" * (skipped != saved)
        if distributed.rank() == 0:
            where = f"after sample {saved % length} of {length} in epoch {saved // length}"
            logger.warning("elastic_ckpt: the Trainer continues %s%s", where, off)
    if length is None:
        return None
    counter = _Counter(trainer, length)
    counter.is_off = skipped != saved
    counter.move_to(saved)
    set_registered(engine, counter)
    return counter


def _say_left(trainer: Any, call: dict[str, Any]) -> None:
    """Warn of what the Trainer does by itself, if that is not to go on where the saved run ended."""
    own = call["epochs_trained"] + call["steps_trained_in_current_epoch"] / (call["steps_in_epoch"] or 1)
    if not hasattr(dataset := call["train_dataloader"].dataset, "__len__") or distributed.rank():
        return
    if off := round(abs(own - trainer.state.epoch) * len(dataset)):
        text = f"goes on by its own count of steps, about {off} samples off"
        logger.warning("elastic_ckpt leaves the data to the Trainer, which %s", text)


def _saved_position(trainer: Any, length: int) -> int | None:
    """Samples after which a save was made: as it says, or by its part of an epoch and the batch of the saved run."""
    engine, position = trainer.deepspeed, saved_position(trainer.deepspeed)
    if position is not None:
        if {**position, "samples_consumed": 0} != _Counter(trainer, length).facts() | {"samples_consumed": 0}:
            return None
        saved = int(position["samples_consumed"])
    else:
        report = engine.elastic_report
        if report is None or report.batch is None or None in vars(report.batch).values():
            return None
        per_batch = report.batch.global_batch // report.batch.accumulation_steps
        if not (batches := _batches(trainer, length, per_batch)):
            return None
        epoch, batch = divmod(round(trainer.state.epoch * batches), batches)
        saved = int(epoch * length + min(batch * per_batch, length))
    left = -saved % length  # of its epoch; with drop_last, too few for a batch are none
    return saved + left if _batches(trainer, left, _per_batch(trainer)) == 0 else saved


@contextmanager
def _from_sample(trainer: Any, call: dict[str, Any], epoch: int, offset: int) -> Iterator[dict[str, Any]]:
    """The arguments with which an epoch begins at a sample: the steps before it; the sampler leaves out the rest."""
    steps, batches = trainer.args.gradient_accumulation_steps, _batch_sampler(call["train_dataloader"])
    (done, shift), sampler = divmod(offset, _per_batch(trainer) * steps), batches.sampler
    changed = {"epoch": epoch, "steps_trained_in_current_epoch": done * steps}
    if offset and hasattr(sampler, "set_epoch"):  # what skips batches does not pass it on
        sampler.set_epoch(epoch)
    if shift:
        changed["steps_in_epoch"] = done * steps + _batches(trainer, len(sampler) - offset, _per_batch(trainer))
        batches.sampler = list(islice(sampler, shift, None))
    try:
        yield changed
    finally:
        batches.sampler = sampler

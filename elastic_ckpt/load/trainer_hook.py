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
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from elastic_ckpt import distributed
from elastic_ckpt.core.kinds import described, is_count
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.text import one_line
from elastic_ckpt.data import ElasticSampler, Trained
from elastic_ckpt.data.position import SAMPLES
from elastic_ckpt.engines.data_position import registered, saved_position, set_registered
from elastic_ckpt.load.trainer_steps import at_first_epoch, finish_saved_step, is_done, is_epoch, is_over, steps_ahead
from elastic_ckpt.patches import unwrap, wrap

logger = logger_of(__name__)
_TRAINER = "transformers.trainer"
_METHOD = "_run_epoch"
_COUNTER = "_elastic_ckpt_counter"
#: Entry of a data position: the order of its samples in words.
_ORDER = "order"
#: The order of the data set itself.
_AS_IT_IS = "as it is"
#: Of Accelerate: a loader whose first rank reads for all.
_DISPATCHER = "DataLoaderDispatcher"
#: Of Accelerate: a stream of which each rank takes its part of a batch.
_STREAM_BY_BATCH = "IterableDatasetShard"
_LEFT = "elastic_ckpt leaves the data to the Trainer"
_PARAMETERS = {"epoch", "train_dataloader", "steps_in_epoch", "resume_from_checkpoint"}
_PARAMETERS |= {"epochs_trained", "steps_trained_in_current_epoch"}


class _Counter(ElasticSampler):
    """Counts the samples of a call of ``Trainer.train`` by its optimizer steps; no load moves it.

    DeepSpeed's own count is another one where the config leaves ``gradient_accumulation_steps`` out.

    Attributes:
        begins: whether the call has run no epoch yet.
        is_off: whether the Trainer's own count begins at another sample, so that its epochs are not those of the data.
    """

    def __init__(self, trainer: Any, length: int, order: str) -> None:
        super().__init__(length, shuffle=False, num_replicas=1, rank=0)
        self.begins = True
        self.is_off = False
        self._order = order
        self._state = trainer.state
        self._batch = int(trainer.get_total_train_batch_size(trainer.args))
        self._trainer = trainer
        self._ahead = steps_ahead(trainer)

    def _trained(self) -> Trained:
        # within a step, the engine has trained on its samples already
        is_within_step = steps_ahead(self._trainer) == self._ahead + 1
        return Trained((self._state.global_step + is_within_step) * self._batch, 1)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), _ORDER: self._order}

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
    epoch = call["epoch"]
    state = trainer.state
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
        counter.begins = False
        is_another = True
        if trainer.control.should_training_stop:
            return
        counter.move_to((each + 1) * counter.length)


def splits_batches() -> bool:
    """Whether a Trainer calls whose Accelerate divides each batch between ranks, which its engine does not know.

    It is found among the callers: nothing else leads from an engine to its Trainer while that makes it.
    """
    trainer = getattr(sys.modules.get(_TRAINER), "Trainer", None)
    frame = inspect.currentframe()
    while trainer is not None and frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), trainer):
            return bool(getattr(getattr(caller, "accelerator", None), "split_batches", False))
        frame = frame.f_back
    return False


def _data_ranks(trainer: Any) -> int:
    """Ranks with samples of their own."""
    parallel = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    return int(trainer.args.world_size // parallel)


def _per_batch(trainer: Any) -> int:
    """Samples of all ranks in one batch of their loaders."""
    samples = trainer.get_total_train_batch_size(trainer.args) // trainer.args.gradient_accumulation_steps
    return int(samples // _data_ranks(trainer) if trainer.accelerator.split_batches else samples)


def _batches(trainer: Any, length: int, per_batch: int) -> int:
    """Of an epoch."""
    return length // per_batch if trainer.args.dataloader_drop_last else math.ceil(length / per_batch)


def _length(trainer: Any, call: dict[str, Any]) -> int | None:
    """Samples of an epoch; ``None`` unless its batches are plain ones of an order that follows from the epoch alone."""
    loader = call["train_dataloader"]
    accelerator = trainer.accelerator
    batches = _batch_sampler(loader)
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not hasattr(sampler, "__len__") or not hasattr(loader, "set_epoch"):
        return None
    if type(sampler) is not SequentialSampler and not hasattr(sampler, "set_epoch"):
        return None
    if accelerator.split_batches or not accelerator.even_batches or trainer.get_sp_size() > 1:
        return None
    found = len(sampler), batches.batch_size, batches.drop_last, call["steps_in_epoch"]
    per_batch = _per_batch(trainer)
    ranks = trainer.args.world_size // trainer.get_tp_size() // trainer.get_cp_size()
    expected = found[0], per_batch // ranks, trainer.args.dataloader_drop_last
    is_plain = found == (*expected, _batches(trainer, found[0], per_batch))
    return found[0] if is_plain and call["steps_in_epoch"] else None


def _batch_sampler(loader: Any) -> Any:
    """That of the whole job, inside those of Accelerate."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


@dataclass(frozen=True)
class _Place:
    """Where a run begins in its data, the same on all ranks.

    Attributes:
        length: samples of an epoch; ``None``: the data is left to the Trainer.
        order: of an epoch's samples, in words.
        saved: samples after which the saved run ended.
        skipped: samples after which the Trainer would begin by its own count.
    """

    length: int | None = None
    order: str = ""
    saved: int = 0
    skipped: int = 0


def _counter_at_start(trainer: Any, call: dict[str, Any]) -> _Counter | None:
    """What counts the samples of a Trainer for its saves, at the first of this run; ``None`` if that is not known.

    Collective: saves are, where there is such a counter. What the data's own objects raise is no reason to stop.
    """
    engine = getattr(trainer, "deepspeed", None)
    if engine is None or not isinstance(registered(engine), _Counter | None):  # the script has a sampler of its own
        return None
    set_registered(engine, None)
    if trainer.args.ignore_data_skip:
        return None
    everybody = distributed.all_gather("look at the Trainer's data", lambda: _looked_at(trainer, call))
    place, line = everybody[0]
    # ranks may have seeds of their own, of which the first one's stands for all
    is_common = all(replace(each, order=place.order) == place for each, _ in everybody)
    if not is_common:
        lines = (said for each, said in everybody if each.length is None and said)
        line = next(lines, f"{_LEFT}, since ranks are at different positions in it")
    if distributed.rank() == 0 and line:
        logger.warning("%s", line)
    if not is_common or place.length is None:
        return None
    counter = _Counter(trainer, place.length, place.order)
    counter.is_off = place.skipped != place.saved
    counter.move_to(place.saved)
    set_registered(engine, counter)
    return counter


def _looked_at(trainer: Any, call: dict[str, Any]) -> tuple[_Place, str]:
    """This rank's place in the data, and what is to be said of it. Local; raises nothing."""
    try:
        return _place(trainer, call)
    except Exception as error:  # of a sampler, a loader or a data set of the user's
        why = f"{type(error).__name__}: {one_line(str(error))}"
        return _Place(), f"{_LEFT}, since its loader does not report its position ({why})"


def _place(trainer: Any, call: dict[str, Any]) -> tuple[_Place, str]:
    length = _length(trainer, call)
    is_resumed = call["resume_from_checkpoint"] is not None
    order = "" if length is None else _order(_batch_sampler(call["train_dataloader"]).sampler)
    if not is_resumed:
        return _Place(length, order), ""
    if length is None or (saved := _saved_position(trainer, length)) is None:
        state = trainer.state
        if not is_epoch(state):
            found = f"{described(state.epoch)} for the epochs of {state.global_step} steps"
            return _Place(), f"{_LEFT}, since its state has {one_line(found)}"
        return _Place(), _of_the_trainers_own(trainer, call)
    skipped = min(call["steps_trained_in_current_epoch"] * _per_batch(trainer), length)
    skipped += call["epochs_trained"] * length
    line = f"elastic_ckpt: the Trainer continues after sample {saved % length} of {length} in epoch {saved // length}"
    line += f"; by its own count of steps, it would be {abs(skipped - saved)} samples off" * (skipped != saved)
    return _Place(length, order, saved, skipped), line + _of_order(trainer, order, saved % length)


def _order(sampler: Any) -> str:
    """The order of a sampler's epochs, in words that differ where it does."""
    if type(sampler) is SequentialSampler:
        return _AS_IT_IS
    seeds = (getattr(sampler, key, None) for key in ("initial_seed", "seed"))
    seed = next((each for each in seeds if isinstance(each, int)), None)
    return type(sampler).__name__ + ("" if seed is None else f" of seed {seed}")


def _of_order(trainer: Any, order: str, within: int) -> str:
    """What is to be said of the order, for a run that continues ``within`` an epoch."""
    position = saved_position(trainer.deepspeed)
    saved = None if position is None else position.get(_ORDER)
    if not within or saved == order or (saved is None and order == _AS_IT_IS):
        return ""
    if saved is None:
        return ". That is the next one if the order is the saved run's, whose seed and data_seed are not recorded"
    return f", but of another order ({order} instead of {saved}): of this epoch, samples come twice, and others never"


def _of_the_trainers_own(trainer: Any, call: dict[str, Any]) -> str:
    """What the Trainer does by itself, if that is not known to go on where the saved run ended."""
    loader = call["train_dataloader"]
    if (batches := _len(loader)) is not None:
        own = call["epochs_trained"] + call["steps_trained_in_current_epoch"] / (call["steps_in_epoch"] or 1)
        part = abs(own - trainer.state.epoch)
        samples = _len(_dataset(loader))
        off = round(part * (batches * _per_batch(trainer) if samples is None else samples))
        return f"{_LEFT}, which continues by its own count of steps, about {off} samples off" if off else ""
    if (batch := _saved_per_batch(trainer)) is None:
        return ""
    source = trainer.deepspeed.elastic_report.source
    now = _data_ranks(trainer)
    then = source.sequence.data_degree(source.partition_degree)
    line = f"; those of the saved run had {batch}" * (batch != _per_batch(trainer))
    if now != then and not _is_in_global_order(loader):
        line += f"; what a stream gives to each rank may depend on their number, {now} instead of {then}, so that some "
        line += "samples may come twice, and others never"
    skips = f"{_LEFT}, which skips {call['steps_trained_in_current_epoch']} batches of {_per_batch(trainer)} samples"
    return skips + line if line else ""


def _saved_per_batch(trainer: Any) -> int | None:
    """Samples of all ranks in one batch of the saved run's loaders; ``None`` if the checkpoint does not tell."""
    report = trainer.deepspeed.elastic_report
    if report is None or report.batch is None or None in vars(report.batch).values():
        return None
    if trainer.accelerator.split_batches:  # as then, it is supposed
        return int(report.batch.micro_batch)
    return int(report.batch.global_batch // report.batch.accumulation_steps)


def _is_in_global_order(loader: Any) -> bool:
    """Whether Accelerate divides a stream batch by batch, so that the ranks together get it in its own order."""
    return type(loader).__name__ == _DISPATCHER or type(getattr(loader, "dataset", None)).__name__ == _STREAM_BY_BATCH


def _len(sized: Any) -> int | None:
    """The length of an object of the user's; ``None`` if it has none, or fails to tell it."""
    try:
        return len(sized)
    except Exception:
        return None


def _dataset(loader: Any) -> Any:
    """The data set of a loader, inside what Accelerate puts around a stream; ``None`` without one."""
    dataset: Any = getattr(loader, "dataset", None)
    return dataset.dataset if type(dataset).__name__ == _STREAM_BY_BATCH else dataset


def _saved_position(trainer: Any, length: int) -> int | None:
    """Samples after which a save was made: as it says, or by its part of an epoch and the batch of the saved run."""
    position = saved_position(trainer.deepspeed)
    if position is not None:
        own = {SAMPLES: 0, _ORDER: ""}
        if {**position, **own} != _Counter(trainer, length, "").facts() | own or not is_count(position[SAMPLES]):
            return None
        saved = int(position[SAMPLES])
    else:
        per_batch = _saved_per_batch(trainer)
        if per_batch is None or not (batches := _batches(trainer, length, per_batch)):
            return None
        if not is_epoch(trainer.state):
            return None
        epoch, batch = divmod(round(trainer.state.epoch * batches), batches)
        saved = int(epoch * length + min(batch * per_batch, length))
    left = -saved % length  # of its epoch; with drop_last, too few for a batch are none
    return saved + left if _batches(trainer, left, _per_batch(trainer)) == 0 else saved


@contextmanager
def _from_sample(trainer: Any, call: dict[str, Any], epoch: int, offset: int) -> Iterator[dict[str, Any]]:
    """The arguments with which an epoch begins at a sample: the steps before it; the sampler leaves out the rest."""
    steps = trainer.args.gradient_accumulation_steps
    batches = _batch_sampler(call["train_dataloader"])
    (done, shift) = divmod(offset, _per_batch(trainer) * steps)
    sampler = batches.sampler
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

"""What is asked of a Trainer's data may fail, or not be the same on all ranks: then the data is the Trainer's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import NO_SEQUENCE_PARALLEL
from elastic_ckpt.core.metadata import SourceFacts
from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.engines.data_position import registered
from elastic_ckpt.load import trainer_hook

LENGTH, MICRO = 24, 4
SOURCE = SourceFacts("native", "/ckpt/tag", "tag", 2, 1, "0.19.8", sequence=NO_SEQUENCE_PARALLEL)


class Ordered:
    """A sampler with a seed, as Accelerate's."""

    def __init__(self, seed: Any, length: Any = LENGTH) -> None:
        self.initial_seed, self.length = seed, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def set_epoch(self, epoch: int) -> None:
        """Nothing."""


class Broken:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}\x1b[2J here")


class Loader:
    """Of Accelerate, around a sampler."""

    def __init__(self, sampler: Any, dataset: Any = ()) -> None:
        self.batch_sampler, self.dataset = BatchSampler(sampler, MICRO, False), dataset

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Nothing."""


class Unsized:
    """A stream whose wrapper has a length that cannot be told, as Accelerate's IterableDatasetShard."""

    dataset = property(lambda self: self)

    def __len__(self) -> int:
        raise TypeError("object of type 'Stream' has no len()")


def trainer_of(position: Any = None, batch: int = MICRO, ranks: int = 1) -> Any:
    """A Trainer that resumes after 4 steps of ``batch`` samples on so many ranks."""
    report = SimpleNamespace(batch=BatchSizes(batch, batch // ranks, 1), source=replace(SOURCE, partition_degree=ranks))
    engine = SimpleNamespace(elastic_report=report, global_steps=4, _elastic_ckpt_position=position)
    args = SimpleNamespace(
        ignore_data_skip=False, gradient_accumulation_steps=1, world_size=1, dataloader_drop_last=False
    )
    return SimpleNamespace(
        deepspeed=engine,
        args=args,
        accelerator=SimpleNamespace(split_batches=False, even_batches=True),
        state=SimpleNamespace(global_step=4, epoch=4 / 6),
        get_total_train_batch_size=lambda _: MICRO,
        **{f"get_{each}_size": lambda: 1 for each in ("tp", "cp", "sp")},
    )


def call_of(loader: Any, resume: str | None = "checkpoint-4") -> dict[str, Any]:
    call = {"train_dataloader": loader, "steps_in_epoch": 6, "resume_from_checkpoint": resume}
    return call | {"epochs_trained": 0, "steps_trained_in_current_epoch": 4 if resume else 0}


def counted(trainer: Any, loader: Any, caplog: pytest.LogCaptureFixture, **more: Any) -> tuple[Any, str]:
    with caplog.at_level(logging.WARNING, "elastic_ckpt"):
        counter = trainer_hook._counter_at_start(trainer, call_of(loader, **more))
    assert registered(trainer.deepspeed) is counter
    return counter, caplog.text


def position(seed: int | None) -> dict[str, Any]:
    found = {"samples_consumed": 16, "length": LENGTH, "seed": 0, "shuffle": False}
    return found if seed is None else {**found, "order": f"Ordered of seed {seed}"}


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (position(1), ""),
        (position(2), "of another order (Ordered of seed 1 instead of Ordered of seed 2)"),
        (position(None), "whose seed and data_seed are not recorded"),
        (None, "whose seed and data_seed are not recorded"),
        ({**position(2), "samples_consumed": LENGTH}, ""),  # at the beginning of an epoch, any order is as good
    ],
)
def test_another_order_is_said(caplog: pytest.LogCaptureFixture, saved: Any, words: str) -> None:
    counter, log = counted(trainer_of(saved), Loader(Ordered(1)), caplog)
    assert counter.samples_consumed == (saved or position(1))["samples_consumed"]
    assert counter.state_dict()["order"] == "Ordered of seed 1"
    assert f"continues after sample {counter.samples_consumed % LENGTH} of {LENGTH}" in log
    assert words in log and ("order" in log) == bool(words)


@pytest.mark.parametrize("epoch", [-1e9, 1e18, 10**400, float("nan"), float("inf"), True, "1\x1b[2J"], ids=repr)
def test_epochs_that_no_steps_have_taken_are_left_to_the_trainer(caplog: pytest.LogCaptureFixture, epoch: Any) -> None:
    trainer = trainer_of()
    trainer.state.epoch = epoch
    counter, log = counted(trainer, Loader(Ordered(1)), caplog)
    assert counter is None and "\x1b" not in log
    assert "leaves the data to the Trainer, since its state has" in log and "for the epochs of 4 steps" in log


@pytest.mark.parametrize("consumed", [-600, True, 12.7, "16", 1 << 62, float("nan"), None], ids=repr)
def test_a_position_that_is_none_is_left_to_the_trainer(caplog: pytest.LogCaptureFixture, consumed: Any) -> None:
    counter, _ = counted(trainer_of({**position(1), "samples_consumed": consumed}), Loader(Ordered(1)), caplog)
    assert counter is None


def test_a_sequence_has_one_order(caplog: pytest.LogCaptureFixture) -> None:
    counter, log = counted(trainer_of(), Loader(SequentialSampler(range(LENGTH))), caplog)
    assert counter.samples_consumed == 16 and "order" not in log


@pytest.mark.parametrize("resume", ["checkpoint-4", None])
@pytest.mark.parametrize("loader", [Broken, lambda: Loader(Ordered(1, length=-1)), SimpleNamespace])
def test_what_fails_or_is_not_there_stops_nothing(
    caplog: pytest.LogCaptureFixture, loader: Callable[[], Any], resume: str | None
) -> None:
    counter, log = counted(trainer_of(), loader(), caplog, resume=resume)
    assert counter is None and "\x1b" not in log
    is_error = loader is not SimpleNamespace
    assert ("leaves the data to the Trainer, since its loader does not report its position" in log) == is_error


def test_a_stream_without_length_is_said_by_batches_and_ranks(caplog: pytest.LogCaptureFixture) -> None:
    stream = SimpleNamespace(dataset=Unsized())
    counter, log = counted(trainer_of(batch=6, ranks=2), stream, caplog)
    assert counter is None and "skips 4 batches of 4 samples; those of the saved run had 6; what a stream gives" in log
    assert "1 instead of 2" in log
    caplog.clear()
    assert counted(trainer_of(), stream, caplog) == (None, "")


def test_a_loader_without_a_data_set_is_said_to_be_off(caplog: pytest.LogCaptureFixture) -> None:
    class Sized:
        def __len__(self) -> int:
            return 6

    trainer = trainer_of()
    trainer.state.epoch = 0.5
    counter, log = counted(trainer, Sized(), caplog)
    assert counter is None and "continues by its own count of steps, about 4 samples off" in log


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda place: (trainer_hook._Place(), "leaves it, failed"), "leaves it, failed"),
        (lambda place: (replace(place, length=25), "continues"), "different positions"),
        (lambda place: (replace(place, saved=17), "continues"), "different positions"),
        (lambda place: (replace(place, order="Ordered of seed 2"), "continues"), ""),
    ],
)
def test_ranks_count_together_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: Callable[[Any], Any], why: str
) -> None:
    def of_two(doing: str, work: Callable[[], Any]) -> list[Any]:
        mine = work()
        return [mine, other(mine[0])]

    monkeypatch.setattr(distributed, "all_gather", of_two)
    counter, log = counted(trainer_of(), Loader(Ordered(1)), caplog)
    assert (counter is None) == bool(why) and why in log
    assert ("continues after" in log) == (counter is not None)

"""What a Trainer is told of a step that its engine had taken when it was saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.load.trainer_steps import at_first_epoch, finish_saved_step, is_done, is_epoch, is_over, steps_ahead


def trainer_of(own: int, engine: int, *, skipped: int = 0, in_step: int = 1, steps: int = 100, **more: Any) -> Any:
    """A resumed Trainer of five batches of six samples in an epoch, with counts of its own and of its engine."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(own - more.get("skipped_by_own", skipped)):
        optimizer.step()
        scheduler.step()
    report = SimpleNamespace(batch=BatchSizes(more.get("batch", 6 * in_step), 3, in_step))
    return SimpleNamespace(
        deepspeed=SimpleNamespace(global_steps=engine, skipped_steps=skipped, elastic_report=report),
        state=SimpleNamespace(global_step=own, epoch=own * in_step / 5, max_steps=steps),
        args=SimpleNamespace(gradient_accumulation_steps=in_step, ignore_data_skip=more.get("ignore_data_skip", False)),
        control=SimpleNamespace(should_training_stop=False),
        lr_scheduler=more.get("scheduler", scheduler),
        get_total_train_batch_size=lambda _: 6 * in_step,
    )


def call_of(epoch: int = 0, steps: int = 0, resumed: bool = True) -> dict[str, Any]:
    folder = "checkpoint-2" if resumed else None
    call = {"epoch": epoch, "epochs_trained": epoch, "steps_trained_in_current_epoch": steps, "steps_in_epoch": 5}
    return {**call, "resume_from_checkpoint": folder}


@pytest.mark.parametrize("ahead", [-1, 0, 2, 100])
def test_other_counts_than_one_step_apart_are_left_alone(ahead: int) -> None:
    trainer, call = trainer_of(2, 2 + ahead), call_of(steps=2)
    assert steps_ahead(trainer) == ahead
    assert finish_saved_step(trainer, call) == call and trainer.state.global_step == 2
    fresh = trainer_of(2, 3)
    assert finish_saved_step(fresh, call_of(resumed=False)) == call_of(resumed=False)
    assert fresh.state.global_step == 2 and not is_done(fresh, 0) and not is_over(fresh)


def test_within_an_epoch_its_next_step_follows() -> None:
    trainer = trainer_of(2, 3)
    assert finish_saved_step(trainer, call_of(steps=2)) == call_of(steps=3)
    assert (trainer.state.global_step, trainer.state.epoch) == (3, pytest.approx(0.6))
    assert trainer.lr_scheduler.get_last_lr() == [1 / 4]
    assert not is_done(trainer, 0)


#: Epochs that no 2 steps of a Trainer have taken.
NO_EPOCHS = [None, "1", True, -1, -1e9, 3, 1e18, 10**400, float("nan"), float("inf"), [1]]


@pytest.mark.parametrize("epoch", NO_EPOCHS, ids=lambda each: repr(each)[:8])
def test_epochs_that_no_steps_have_taken_are_counted_by_the_steps(epoch: Any) -> None:
    trainer = trainer_of(2, 3)
    assert is_epoch(trainer.state)
    trainer.state.epoch = epoch
    assert not is_epoch(trainer.state)
    finish_saved_step(trainer, call_of(steps=2))
    assert trainer.state.epoch == pytest.approx(0.6)


def test_the_last_step_of_an_epoch_ends_it() -> None:
    for ignored in (False, True):
        trainer = trainer_of(4, 5, ignore_data_skip=ignored)
        changed = finish_saved_step(trainer, call_of(steps=0 if ignored else 4))
        assert changed == {**call_of(steps=0), "epochs_trained": 1} and trainer.state.epoch == 1.0
        assert is_done(trainer, 0) and not is_done(trainer, 1) and not is_over(trainer)
        following = {**call_of(epoch=1), "epochs_trained": 0, "steps_trained_in_current_epoch": 4}
        assert at_first_epoch(trainer, following) == call_of(epoch=1), "whose random state is loaded"
        later = {**call_of(epoch=2), "epochs_trained": 0}
        assert at_first_epoch(trainer, later) == later


def test_the_last_step_of_the_run_ends_that() -> None:
    trainer = trainer_of(2, 3, steps=3)
    finish_saved_step(trainer, call_of(steps=2))
    assert is_over(trainer) and is_done(trainer, 7) and trainer.control.should_training_stop


@pytest.mark.parametrize(("own", "batch", "epoch"), [(1, 12, 0.8), (2, 12, 1.0), (1, 3, 0.8), (2, 24, 1.0)])
def test_the_part_of_an_epoch_is_that_of_the_saved_runs_batches(own: int, batch: int, epoch: float) -> None:
    trainer = trainer_of(own, own + 1, in_step=2, batch=batch)  # of five batches, the third step has one
    finish_saved_step(trainer, call_of(steps=2 * own))
    assert trainer.state.epoch == pytest.approx(epoch)


def test_a_step_that_overflowed_leaves_the_schedule_where_it_is() -> None:
    for skipped_by_own, lr in ((0, 1 / 3), (1, 1 / 3)):
        trainer = trainer_of(2, 3, skipped=1, skipped_by_own=skipped_by_own)
        finish_saved_step(trainer, call_of(steps=2))
        assert trainer.lr_scheduler.get_last_lr() == [lr], skipped_by_own


def test_a_schedule_by_metric_is_not_stepped() -> None:
    scheduler = ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    trainer = trainer_of(2, 3, scheduler=scheduler)
    finish_saved_step(trainer, call_of(steps=2))
    assert scheduler.last_epoch == 0 and trainer.state.global_step == 3

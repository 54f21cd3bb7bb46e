"""What a checkpoint and a live engine tell of the samples that were trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.core.values import BatchSizes, TrainingState
from elastic_ckpt.engines.data_position import POSITION_KEY, samples_consumed, trained
from elastic_ckpt.engines.training_state import warn_of_data


def saved(steps: int, samples: int | None, batch: int | None = 12, **checkpoint: Any) -> TrainingState:
    counters = {"global_steps": steps} | ({} if samples is None else {"global_samples": samples})
    return TrainingState(counters, BatchSizes(batch, None, None), None, None, False, checkpoint)


AUTOTP = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (saved(4, 48), 48),
        (saved(4, None), 48),  # as DeepSpeed completes it
        (saved(4, None, None), None),
        (saved(4, 96, ds_config={"train_batch_size": 24}), 48),  # AutoTP's two ranks have the same samples
        (saved(4, 96, ds_config={"train_batch_size": "auto", **AUTOTP}), 48),
        (saved(4, 96, ds_config=AUTOTP), 48),  # which completes a config without a batch by all ranks
        (saved(4, 120, ds_config=AUTOTP), 60),  # ramped up
        (saved(4, 48, ds_config=AUTOTP), 48),  # with an mpu
        (saved(4, 96, ds_config={"tensor_parallel": {"autotp_size": 1}}), 96),
        (saved(4, 96, ds_config={"tensor_parallel": None}), 96),
        (saved(4, 96, None, ds_config=AUTOTP), 96),
        (saved(4, 48, **{POSITION_KEY: {"samples_consumed": 40}}), 40),
        (saved(4, 48, **{POSITION_KEY: {"samples_consumed": "many"}}), 48),
        (saved(4, 48, **{POSITION_KEY: None}), 48),
    ],
)
def test_samples_are_those_that_the_checkpoint_counts(state: TrainingState, expected: int | None) -> None:
    assert samples_consumed(state) == expected


def test_a_batch_that_was_ramped_up_is_warned_of() -> None:
    assert warn_of_data(saved(4, 48)) == warn_of_data(saved(4, None)) == warn_of_data(saved(4, 48, None)) == ()
    assert warn_of_data(saved(4, 96, ds_config=AUTOTP)) == ()
    (warning,) = warn_of_data(saved(4, 60))
    assert warning.startswith("the saved run's 4 steps used 60 samples, not 12 each as in its config")
    (warning,) = warn_of_data(saved(4, 48, data_sampler={"consumed_samples": 72}))
    assert "after 72 samples that its loader had fetched, 48 of them trained on" in warning


def live(**others: Any) -> Any:
    """An engine of two data-parallel ranks: micro-batch 3, four of them a step, 17 micro-batches done."""
    counters = {"global_samples": 96, "micro_steps": 17, "_is_gradient_accumulation_boundary": None, **others}
    sizes = {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 3, "train_batch_size": 24}
    return SimpleNamespace(**{key: lambda size=size: size for key, size in sizes.items()}, **counters)


def test_micro_batches_in_flight_are_those_since_the_last_step() -> None:
    assert vars(trained(live(), 2)) == {"samples": 96, "micro_batch": 6, "in_flight": 1, "micro_batches": 4}
    assert trained(live(_is_gradient_accumulation_boundary=True), 2).in_flight == 0, (
        "Accelerate's micro_steps are steps"
    )
    assert trained(live(_unmanaged_backward_count=3, micro_steps=4), 2).in_flight == 3
    assert trained(live(global_samples=96), 1).samples == 48, "AutoTP's ranks are counted twice"

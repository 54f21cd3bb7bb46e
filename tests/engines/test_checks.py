"""Batch sizes of the saved run against those of the live one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.engines.training_state import compare_batches
from elastic_ckpt.errors import MismatchError

SAVED = BatchSizes(16, 2, 4)


def engine_of(sizes: BatchSizes) -> Any:
    return SimpleNamespace(
        train_batch_size=lambda: 2 * (sizes.global_batch or 0),  # with AutoTP, over its ranks too
        train_micro_batch_size_per_gpu=lambda: sizes.micro_batch,
        gradient_accumulation_steps=lambda: sizes.accumulation_steps,
    )


@pytest.mark.parametrize("refuse", [True, False])
@pytest.mark.parametrize(
    "saved",
    [
        SAVED,
        BatchSizes(16, 1, 4),
        BatchSizes(16, None, None),
        BatchSizes(None, None, 4),
        BatchSizes(None, None, None),
        BatchSizes(None, 8, None),
    ],
)
def test_sizes_that_are_the_same_or_not_known_are_no_change(saved: BatchSizes, refuse: bool) -> None:
    """The micro batch of a rank may change: with other ranks it has to."""
    assert compare_batches(engine_of(SAVED), 2, saved, refuse) == ()


CHANGES = [
    pytest.param(BatchSizes(32, 4, 4), ["global batch: 32 -> 16 samples"], id="global batch"),
    pytest.param(
        BatchSizes(16, 1, 8), ["gradient_accumulation_steps: 8 -> 4", "micro-batch: 1 -> 2"], id="accumulation steps"
    ),
    pytest.param(BatchSizes(64, 8, 1), ["64 -> 16", "steps: 1 -> 4", "micro-batch: 8 -> 2"], id="both"),
    pytest.param(BatchSizes(32, None, None), ["32 -> 16"], id="global batch alone"),
    pytest.param(BatchSizes(None, 2, 2), ["steps: 2 -> 4, micro-batch: 2 -> 2"], id="accumulation steps alone"),
]


@pytest.mark.parametrize(("saved", "said"), CHANGES)
def test_a_change_is_a_warning_with_both_sizes(saved: BatchSizes, said: list[str]) -> None:
    warnings = compare_batches(engine_of(SAVED), 2, saved, refuse=False)
    differ = (saved.global_batch not in (None, 16)) + (saved.accumulation_steps not in (None, 4))
    assert len(warnings) == differ
    assert all(words in " | ".join(warnings) for words in said)


@pytest.mark.parametrize(("saved", "said"), CHANGES)
def test_a_change_is_an_error_where_wanted_with_all_sizes_and_the_way_out(saved: BatchSizes, said: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        compare_batches(engine_of(SAVED), 2, saved, refuse=True)
    assert all(words in caught.value.problem for words in said)
    assert f'"train_batch_size": {saved.global_batch},' in str(caught.value.expected)
    assert '"train_batch_size": 16,' in str(caught.value.found)
    assert '"gradient_accumulation_steps": 4 in' in str(caught.value.found)
    assert '"on_change": "warn"' in str(caught.value.remedy)

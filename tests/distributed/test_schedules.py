"""Batch-size ramp-up and random-LTD go on at another number of ranks, or the report says what does not."""

from __future__ import annotations

from itertools import chain
from typing import Any

from elastic_ckpt.data import ElasticSampler
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.data_jobs import LENGTH
from tests.distributed.unchanged_configurations import RANDOM_LTD

#: Of 6 samples, and from step 2 on of 12: global batch, and micro-batches until the next one.
RAMPED_UP = {"micro": 3, "batches": [(6, 2), (12, 4)]}
GOES_ON = {"micro": 2, "batches": [(12, 2)]}


def saved(stage: int) -> Save:
    """By three ranks that have gone on from what two had saved."""
    two = Save(stage, 2, "schedule_jobs.run", RAMPED_UP)
    return Save(stage, 3, "schedule_jobs.run", GOES_ON, source=two)


BOTH = [Cell(f"ZeRO-{stage}", saved(stage), "noted", 1) for stage in (1, 3)]


def tokens(step: int) -> int:
    """Layer tokens of one step, by DeepSpeed's fixed linear schedule; its batch is that of the config."""
    of = RANDOM_LTD["random_ltd_schedule"]
    low, high, steps = of["min_value"], of["max_value"], of["schedule_config"]["require_steps"]
    length = low + step * (high - low) // steps
    return 6 * (length - length % of["schedule_config"]["seq_per_step"] + high)


@cells(BOTH)
def test_random_ltd_goes_on(cell: Cell, facts: list[Any]) -> None:
    first, second = facts
    assert first.at_end["consumed_layer_tokens"] == sum(map(tokens, range(4)))
    same = first.at_end.keys() - {"batch"}
    assert {key: second.at_start[key] for key in same} == {key: first.at_end[key] for key in same}
    assert second.at_end["consumed_layer_tokens"] == sum(map(tokens, range(5)))
    assert first.at_end["current_value"] < second.at_end["current_value"]


@cells(BOTH)
def test_a_batch_that_was_ramped_up_is_told_and_its_samples_are_counted(cell: Cell, facts: list[Any]) -> None:
    first, second = facts
    assert (first.at_end["batch"], second.at_start["batch"]) == (12, 6)
    text = "the saved run's 4 steps used 36 samples, not 6 each as in its config: a batch that set_train_batch_size"
    assert sum(text in warning for warning in second.report.notes) == 1
    assert second.report.samples_consumed == 36
    assert (second.at_end["global_steps"], second.at_end["global_samples"]) == (5, 48)
    assert [*chain(*first.order, *second.order)] == ElasticSampler(LENGTH, seed=5).order(0).tolist()[:48]

"""Batch-size ramp-up and random-LTD go on at another number of ranks, or the report says what does not."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from elastic_ckpt.data import ElasticSampler
from tests.distributed.conftest import Launch
from tests.distributed.data_jobs import LENGTH
from tests.distributed.unchanged_configurations import RANDOM_LTD

STAGES = [1, 3]
#: Ranks, micro-batch, then (global batch, micro-batches until the next one): of 6 samples, and from step 2 on of 12.
JOBS = [(2, 3, [(6, 2), (12, 4)]), (3, 2, [(12, 2)])]


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By ZeRO stage, what rank 0 of each job has found."""
    folder, facts = tmp_path_factory.mktemp("schedules"), {stage: [] for stage in STAGES}
    for number, (ranks, micro, batches) in enumerate(JOBS):
        cases = [
            {
                "stage": stage,
                "micro": micro,
                "batches": batches,
                "loads": number > 0,
                "folder": str(folder / f"{stage}"),
            }
            for stage in STAGES
        ]
        for each in launch(ranks, "schedule_jobs.run", cases)[: len(cases)]:
            facts[each.case["stage"]].append(each)
    return facts


def tokens(step: int) -> int:
    """Layer tokens of one step, by DeepSpeed's fixed linear schedule; its batch is that of the config."""
    of = RANDOM_LTD["random_ltd_schedule"]
    low, high, steps = of["min_value"], of["max_value"], of["schedule_config"]["require_steps"]
    length = low + step * (high - low) // steps
    return 6 * (length - length % of["schedule_config"]["seq_per_step"] + high)


@pytest.mark.parametrize("stage", STAGES)
def test_random_ltd_goes_on(stage: int, found: dict[int, list[Any]]) -> None:
    first, second = found[stage]
    assert first.at_end["consumed_layer_tokens"] == sum(map(tokens, range(4)))
    same = first.at_end.keys() - {"batch"}
    assert {key: second.at_start[key] for key in same} == {key: first.at_end[key] for key in same}
    assert second.at_end["consumed_layer_tokens"] == sum(map(tokens, range(5)))
    assert first.at_end["current_value"] < second.at_end["current_value"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_was_ramped_up_is_told_and_its_samples_are_counted(
    stage: int, found: dict[int, list[Any]]
) -> None:
    first, second = found[stage]
    assert (first.at_end["batch"], second.at_start["batch"]) == (12, 6)
    text = "the saved run's 4 steps used 36 samples, not 6 each as in its config: a batch that set_train_batch_size"
    assert sum(text in warning for warning in second.report.notes) == 1
    assert second.report.samples_consumed == 36
    assert (second.at_end["global_steps"], second.at_end["global_samples"]) == (5, 48)
    assert [*chain(*first.order, *second.order)] == ElasticSampler(LENGTH, seed=5).order(0).tolist()[:48]

"""A registered sampler goes on with the next sample on any number of ranks, in the midst of an epoch."""

# Covers elastic_ckpt/load/data_position.py, which the hook calls.

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from elastic_ckpt.data import ElasticSampler
from tests.distributed.conftest import Launch
from tests.distributed.data_jobs import LENGTH

KINDS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"kind": "sampler", "stage": 1, "workers": 2, "registers_late": False},
    "ZeRO-3": {"kind": "sampler", "stage": 3, "workers": 0, "registers_late": True},
    "stream": {"kind": "stream", "stage": 1, "workers": 2, "registers_late": False},
    "pipeline": {"kind": "pipeline", "stage": 1, "workers": 0, "registers_late": True},
}
#: Ranks, micro-batch, micro-batches in a step, micro-batches until the save: 12 samples, 24, and on into other epochs.
JOBS = [(2, 3, 1, 2), (3, 2, 2, 4), (1, 4, 1, 18)]


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By kind, what rank 0 of each job has found."""
    folder, facts = tmp_path_factory.mktemp("data"), {}
    for ranks, micro, steps, micro_batches in JOBS:
        sizes = {"micro": micro, "steps": steps, "micro_batches": micro_batches}
        cases = [
            {**kind, **sizes, "folder": str(folder / name), "name": name}
            for name, kind in KINDS.items()
            if name != "pipeline" or ranks != 3
        ]
        for each in launch(ranks, "data_jobs.run", cases)[: len(cases)]:
            facts.setdefault(each.case["name"], []).append(each)
    return facts


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def whole(epochs: int) -> list[int]:
    sampler = ElasticSampler(LENGTH, seed=5)
    return [number for epoch in range(epochs) for number in sampler.order(epoch).tolist()]


@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-3"])
def test_samples_go_on_over_2_3_and_1_ranks(name: str, found: dict[str, list[Any]]) -> None:
    first, second, third = found[name]
    assert [each.consumed for each in (first, second, third)] == [12, 36, 104]
    # the epoch of 50 ends with a batch of two
    assert flat(first.order + second.order + third.order) == whole(3)[:104]
    assert [first.client, second.client, third.client] == [None, {"epoch": 3}, {"epoch": 3}]


@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-3"])
def test_the_report_says_where_the_data_goes_on(name: str, found: dict[str, list[Any]]) -> None:
    _, second, third = found[name]
    assert second.report.samples_consumed == 12 and second.report.batches_to_skip == 2
    assert third.report.samples_consumed == 36 and third.report.batches_to_skip == 9
    is_late = KINDS[name]["registers_late"]
    expected = "to skip: 9 batches of each rank's loader" if is_late else "the registered sampler continues there"
    assert f"36 samples consumed; {expected}" in " ".join(str(third.report).split())


def test_documents_go_on_where_packs_of_them_ended(found: dict[str, list[Any]]) -> None:
    samples = chain.from_iterable(each.order for each in found["stream"])
    assert flat(samples) == [3 * (place // 2) + 2 * (place % 2) for place in range(12 + 24 + 72)]
    assert [(each.consumed, each.documents) for each in found["stream"]] == [(12, 18), (36, 54), (108, 162)]


def test_a_pipelines_samples_go_on_with_fewer_stages(found: dict[str, list[Any]]) -> None:
    first, last = found["pipeline"]
    assert (first.consumed, last.consumed) == (6, 78)
    assert flat(first.order + last.order) == whole(2)[:78]


@pytest.fixture(scope="module")
def own(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return launch(2, "data_jobs.by_own_loader", str(tmp_path_factory.mktemp("own") / "run"))


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_deepspeeds_own_loader_takes_the_position_back(mode: str, own: list[Any]) -> None:
    for rank in own:
        found = getattr(rank, f"{mode}_5")
        assert (found.error, found.report, found.client) == (None, None, {"epoch": 3})
        assert found.is_saved and found.consumed == 14


def test_weights_alone_leave_the_position_as_it_is(own: list[Any]) -> None:
    for rank in own:
        found = rank.auto_6_module
        assert (found.error, found.report, found.consumed) == (None, None, 0)
        assert found.is_saved


def test_other_data_are_refused_before_deepspeeds_own_loader_begins(own: list[Any]) -> None:
    for rank in own:
        found = rank.auto_6
        assert found.error.startswith("MismatchError: the data position is of other data, or of another order: seed")
        assert found.is_untouched and found.consumed == 0


def test_other_data_are_told_after_a_load_that_elastic_ckpt_was_not_to_look_at(own: list[Any]) -> None:
    for rank in own:
        found = rank.off_6
        assert found.error.startswith("PartialLoadError: the data position is of other data")
        assert found.is_saved and found.consumed == 0

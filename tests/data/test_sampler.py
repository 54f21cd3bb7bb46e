"""Each sample once an epoch, in one order, over changes of ranks, batch, workers and accumulation; nothing prefetched counts."""

# Covers elastic_ckpt/data/position.py, which samplers keep.

from __future__ import annotations

import logging
from collections.abc import Iterable
from decimal import Decimal
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_ckpt.data import ElasticSampler, Trained
from elastic_ckpt.errors import ConfigError, MismatchError
from tests.data.engine_counters import Counting


class Job:
    """All ranks of a job with a data loader each."""

    def __init__(self, length: int, ranks: int, batch: int, accumulation: int = 1, **options: Any) -> None:
        loading = {key: options.pop(key) for key in ("num_workers", "persistent_workers") if key in options}
        dropping = options.pop("loader_drops", False)
        self.engine = Counting(ranks, batch, accumulation)
        self.samplers = [ElasticSampler(length, seed=5, **options) for _ in range(ranks)]
        self.loaders = []
        for rank, sampler in enumerate(self.samplers):
            sampler.bind(self.engine, (ranks, rank))
            self.loaders.append(DataLoader(range(length), batch, sampler=sampler, drop_last=dropping, **loading))

    def load(self, state: dict[str, Any]) -> None:
        for sampler in self.samplers:
            sampler.load_state_dict(state)

    def train(self, micro_batches: int) -> list[list[int]]:
        """Samples of each micro-batch, in their global order, over as many epochs as it takes."""
        trained: list[list[int]] = []
        while len(trained) < micro_batches:
            before = len(trained)
            for batches in islice(zip(*self.loaders, strict=True), micro_batches - before):
                parts = [batch.tolist() for batch in batches]
                trained.append([part[place] for place in range(len(parts[0])) for part in parts])
                self.engine.train()
        return trained

    @property
    def state(self) -> dict[str, Any]:
        (state, *others) = [sampler.state_dict() for sampler in self.samplers]
        assert others == [state] * len(others)
        return state


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def whole(length: int, epochs: int, **options: Any) -> list[int]:
    sampler = ElasticSampler(length, seed=5, **options)
    return [index for epoch in range(epochs) for index in sampler.order(epoch).tolist()]


@given(
    length=st.integers(1, 40),
    jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_samples_come_once_an_epoch_in_one_order_whatever_ranks_and_batches(
    length: int, jobs: list[tuple[int, int, int]], shuffle: bool
) -> None:
    """Micro-batches of all jobs, one after the other, are the epochs' orders; an epoch's last one repeats some of it."""
    state, trained = ElasticSampler(length, seed=5, shuffle=shuffle).state_dict(), []
    for ranks, batch, micro_batches in jobs:
        job = Job(length, ranks, batch, shuffle=shuffle)
        job.load(state)
        position = state["samples_consumed"]
        for samples in job.train(micro_batches):
            left = length - position % length
            trained += samples[:left]
            assert all(sample in whole(length, position // length + 1, shuffle=shuffle)[-length:] for sample in samples)
            position += min(len(samples), left)
        state = job.state
        assert state["samples_consumed"] == position == len(trained)
    assert trained == whole(length, len(trained) // length + 1, shuffle=shuffle)[: len(trained)]


@given(
    length=st.integers(5, 40),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 3),
    count=st.integers(1, 30),
    rest=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_what_is_dropped_is_not_trained_on_and_the_next_epoch_is_whole(
    length: int, ranks: int, batch: int, count: int, rest: bool
) -> None:
    """Dropped by the sampler (what does not divide by the ranks), or by the loader too (less than a batch)."""
    per_epoch = length // (ranks * batch) if rest else -(-(length // ranks) // batch)
    job = Job(length, ranks, batch, drop_last=True, loader_drops=rest)
    if not per_epoch:
        return
    trained = job.train(count)
    for number, samples in enumerate(trained):
        epoch, place = divmod(number, per_epoch)
        order = whole(length, epoch + 1)[-length:]
        assert samples == order[place * ranks * batch : (place + 1) * ranks * batch][: len(samples)]
    assert job.state["samples_consumed"] <= -(-count // per_epoch) * length


def test_what_workers_prefetched_is_not_consumed() -> None:
    job = Job(60, 2, 3, num_workers=2, persistent_workers=True)
    trained = job.train(4)
    assert job.state["samples_consumed"] == 24
    after = Job(60, 3, 2, num_workers=1)
    after.load(job.state)
    again = job.train(1)  # the same job goes on, with other iterators of the same workers
    trained += after.train(7)
    assert again[0] == trained[4] and flat(trained) == whole(60, 2)[: len(flat(trained))]


def test_micro_batches_of_a_half_done_step_come_again() -> None:
    job = Job(40, 1, 2, accumulation=4)
    job.train(7)  # one step, and three micro-batches of the next
    assert job.state["samples_consumed"] == 8
    after = Job(40, 1, 8)
    after.load(job.state)
    assert after.train(1)[0] == whole(40, 1)[8:16]


def test_a_step_that_begins_in_one_epoch_ends_in_the_next() -> None:
    job = Job(10, 1, 2, accumulation=4)
    trained = flat(job.train(9))
    assert trained == whole(10, 2)[:18]
    assert job.state["samples_consumed"] == 16
    half = Job(10, 1, 2, accumulation=4)
    half.train(6)  # the step that is not done yet began in the epoch before
    assert half.state["samples_consumed"] == 8
    after = Job(10, 2, 1)
    after.load(half.state)
    assert flat(after.train(4)) == whole(10, 2)[8:16]


def test_a_pipelines_step_fetches_on_in_the_next_epoch() -> None:
    """``train_batch`` counts nothing until it ends."""
    engine = Counting(1, 2, 3)
    sampler = ElasticSampler(10, seed=5)
    sampler.bind(lambda: Trained(engine.samples, 2, None, 3), (1, 0))
    loader, fetched = DataLoader(range(10), 2, sampler=sampler), []
    batches = iter(loader)
    for _ in range(4):
        for _ in range(3):
            try:
                fetched += next(batches).tolist()
            except StopIteration:
                batches = iter(loader)
                fetched += next(batches).tolist()
        engine.samples += 6
        assert sampler.samples_consumed == len(fetched)
    assert fetched == whole(10, 3)[:24]


def test_an_epoch_that_is_left_early_goes_on() -> None:
    job = Job(30, 1, 2)
    first = job.train(3)
    assert first + job.train(2) == [whole(30, 1)[place : place + 2] for place in range(0, 10, 2)]


def test_a_loader_of_other_batches_than_the_engines_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine, sampler = Counting(1, 2), ElasticSampler(12)
    sampler.bind(engine, (1, 0))
    for _ in DataLoader(range(12), 4, sampler=sampler):  # the engine counts two samples of each batch
        engine.train()
    with caplog.at_level(logging.WARNING):
        next(iter(sampler))
    assert "set the loader's batch_size to the config's train_micro_batch_size_per_gpu" in caplog.text


def test_an_iterator_from_before_the_load_is_refused() -> None:
    job = Job(30, 1, 2)
    batches = iter(job.loaders[0])
    next(batches)
    job.load({"samples_consumed": 8})
    with pytest.raises(MismatchError, match="older than the position that was loaded"):
        next(batches)
    assert next(iter(job.loaders[0])).tolist() == whole(30, 1)[8:10]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"length": 12}, "'length': 12"),
        ({"seed": 1}, "'seed': 1"),
        ({"samples_consumed": -1}, "-1"),
        ({"samples_consumed": "4"}, "'4'"),
    ],
)
def test_a_position_in_other_data_is_refused(state: dict[str, Any], message: str) -> None:
    sampler = ElasticSampler(10)
    with pytest.raises(MismatchError, match=message):
        sampler.load_state_dict({**ElasticSampler(10).state_dict(), "samples_consumed": 4, **state})
    assert sampler.samples_consumed == 0
    sampler.load_state_dict({"samples_consumed": 8})  # also one that is behind
    with pytest.raises(MismatchError, match=message):
        sampler.load_state_dict({**ElasticSampler(10).state_dict(), "samples_consumed": 4, **state})
    assert sampler.samples_consumed == 8


def test_a_position_in_other_data_counts_where_the_script_has_said_so() -> None:
    sampler, saved = ElasticSampler(12), {**ElasticSampler(10).state_dict(), "samples_consumed": 4}
    sampler.load_state_dict({"samples_consumed": 4})
    sampler.load_state_dict(saved)
    assert sampler.samples_consumed == 4


def test_without_an_engine_it_counts_epochs() -> None:
    sampler = ElasticSampler(5, seed=5, num_replicas=1, rank=0)
    assert [*sampler, *sampler] == whole(5, 2)
    with pytest.raises(ValueError, match="give both"):
        ElasticSampler(5, num_replicas=2)
    with pytest.raises(ValueError, match="0 samples"):
        ElasticSampler(range(0))


def test_ranks_that_share_samples_have_to_be_known() -> None:
    """Those of sequence parallelism are not adjacent."""
    sampler = ElasticSampler(5)
    with pytest.raises(ConfigError, match="which ranks share their samples") as caught:
        sampler.bind(lambda: Trained(0, 2, None, 3), None)
    assert "num_replicas and rank" in str(caught.value)
    ElasticSampler(5, num_replicas=2, rank=1).bind(lambda: Trained(0, 2, None, 3), None)


def test_a_stateful_data_loader_saves_what_it_gave() -> None:
    """Its own state holds at another number of ranks, and goes with a registered sampler's: nothing is skipped twice."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        job = Job(40, 2, 2)
        loaders = [
            stateful.StatefulDataLoader(range(40), 2, sampler=each, num_workers=workers) for each in job.samplers
        ]
        iterators = [iter(each) for each in loaders]
        for _ in range(3):
            [next(each) for each in iterators]
            job.engine.train()
        after = Job(40, 1, 4)
        after.load(job.state)
        loader = stateful.StatefulDataLoader(range(40), 4, sampler=after.samplers[0], num_workers=workers)
        assert next(iter(loader)).tolist() == whole(40, 1)[12:16]
        same = Job(40, 2, 2)
        same.load(job.state)
        loader = stateful.StatefulDataLoader(range(40), 2, sampler=same.samplers[0], num_workers=workers)
        loader.load_state_dict(loaders[0].state_dict())
        assert next(iter(loader)).tolist() == whole(40, 1)[12:16:2]
        del iterators


def test_the_order_is_that_of_torch() -> None:
    """So that it is the same in every process, and whoever has the seed can tell it."""
    expected = torch.randperm(9, generator=torch.Generator().manual_seed(5 + 2)).tolist()
    assert ElasticSampler(9, seed=5).order(2).tolist() == expected


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2), np.zeros(2), Decimal("sNaN"), 1 << 20_000, [7], {}],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("key", ["length", "seed", "shuffle"])
def test_facts_of_a_position_that_cannot_be_compared_are_refused(key: str, value: object) -> None:
    sampler = ElasticSampler(8)
    with pytest.raises(MismatchError, match="is not a data position") as raised:
        sampler.load_state_dict({"samples_consumed": 5, key: value})
    assert raised.value.parameter == key

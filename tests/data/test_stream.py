"""Documents go on at any number of ranks and workers, packed or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_ckpt.data import ElasticStream
from elastic_ckpt.errors import MismatchError
from tests.data.engine_counters import Counting
from tests.distributed.malformed import VALUES


def in_pairs(documents: Iterator[int]) -> Iterator[tuple[list[int], int]]:
    """Samples of two documents."""
    for first in documents:
        yield [first, *islice(documents, 1)], 2


@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4),
    is_packed=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_documents_come_once_whatever_ranks_and_batches(jobs: list[tuple[int, int, int]], is_packed: bool) -> None:
    state, trained = ElasticStream([]).state_dict(), []
    for ranks, batch, micro_batches in jobs:
        engine, loaders, streams = Counting(ranks, batch), [], []
        for rank in range(ranks):
            stream = ElasticStream(lambda first: range(first, 200), pack=in_pairs if is_packed else None)
            stream.bind(engine, (ranks, rank))
            stream.load_state_dict(state)
            streams.append(stream)
            loaders.append(DataLoader(stream, batch, collate_fn=list))
        for batches in islice(zip(*loaders, strict=True), micro_batches):
            trained += [batches[rank][place] for place in range(batch) for rank in range(ranks)]
            engine.train()
        state = streams[0].state_dict()
        documents = [*chain.from_iterable(trained)] if is_packed else trained
        assert documents == list(range(state["documents_consumed"])) and state["samples_consumed"] == len(trained)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_take_turns_and_what_they_prefetch_is_not_consumed(context: str) -> None:
    engine, stream = Counting(2, 3), ElasticStream(range(100))
    stream.bind(engine, (2, 1))
    loader = iter(DataLoader(stream, 3, num_workers=2, multiprocessing_context=context))
    for step in range(3):
        assert next(loader).tolist() == [6 * step + place for place in (1, 3, 5)]
        engine.train()
    assert stream.state_dict() == {"samples_consumed": 18, "documents_consumed": 18}
    del loader
    assert next(iter(DataLoader(stream, 3))).tolist() == [19, 21, 23], "the same job goes on"


def test_a_last_micro_batch_is_whole_or_left_out() -> None:
    streams = [ElasticStream(range(11), batch_size=2, num_replicas=2, rank=rank) for rank in range(2)]
    assert [[*stream] for stream in streams] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_positions_that_cannot_be_are_refused() -> None:
    engine, stream = Counting(1, 1), ElasticStream(range(9))
    stream.bind(engine, (1, 0))
    engine.train()
    with pytest.raises(MismatchError, match="is not known"):
        stream.state_dict()  # nothing was read
    with pytest.raises(MismatchError, match="documents_consumed"):
        stream.load_state_dict({"samples_consumed": 3})
    stream.load_state_dict({"samples_consumed": 4, "documents_consumed": 4})
    samples = iter(stream)
    assert next(samples) == 4
    stream.load_state_dict({"samples_consumed": 0, "documents_consumed": 0})
    engine.train()
    with pytest.raises(MismatchError, match="older than the position"):
        next(samples)


@pytest.mark.parametrize("entry", ["samples_consumed", "documents_consumed"])
@pytest.mark.parametrize("name", [*VALUES, "1 << 62"])
def test_what_is_no_count_is_no_position(entry: str, name: str) -> None:
    value = {**VALUES, "1 << 62": 1 << 62}[name]
    stream = ElasticStream(range(9))
    stream.load_state_dict({"samples_consumed": 4, "documents_consumed": 4})
    state = {**stream.state_dict(), entry: value}
    if type(value) is int and 0 <= value < 1 << 62:
        stream.check(state)
        return
    with pytest.raises(MismatchError) as caught:
        stream.check(state)
    assert caught.value.parameter == entry and "an integer from 0 to" in str(caught.value.expected)
    assert [remedy.arguments for remedy in caught.value.remedies][-1] == {"load_module_only": True}


@pytest.mark.parametrize("state", [None, 7, "x", [], {}, [("samples_consumed", 4)]], ids=repr)
def test_what_is_no_dictionary_is_no_position(state: Any) -> None:
    with pytest.raises(MismatchError, match="not a data position"):
        ElasticStream(range(9)).load_state_dict(state)


@pytest.mark.parametrize("samples", [0, 24, 25, (1 << 62) - 1])
@pytest.mark.parametrize("documents", [0, 24, 24 << 16, (24 << 16) + 1, (1 << 62) - 1])
def test_no_more_documents_are_skipped_than_the_counters_show(samples: int, documents: int) -> None:
    state = {"samples_consumed": samples, "documents_consumed": documents}
    stream = ElasticStream(iter(range(1 << 62)))
    if samples <= 24 and documents <= samples << 16:
        stream.refuse_uncounted(state, 24)
    else:
        with pytest.raises(MismatchError, match="skipped one by one") as caught:
            stream.refuse_uncounted(state, 24)
        assert str(state).replace("'", '"') in str(caught.value)
    stream.load_state_dict(state)  # as the error has it
    stream.refuse_uncounted(state, 24)
    ElasticStream(lambda first: range(first, first + 9)).refuse_uncounted(state, 24)  # skips nothing

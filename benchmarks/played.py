"""A job of many ranks in one process: first all as threads, then one alone, with the messages of the others."""

from __future__ import annotations

import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from elastic_ckpt import distributed

T = TypeVar("T")
_TIMEOUT_S = 600.0


def in_turn(count: int) -> list[int]:
    """The owners of so many files that all ranks see."""
    return [position % distributed.world_size() for position in range(count)]


@dataclass(frozen=True)
class _Broadcast:
    """The work of a collective to which one rank contributes."""

    do: Callable[[], Any]

    def __call__(self) -> Any:
        return self.do()


@dataclass
class PlayedJob:
    """Collectives of ``ranks`` ranks; ``rounds`` has what each rank sent, collective by collective.

    Attributes:
        doings: names of the rounds.
        broadcasts: numbers of the rounds to which one rank contributes.
        share_s: CPU seconds of the work for the first message to which all ranks contribute, their shares of the files,
            when rank 0 is played alone.
        traced_nbytes: memory allocated from then on, at most, if ``tracemalloc`` is to count it.
    """

    ranks: int
    rounds: list[list[bytes]] = field(default_factory=list)
    doings: list[str] = field(default_factory=list)
    broadcasts: set[int] = field(default_factory=set)
    share_s: float = 0.0
    traced_nbytes: int = 0

    def run_all(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank, remember what each sends, and return the results by rank.

        Ranks get the same received objects, which they must not change.
        """
        here, barrier = threading.local(), threading.Barrier(self.ranks)
        results: dict[int, T] = {}
        received: dict[int, list[T]] = {}
        failures: list[Exception] = []
        lock = threading.Lock()

        def all_gather(doing: str, do: Callable[[], T]) -> list[T]:
            message = pickle.dumps(do())
            with lock:
                if len(self.rounds) == here.round:
                    self.rounds.append([b""] * self.ranks)
                    self.doings.append(doing)
                self.rounds[here.round][here.rank] = message
                if isinstance(do, _Broadcast):
                    self.broadcasts.add(here.round)
            if barrier.wait(_TIMEOUT_S) == 0:
                received[here.round] = [pickle.loads(sent) for sent in self.rounds[here.round]]
            barrier.wait(_TIMEOUT_S)
            here.round += 1
            return received[here.round - 1]

        def of_rank(rank: int) -> None:
            here.rank, here.round = rank, 0
            try:
                results[rank] = work()
            except Exception as error:  # reaches the caller below
                failures.append(error)
                barrier.abort()

        with self._patched(lambda: here.rank, all_gather):
            threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise next((each for each in failures if not isinstance(each, threading.BrokenBarrierError)), failures[0])
        return [results[rank] for rank in range(self.ranks)]

    def run_first(self, work: Callable[[], T], trace: bool = False) -> T:
        """Run ``work`` on rank 0 alone, which receives what the others sent."""
        rounds = iter(self.rounds)
        first = True

        def all_gather(doing: str, do: Callable[[], Any]) -> list[Any]:
            nonlocal first
            begin = time.process_time()
            mine = pickle.dumps(do())
            if first and not isinstance(do, _Broadcast):
                self.share_s, first = time.process_time() - begin, False
                if trace:
                    tracemalloc.start()
            return [pickle.loads(sent) for sent in [mine, *next(rounds)[1:]]]

        with self._patched(lambda: 0, all_gather):
            try:
                return work()
            finally:
                if trace:
                    self.traced_nbytes = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()

    @property
    def cost(self) -> tuple[int, int]:
        """Collectives of ``torch.distributed``, and bytes that each rank receives in them, padding included."""
        collectives = nbytes = 0
        inline = distributed.inline_nbytes(self.ranks)
        for number, sent in enumerate(self.rounds):
            messages = [max(sent, key=len)] if number in self.broadcasts else sent
            rests = [max(len(message) - inline, 0) for message in messages]
            common = distributed.common_nbytes(rests)
            longer = [rest - common for rest in rests if rest > common]
            collectives += 1 + (common > 0) + len(longer)
            nbytes += len(messages) * (inline + distributed.LENGTH_NBYTES + common) + sum(longer)
        return collectives, nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that rank 0 sent."""
        return sum(len(sent[0]) for sent in self.rounds)

    @property
    def received_nbytes(self) -> int:
        """Bytes that every rank received, its own included."""
        return sum(len(message) for sent in self.rounds for message in sent)

    @contextmanager
    def _patched(self, rank: Callable[[], int], all_gather: Callable[..., Any]) -> Iterator[None]:
        def broadcast(doing: str, do: Callable[[], Any], src: int = 0) -> Any:
            return distributed.all_gather(doing, _Broadcast(lambda: do() if rank() == src else None))[src]

        with (
            mock.patch.object(distributed, "rank", rank),
            mock.patch.object(distributed, "world_size", lambda: self.ranks),
            mock.patch.object(distributed, "all_gather", all_gather),
            mock.patch.object(distributed, "broadcast", broadcast),
        ):
            yield

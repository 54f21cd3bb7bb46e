"""A distributed sampler whose position is one number, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.data.position import DataPosition, _Anchor

logger = logger_of(__name__)


class ElasticSampler(DataPosition, Sampler[int]):
    """Samples of an epoch in one global order, which the ranks take in turn.

    A micro-batch of all ranks is a range of that order, whatever the number of ranks and the batch size, so that a job
    of other ranks continues with the next sample. An epoch that is resumed in the middle yields the rest; its ``len``
    is that of a whole epoch. ``set_epoch`` is not needed, and does nothing: epochs follow from the position.

    Args:
        dataset: a dataset, or its length.
        seed, shuffle: of the order, another one in each epoch.
        drop_last: leave out what does not divide by the ranks, rather than repeat samples of the epoch.
        num_replicas, rank: data-parallel ranks; by default those of the engine that it is registered with. Give 1 and
            0 where something else divides the batches between ranks, as Accelerate's ``prepare`` does.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank)
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 1:
            raise ValueError(f"a dataset of {self.length} samples")
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.is_drained = False  # the last iterator has given all of its epoch

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.share(self.length)

    def __iter__(self) -> Iterator[int]:
        return _Indices(self, self.begin())

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: which epoch it is follows from the position."""

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of an epoch, in their global order."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def facts(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def share(self, samples: int) -> int:
        """How many of the next samples of an epoch each rank gets."""
        ranks, _ = self.replicas
        return samples // ranks if self.drop_last else -(-samples // ranks)

    def end_of_epoch(self, position: int) -> int:
        """The position at which the next epoch begins."""
        return (position // self.length + 1) * self.length

    def position_at(self, trained: int) -> int:
        """At most the end of the epoch: the next one begins with an iterator."""
        return min(super().position_at(trained), self.end_of_epoch(self._anchor(trained).consumed))

    def move_to(self, consumed: int) -> None:
        super().move_to(consumed)
        self.is_drained = False

    def begin(self) -> int:
        """The position of a new iterator: the next sample after those trained on, those of a half done step included.

        After an iterator that has given everything it is the next epoch, even if the last samples were in flight, or
        were dropped by the loader (``drop_last``).
        """
        trained = self._trained()
        latest = self._anchors[-1]
        in_flight = (trained.in_flight or 0) * trained.micro_batch
        position = self.position_at(trained.samples + in_flight)
        end = self.end_of_epoch(latest.consumed)
        left = end - position
        if self.is_drained and left > 0:
            of_step = trained.in_flight is None
            if of_step:  # within a step, which goes on in the next epoch; its micro-batches are full
                per_rank = trained.micro_batch // max(self.replicas[0], 1)
                in_flight = self.share(left) // per_rank * trained.micro_batch
            if self._count is None or left < trained.micro_batch * (trained.micro_batches if of_step else 1):
                position = end
            else:
                in_flight = 0
                logger.warning(
                    "elastic_ckpt: a loader has given all samples of an epoch, but the engine counts %d samples fewer, "
                    "and its count is used. That is right if you left the epoch early. If you did not, set the "
                    "loader's batch_size to the config's train_micro_batch_size_per_gpu. With Accelerate, prepare() "
                    "needs num_replicas=1, rank=0",
                    left,
                )
        if not self.share(self.end_of_epoch(position) - position):
            position = self.end_of_epoch(position)
        self._anchors = [*self._anchors[-1:], _Anchor(position, trained.samples + in_flight)]
        self.is_drained = False
        return position


class _Indices(Iterator[int]):
    """This rank's indices from a position to the end of its epoch.

    Its state is what a ``StatefulDataLoader`` saves: the position after those given, whatever the number of ranks.
    """

    def __init__(self, sampler: ElasticSampler, position: int) -> None:
        self._sampler = sampler
        self._start(position)

    def _start(self, position: int) -> None:
        sampler = self._sampler
        epoch, offset = divmod(position, sampler.length)
        self._position = position
        self.loads = sampler.loads
        self._given = 0
        self._ranks, rank = sampler.replicas
        order = sampler.order(epoch)
        count = sampler.share(sampler.length - offset)
        places = torch.arange(count) * self._ranks + offset + rank
        self._indices: list[int] = order[places % sampler.length].tolist()  # beyond the end: from its beginning

    def __next__(self) -> int:
        self._sampler.refuse_if_older(self.loads)
        if self._given == len(self._indices):
            self._sampler.is_drained = True
            raise StopIteration
        self._given += 1
        return self._indices[self._given - 1]

    def state_dict(self) -> dict[str, Any]:
        given = min(self._position + self._given * self._ranks, self._sampler.end_of_epoch(self._position))
        return {"samples_consumed": given, **self._sampler.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._start(self._sampler.begin())

"""A stream of documents, packed or not, whose position is the documents that were used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastic_ckpt.data.position import SAMPLES, DataPosition, Trained, refuse_strange_count
from elastic_ckpt.errors import MismatchError, Remedy

#: Samples whose documents are remembered: more than loaders prefetch for all ranks.
_REMEMBERED = 1 << 16
#: Entry of a position: documents in the samples that optimizer steps have used.
_DOCUMENTS = "documents_consumed"
#: More documents than are packed into one sample.
_DOCUMENTS_OF_SAMPLE = 1 << 16


class ElasticStream(DataPosition, IterableDataset[Any]):
    """Samples of one or several documents each, in one global order, which ranks and workers take in turn.

    All ranks and workers read all documents and keep their own samples, so that packing does not depend on who packs.
    A load continues with the first document of the first sample that was not trained on. The stream is one pass: for
    several epochs, let ``documents`` continue. A last micro-batch that is not full on every rank is left out.

    Args:
        documents: returns all documents from a number on; or an iterable, whose first documents are skipped.
        pack: turns documents into pairs of a sample and the number of documents that end in it. A document of which a
            part is kept for the next sample begins again after a load.
        batch_size: samples in a micro-batch of a rank, as given to the loader; by default that of the engine.
        num_replicas, rank: as those of ``ElasticSampler``.
    """

    def __init__(
        self,
        documents: Callable[[int], Iterable[Any]] | Iterable[Any],
        *,
        pack: Callable[[Iterator[Any]], Iterable[tuple[Any, int]]] | None = None,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank)
        self._documents = documents
        self._pack = pack
        self._batch_size = batch_size
        #: By samples consumed, that number and the documents in them; workers write it.
        self._used = torch.zeros(_REMEMBERED, 2, dtype=torch.int64).share_memory_()

    @property
    def documents_consumed(self) -> int:
        """Documents in the samples that optimizer steps have used."""
        return self._documents_in(self.samples_consumed)

    def check(self, state: Any) -> None:
        super().check(state)
        refuse_strange_count(_DOCUMENTS, state.get(_DOCUMENTS))

    def refuse_uncounted(self, state: Mapping[str, Any], counted: int) -> None:
        """The documents of an iterable are skipped one by one, so a position alone must not say how many."""
        samples = state[SAMPLES]
        documents = state[_DOCUMENTS]
        is_counted = samples <= counted and documents <= samples * _DOCUMENTS_OF_SAMPLE
        is_here = samples == self.samples_consumed and self._remembered(samples) == (samples, documents)
        if callable(self._documents) or is_counted or is_here:
            return
        remedy = (
            Remedy("give the stream its documents as a function of the first one's number"),
            Remedy(
                "to skip so many, call the stream's load_state_dict("
                f'{{"{SAMPLES}": {samples}, "{_DOCUMENTS}": {documents}}}) before the load'
            ),
        )
        raise MismatchError(
            "the counters of the checkpoint do not show as many samples as its data position, whose documents would "
            "have to be skipped one by one",
            None,
            f"at most {counted} samples, of at most {_DOCUMENTS_OF_SAMPLE} documents each",
            f"{samples} samples of {documents} documents",
            parameter=_DOCUMENTS,
            remedy=remedy,
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _DOCUMENTS: self.documents_consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a document; the number of samples before it tells nothing where others are packed now."""
        super().load_state_dict(state)
        documents = state[_DOCUMENTS]
        samples = state[SAMPLES]
        self._used[samples % _REMEMBERED] = torch.tensor([samples, documents])

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: with the engine's count as it is now."""
        return {**self.__dict__, "_count": None if self._count is None else partial(Trained, **vars(self._count()))}

    def __iter__(self) -> Iterator[Any]:
        trained = self._trained()
        (ranks, rank) = self.replicas
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size = (self._batch_size or max(trained.micro_batch // ranks, 1)) * ranks
        loads = self.loads
        samples = self.position_at(trained.samples + (trained.in_flight or 0) * trained.micro_batch)
        documents = self._documents_in(samples)
        source = self._documents(documents) if callable(self._documents) else islice(self._documents, documents, None)
        packed = ((each, 1) for each in source) if self._pack is None else iter(self._pack(iter(source)))
        for block in count():  # of a micro-batch of all ranks, which loaders take from workers in turn
            every = list(islice(packed, size))
            if len(every) < size:
                return
            for _, ended in every:
                samples = samples + 1
                documents = documents + ended
                self._used[samples % _REMEMBERED] = torch.tensor([samples, documents])
            for sample, _ in every[rank::ranks] if block % workers == number else ():
                self.refuse_if_older(loads)
                yield sample

    def _remembered(self, samples: int) -> tuple[int, int]:
        """A number of samples and the documents in them, as they are kept in the place of ``samples``."""
        remembered, documents = self._used[samples % _REMEMBERED].tolist()
        return remembered, documents

    def _documents_in(self, samples: int) -> int:
        remembered, documents = self._remembered(samples)
        if remembered != samples:
            problem = "which documents are in the samples that were trained on is not known"
            remedy = "give the stream the loader's batch_size; prefetch fewer batches"
            raise MismatchError(problem, None, f"{samples} samples", remembered, remedy=remedy)
        return documents

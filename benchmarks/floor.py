"""The floor: the bytes that elastic_ckpt's plan reads, and nothing but ``preadv``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.cases import FRESH, RESUME
from benchmarks.held import Held, Part, judge_parts
from elastic_ckpt.config import read_config
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.io.reader import execute
from elastic_ckpt.load import flow as loader

_CHUNK = 16 << 20


@dataclass
class Recorded:
    """The plan that a load carried out."""

    plan: ReadPlan | None = None


@contextmanager
def record_plan() -> Iterator[Recorded]:
    """Note the plan of the load in the body, which goes on as ever."""
    recorded = Recorded()

    def note(plan: ReadPlan, *rest: Any, **keywords: Any) -> Any:
        recorded.plan = plan
        return execute(plan, *rest, **keywords)

    with patch.object(loader, "execute", note):
        yield recorded


@dataclass(frozen=True)
class _Extent:
    """Bytes of a file, at most a chunk of them, and where they go: a target and the bytes before them in it."""

    path: str
    byte_offset: int
    nbytes: int
    target: int
    target_byte_offset: int


def extents_of(plan: ReadPlan) -> list[_Extent]:
    """The plan's copies in pieces of at most 16 MiB, in the order of the files.

    Raises:
        ValueError: the plan does more than copy.
    """
    chunks = []
    for copy in plan.items:
        itemsize = ITEMSIZE[copy.dtype]
        if copy.rows != 1 or copy.dtype != plan.targets[copy.target].dtype or plan.requantize_items:
            raise ValueError("there is no floor for strided or converting reads")
        nbytes = copy.numel * itemsize
        for first in range(0, nbytes, _CHUNK):
            size = min(_CHUNK, nbytes - first)
            path = plan.files[copy.file].path
            place = copy.target_offset * itemsize + first
            chunks.append(_Extent(path, copy.byte_offset + first, size, copy.target, place))
    return chunks


@dataclass
class Floor:
    """The same ranks read the same bytes of the same files into memory of the same kind.

    Attributes:
        held: the engine; its masters are read into where the kind does not ask for fresh ones.
        folder: whose files are read.
        recorded: the plan.
    """

    held: Held
    folder: Path
    recorded: Recorded
    phases: dict[str, float] = field(default_factory=dict)
    tensor_nbytes: int | None = None

    def __post_init__(self) -> None:
        assert self.recorded.plan is not None, "no load went before"
        self._plan = self.recorded.plan
        self._extents = extents_of(self._plan)
        self._buffers: list[torch.Tensor] = []
        self._threads = read_config({}).reading.threads
        self.owned_nbytes = self.held.owned_nbytes
        self.tensor_nbytes = sum(chunk.nbytes for chunk in self._extents)

    def prepare(self, kind: str) -> int:
        """See :class:`benchmarks.contenders.Runner`."""
        if kind in (RESUME, FRESH):
            self._buffers = []
            self.held.scramble(RESUME)
        for buffer in self._buffers:
            buffer.fill_(-1.0)
        targets = self._plan.targets
        return sum(4 * target.numel for target in targets if self._is_new(kind, target.key))

    @staticmethod
    def _is_new(kind: str, key: str) -> bool:
        return kind == FRESH or (kind == RESUME and key != "fp32")

    def load(self, kind: str) -> None:
        """See :class:`benchmarks.contenders.Runner`."""
        if kind in (RESUME, FRESH):
            self._buffers = [
                torch.empty(target.numel) if self._is_new(kind, target.key) else self.held.masters[target.flat].data
                for target in self._plan.targets
            ]
        read_extents(self._extents, self._buffers, self._threads)

    def parts(self) -> Iterator[Part]:
        """See :class:`benchmarks.contenders.Runner`."""
        numbers = {(target.flat, target.key): number for number, target in enumerate(self._plan.targets)}
        for piece in self.held.pieces:
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                buffer = self._buffers[numbers[piece.flat, key]]
                yield piece.name, key, piece.start, buffer[piece.offset : piece.offset + piece.numel]

    def judge(self) -> dict[str, bool]:
        """See :class:`benchmarks.contenders.Runner`."""
        return judge_parts(self.parts())

    def drop(self) -> None:
        """See :class:`benchmarks.contenders.Runner`."""
        self._buffers = []


def read_extents(chunks: Sequence[_Extent], buffers: Sequence[torch.Tensor], threads: int) -> None:
    """Read them all, from a pool of threads, each file opened once."""
    views = [buffer.view(torch.uint8).numpy().data for buffer in buffers]
    descriptors = {path: os.open(path, os.O_RDONLY) for path in dict.fromkeys(each.path for each in chunks)}

    def read(chunk: _Extent) -> None:
        view = views[chunk.target][chunk.target_byte_offset : chunk.target_byte_offset + chunk.nbytes]
        offset = chunk.byte_offset
        while view:
            count = os.preadv(descriptors[chunk.path], [view], offset)
            if count == 0:
                raise EOFError(chunk.path)
            view, offset = view[count:], offset + count

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, chunks):
                pass
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)

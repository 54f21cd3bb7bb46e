"""What all ranks of a job read of a checkpoint, held against what it holds. Pure; see :mod:`tests.oracle.coverage`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.read_plan import LoadPlan, ReadItem
from elastic_ckpt.core.state_kinds import COMPANIONS, REPLICATED
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.sharding.rules import is_vocabulary, tensor_of
from tests.oracle.intervals import Intervals, Numbers, Stretches, coverage, covers_exactly, rows_of, strided

#: Keys of targets that hold the scales of 8-bit blocks, which are no logical tensors.
SCALES = frozenset(scales for scales, _ in COMPANIONS.values())
#: Of an chunk: each element is read just so often; at least once, or compared; not more often than that.
_EXACTLY, _AT_LEAST, _AT_MOST = range(3)
#: (file, start byte, bytes, how often, bytes from one to the next)
_Row = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Fault:
    """Elements of which the proof does not hold.

    Attributes:
        problem: what is wrong with them (``"is not written"``).
        name, key: of what.
        where: place in the job, or file.
        start, stop: the elements: of a target, of a live shard, or of a saved one.
    """

    problem: str
    name: str
    key: str
    where: str
    start: int
    stop: int

    def __str__(self) -> str:
        which = f"elements {self.start} to {self.stop} of " if self.stop > self.start else ""
        return f"{which}{self.key} {self.name} ({self.where}): {self.problem}"


@dataclass(frozen=True)
class _Held:
    """The chunks of one file, by their first bytes; ``owners``: which tensor and shard each is of."""

    bytes: Intervals
    kinds: Numbers
    times: Numbers
    owners: list[tuple[TensorMetadata, int]]


class SourceCoverage:
    """Collects what ranks read.

    Args:
        metadata: what the checkpoint holds.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._catalog = metadata
        self._read: list[Numbers] = []
        self._compared: list[Numbers] = []
        self._stages: dict[tuple[str, str], set[int]] = {}
        self._alone: set[tuple[str, str]] = set()
        self._live: dict[str, tuple[Shape, ...]] = {}
        self._tp = self._dp = 1
        self._with_states = False

    @property
    def numel(self) -> int:
        """Elements of all logical tensors, each shard and tied copy by itself."""
        replicas = [tensor for tensors in self._catalog.replicas.values() for tensor in tensors]
        every = [*self._catalog.tensors.values(), *replicas]
        return sum(chunk.range.numel for tensor in every for chunk in tensor.chunks)

    def is_padded(self, name: str) -> bool:
        """Whether the live ranks hold more elements of a parameter than were saved."""
        tensor = tensor_of(self._catalog, name)
        return tensor is not None and name in self._live and _total(self._live[name]) > _total(tensor.shard_shapes)

    def add(self, local_state: LocalState, plan: LoadPlan) -> None:
        """One rank."""
        self._tp, self._dp = local_state.model.coordinates.tp, local_state.model.coordinates.partition_degree
        self._with_states = self._with_states or plan.restores_states
        for name, layout in local_state.model.layouts.items():
            self._live.setdefault(name, layout.shapes)
        stage = local_state.model.coordinates.pp_rank
        for flat in local_state.flats:
            for name in flat.members:
                self._stages.setdefault((name, MASTER), set()).add(stage)
        shared = {target.name for target in plan.reads.targets if target.flat < 0 and target.replicated}
        for whole in local_state.wholes:
            self._stages.setdefault((whole.name, whole.key), set()).add(stage)
            if whole.name not in shared and (whole.key == BUFFER or local_state.zero_stage < 3):
                self._alone.add((whole.name, whole.key))
        apart = [target.key in SCALES or target.layout == REPLICATED for target in plan.reads.targets]
        read = [_bytes_of(item) for item in plan.reads.items if not apart[item.target]]
        read += [_bytes_of(source) for item in plan.reads.requantize_items for source in item.sources]
        self._read.append(rows_of(read, 5))
        compared = (replica for check in plan.replica_checks for replica in check.replicas)
        self._compared.append(rows_of([_bytes_of(item) for replica in compared for item in replica], 5))

    def faults(self) -> Iterator[Fault]:
        """What is read too often, not at all, or is no part of a tensor."""
        held, read, compared = self._held(), _by_file(self._read), _by_file(self._compared)
        nothing = strided(())
        for file in sorted({*held, *read}):
            yield from self._faults_of(file, held.get(file), read.get(file, nothing), compared.get(file, nothing))

    def _faults_of(self, file: int, held: _Held | None, read: Intervals, compared: Intervals) -> Iterator[Fault]:
        if held is None:
            yield Fault("is read, and holds no tensor", "bytes", "", self._catalog.files[file].path, 0, read.numel)
            return
        if (held.kinds == _EXACTLY).all() and (held.times == 1).all() and covers_exactly(read, held.bytes):
            return
        kinds: list[tuple[Intervals, Numbers | int]] = [(read, 1), (compared, 1), (held.bytes, 1)]
        kinds += [(held.bytes, np.where(held.kinds == kind, held.times, 0)) for kind in (_EXACTLY, _AT_MOST)]
        kinds.append((held.bytes, (held.kinds == _AT_LEAST).astype(np.int64)))
        yield from self._described(file, held, coverage(kinds))

    def _described(self, file: int, held: _Held, found: Stretches) -> Iterator[Fault]:
        read, compared, known, exactly, at_most, at_least = found.counts.T
        loose = at_least > 0
        # of what may be read at most so often, any number up to it will do
        wrong = np.where(loose, read + compared == 0, np.where(at_most > 0, read > at_most, read != exactly))
        wrong |= (known == 0) & (read > 0)
        path = self._catalog.files[file].path
        for number in np.flatnonzero(wrong):
            start, stop, times = int(found.starts[number]), int(found.stops[number]), int(read[number])
            if not known[number]:
                yield Fault("is read, and is of no tensor", f"bytes {start} to {stop}", "", path, 0, 0)
                continue
            index = int(np.searchsorted(held.bytes.starts, start, side="right")) - 1
            tensor, chunk = held.owners[index]
            inside = tensor.chunks[chunk]
            first = inside.range.start + (start - inside.byte_offset) // ITEMSIZE[tensor.dtype]
            last = first + -(-(stop - start) // ITEMSIZE[tensor.dtype])
            wanted = int(exactly[number] or at_most[number])
            problem = "is not read" if times == 0 else f"is read {times} times, not {wanted}"
            yield Fault(problem, tensor.name, tensor.key, path, first, last)

    def _held(self) -> dict[int, _Held]:
        """The chunks of every file, and how often each is to be read."""
        rows: dict[int, list[tuple[int, int, int, int, TensorMetadata, int]]] = {}
        every = [(place, tensor, False) for place, tensor in self._catalog.tensors.items()]
        every += [(place, replica, True) for place, replicas in self._catalog.replicas.items() for replica in replicas]
        for place, tensor, is_replica in every:
            kind, times = self._expected(place, tensor, is_replica)
            for number, chunk in enumerate(tensor.chunks):
                stop = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype]
                rows.setdefault(chunk.file, []).append((chunk.byte_offset, stop, kind, times, tensor, number))
        held = {}
        for file, found in rows.items():
            found.sort(key=lambda row: row[0])
            starts, stops, kinds, times_ = np.array([row[:4] for row in found], dtype=np.int64).T
            held[file] = _Held(Intervals(starts, stops), kinds, times_, [(row[4], row[5]) for row in found])
        return held

    def _expected(self, place: tuple[str, str], tensor: TensorMetadata, is_replica: bool) -> tuple[int, int]:
        """How often each element of a tensor has to be read, by the shapes on both sides."""
        name, key = place
        if key not in (MASTER, BUFFER, FROZEN) and not self._with_states:
            return _EXACTLY, 0
        holder = (name, key) if (name, key) in self._stages else (name, MASTER)
        # on each stage that holds it; by each data-parallel rank, if these do not share it out
        times = len(self._stages.get(holder, ())) * (self._dp if holder in self._alone else 1)
        saved = tensor.shard_shapes
        if is_replica:
            return _AT_LEAST, 1
        if len(saved) == self._tp or name not in self._live:
            return _EXACTLY, times
        base = tensor_of(self._catalog, name)
        shapes = {*(base.shard_shapes if base is not None else saved), *self._live[name]}
        # of a vocabulary, equal shapes may as well be padding that is new, or gone
        if len(shapes) == 1 and not (len(saved[0]) > 1 and is_vocabulary(name)):
            return (_EXACTLY, times * self._tp) if len(saved) == 1 else (_AT_LEAST, 1)
        before, now = _total(base.shard_shapes if base is not None else saved), _total(self._live[name])
        if now > before:
            return _AT_LEAST, 1
        return (_EXACTLY if now == before else _AT_MOST), times


def _bytes_of(item: ReadItem) -> _Row:
    size = ITEMSIZE[item.dtype]
    return item.file, item.byte_offset, item.numel * size, item.rows, item.file_stride * size


def _by_file(parts: list[Numbers]) -> Mapping[int, Intervals]:
    """What lies in each file, rows of strided copies one by one, once they are asked for."""
    rows = np.concatenate([rows_of([], 5), *parts])
    if not len(rows):
        return {}
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    files, firsts = np.unique(rows[:, 0], return_index=True)
    return _Lazily({int(file): part[:, 1:] for file, part in zip(files, np.split(rows, firsts[1:]), strict=True)})


class _Lazily(Mapping[int, Intervals]):
    """One file's rows expanded at a time: all of them together may be gigabytes."""

    def __init__(self, rows: dict[int, Numbers]) -> None:
        self._rows = rows

    def __getitem__(self, file: int) -> Intervals:
        return strided(self._rows[file])

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _total(shapes: tuple[Shape, ...]) -> int:
    return sum(map(math.prod, shapes))

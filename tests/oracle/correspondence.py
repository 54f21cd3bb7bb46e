"""Does what a plan reads go where it belongs? Pure; see :mod:`tests.oracle.coverage`.

Every element that is read is of the tensor that it is written to. Where tensor-parallel shards stay as they were saved,
or every rank held the whole, it is the very same element too. How shards that are cut anew share a parameter follows
from rules, which shapes alone do not tell.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_ckpt.core.chunks import StorageChunk
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import FROZEN, ITEMSIZE, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.read_plan import LoadPlan, ReadItem, TargetTensor
from elastic_ckpt.core.state_kinds import ELEMENTWISE
from elastic_ckpt.sharding.rules import is_vocabulary, tensor_of
from tests.oracle.source_coverage import SCALES, Fault


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a tensor that lie one behind the other, in a file or in a target.

    Attributes:
        name: of the parameter or buffer.
        first: number of the first one in its shard.
        left: how many there are.
        shard: which shard; -1: not known.
    """

    name: str
    key: str
    first: int
    left: int
    shard: int = -1


class Correspondence:
    """Holds copies against the chunks that they read and the fragments that they fill.

    Args:
        metadata: what the checkpoint holds.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._catalog = metadata
        self._extents: dict[int, list[tuple[int, StorageChunk, TensorMetadata, int]]] = {}
        for tensor in metadata.tensors.values():
            for shard, source in enumerate(tensor.sources):
                for chunk in source:
                    self._extents.setdefault(chunk.file, []).append((chunk.byte_offset, chunk, tensor, shard))
        for held in self._extents.values():
            held.sort(key=lambda item: item[0])

    def faults(self, local_state: LocalState, plan: LoadPlan) -> Iterator[Fault]:
        """What goes elsewhere, of one rank."""
        where = f"pipeline stage {local_state.model.coordinates.pp_rank}, tensor-parallel rank {local_state.model.coordinates.tp_rank}"
        where += f", data-parallel rank {local_state.model.coordinates.partition_rank}"
        places = _places(local_state)
        for copy in _copies(plan):
            target = plan.reads.targets[copy.target]
            if target.layout == ELEMENTWISE and target.key not in SCALES:
                for number in sorted({0, copy.rows - 1}):  # what lies between them is between them on both sides
                    yield from self._compare(copy.row(number), target, places, local_state, where)

    def _compare(
        self,
        copy: ReadItem,
        target: TargetTensor,
        places: dict[int | str, _Places],
        local_state: LocalState,
        where: str,
    ) -> Iterator[Fault]:
        done = 0
        while done < copy.numel:
            source = self._source(copy, done)
            place = places[target.flat if target.flat >= 0 else target.name].at(target, copy.target_offset + done)
            if source is None or place is None:
                return  # no tensor, or padding: the coverage of files and targets tells
            step = min(source.left, place.left, copy.numel - done)
            if source.name != place.name or not self._is_of(source.key, target):
                problem = f"is filled from {source.key} {source.name}"
                yield Fault(problem, place.name, target.key, where, place.first, place.first + step)
            elif not self._agree(source, place, local_state):
                problem = f"is filled from elements {source.first} to {source.first + step}"
                yield Fault(problem, place.name, target.key, where, place.first, place.first + step)
            done += step

    def _is_of(self, key: str, target: TargetTensor) -> bool:
        """A frozen weight may have become a master, or the other way round."""
        weights = {MASTER, FROZEN}
        return key == target.key or {key, target.key} <= weights

    def _source(self, copy: ReadItem, done: int) -> _Run | None:
        size = ITEMSIZE[copy.dtype]
        held, position = self._extents.get(copy.file, []), copy.byte_offset + done * size
        index = bisect_right(held, position, key=lambda item: item[0]) - 1
        if index < 0:
            return None
        start, chunk, tensor, shard = held[index]
        skipped = (position - start) // size
        if skipped >= chunk.range.numel or tensor.dtype != copy.dtype:
            return None
        first = chunk.range.start + skipped
        return _Run(tensor.name, tensor.key, first, chunk.range.stop - first, shard)

    def _agree(self, source: _Run, target: _Run, local_state: LocalState) -> bool:
        tensor, layout = tensor_of(self._catalog, source.name), local_state.model.layouts.get(source.name)
        if tensor is None:
            return True
        saved = tensor.shard_shapes
        live = layout.shapes if layout is not None else saved
        if len(saved) == len(live):
            return source.first == target.first and (
                len(saved) == 1 or source.shard == local_state.model.coordinates.tp_rank
            )
        if len({*saved, *live}) == 1 and not (len(saved[0]) > 1 and is_vocabulary(source.name)):
            return source.first == target.first
        return True


class _Places:
    """The fragments of one flat partition, or one buffer or frozen weight."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._starts: list[int] = []
        self._held: list[tuple[str, int, int, int]] = []

    def add(self, name: str, first: int, numel: int, offset: int, shard_numel: int) -> None:
        """Elements ``[first, first + numel)`` of a shard, from an offset on; in ascending order."""
        self._starts.append(offset)
        self._held.append((name, first, numel, shard_numel))

    def at(self, target: TargetTensor, position: int) -> _Run | None:
        """What lies there, in whichever plane of the target."""
        row, inside = divmod(position, self._numel) if self._numel else (0, position)
        index = bisect_right(self._starts, inside) - 1
        if index < 0 or row >= target.planes:
            return None
        name, first, numel, shard_numel = self._held[index]
        skipped = inside - self._starts[index]
        return _Run(name, target.key, row * shard_numel + first + skipped, numel - skipped) if skipped < numel else None


def _places(local_state: LocalState) -> dict[int | str, _Places]:
    found: dict[int | str, _Places] = {flat.index: _Places(flat.numel) for flat in local_state.flats}
    for part in sorted(local_state.fragments, key=lambda part: (part.flat, part.flat_offset)):
        found[part.flat].add(part.name, part.range.start, part.range.numel, part.flat_offset, math.prod(part.shape))
    for whole in local_state.wholes:
        found[whole.name] = _Places(whole.range.numel)
        found[whole.name].add(whole.name, whole.range.start, whole.range.numel, 0, math.prod(whole.shape))
    return found


def _copies(plan: LoadPlan) -> Iterator[ReadItem]:
    """Items, and the sources of requantize items."""
    yield from plan.reads.items
    for item in plan.reads.requantize_items:
        yield from item.sources

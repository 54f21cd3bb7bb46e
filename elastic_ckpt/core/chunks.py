"""The chunks of saved tensors: which elements are where in which file. Pure arithmetic.

ZeRO partitions thousands of parameters over thousands of ranks by one rule. Chunks of partitioned tensors are therefore
not stored but computed, those of a range at a time, so that memory and time follow what a rank reads.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import accumulate, chain
from typing import ClassVar

from elastic_ckpt.core.flat_ranges import FlatRange, Placement
from elastic_ckpt.core.state_kinds import BlockFormat

#: Bytes of a quantization block's scale.
_SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class BlockCode:
    """How the elements of a chunk are quantized."""

    format: BlockFormat
    position: int  # of the first in the quantized tensor, in block ``position // format.numel``
    scales_offset: int  # of block 0's scale (fp32) in the file of scales; below zero if that lacks the first blocks
    scales_file: int = -1  # index of that file; -1: the chunk's own
    origin: int = -1  # chunks of one number are of one quantized tensor; -1: those of one file and ``scales_offset``

    def moved(self, files: int) -> BlockCode:
        """The same where ``files`` more files come before that of the scales."""
        return self if self.scales_file < 0 else replace(self, scales_file=self.scales_file + files)

    def scales_of(self, numel: int, file: int) -> tuple[int, int, int]:
        """File, byte offset and size in bytes of the scales of ``numel`` elements; ``file`` is the chunk's own."""
        first = self.position // self.format.numel
        stop = self.format.blocks(self.position + numel)
        of_scales = file if self.scales_file < 0 else self.scales_file
        return of_scales, self.scales_offset + first * _SCALE_NBYTES, (stop - first) * _SCALE_NBYTES


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as FlatRange
class StorageChunk:
    """A contiguous range of a tensor, or of one tensor-parallel shard of it, in one file. Immutable."""

    range: FlatRange
    file: int  # index into :attr:`~elastic_ckpt.core.metadata.CheckpointMetadata.files`
    byte_offset: int
    code: BlockCode | None = None  # how the elements are quantized; ``None`` for plain values


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """Chunks one by one, sorted by ``range.start``."""

    chunks: tuple[StorageChunk, ...] = ()

    def __iter__(self) -> Iterator[StorageChunk]:
        return iter(self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks)

    @property
    def blocks(self) -> BlockFormat | None:
        """How the elements are quantized; ``None`` for plain values, and without chunks."""
        return next((chunk.code.format for chunk in self.chunks if chunk.code is not None), None)

    def in_files(self, files: Collection[int]) -> Iterator[StorageChunk]:
        return (chunk for chunk in self.chunks if chunk.file in files)

    def within(self, start: int, stop: int) -> Sequence[StorageChunk]:
        """The chunks that have some of the elements ``[start, stop)``, of which there is at least one."""
        chunks = self.chunks
        first = max(bisect_right(chunks, start, key=lambda chunk: chunk.range.start) - 1, 0) if len(chunks) > 1 else 0
        return [chunk for chunk in chunks[first:] if chunk.range.start < stop and chunk.range.stop > start]

    def moved(self, files: int) -> ListedChunks:
        """The same chunks where ``files`` more files come before theirs."""
        chunks = self.chunks
        codes = (chunk.code and chunk.code.moved(files) for chunk in chunks)
        pairs = zip(chunks, codes, strict=True)
        return ListedChunks(tuple(replace(chunk, file=chunk.file + files, code=code) for chunk, code in pairs))

    def tile(self, numel: int) -> bool:
        """Whether each of ``numel`` elements is known to be in exactly one chunk."""
        return _tile(((chunk.range.start, chunk.range.numel) for chunk in self.chunks), numel)


def chunks_of(*chunks: StorageChunk) -> tuple[ListedChunks]:
    """The chunks of a tensor with a single shard, as :class:`~elastic_ckpt.core.metadata.TensorMetadata` has them."""
    return (ListedChunks(chunks),)


@dataclass(frozen=True, slots=True)
class PartitionRule:
    """How ZeRO partitions one parameter: element ``e`` is on rank ``(e + shift) // step``.

    There it is at ``start + (e + shift) % step`` of the flat tensor. ZeRO-1 and 2 divide one flat buffer: ``shift`` is
    the parameter's offset in it, ``step`` the size of a partition. ZeRO-3 divides each parameter: ``step`` is its share
    of a partition, ``start`` where that share begins.
    """

    numel: int
    step: int
    shift: int = 0
    start: int = 0

    @property
    def ranks(self) -> range:
        """The ranks that have some of its elements."""
        if not self.numel:
            return range(0)
        return range(self.shift // self.step, (self.numel - 1 + self.shift) // self.step + 1)


def group_rules(numels: Sequence[int], offsets: Sequence[int], partition_numel: int) -> list[PartitionRule]:
    """The rules of ZeRO-1 and 2 for a group of parameters at ``offsets`` of its flat buffer."""
    return [PartitionRule(numel, partition_numel, offset) for numel, offset in zip(numels, offsets, strict=True)]


def parameter_rules(numels: Sequence[int], steps: Sequence[int]) -> list[PartitionRule]:
    """The rules of ZeRO-3 for parameters that have ``steps`` elements on each rank, padding included."""
    starts = accumulate(steps[:-1], initial=0)
    return [PartitionRule(numel, step, 0, start) for numel, step, start in zip(numels, steps, starts, strict=True)]


def placements(rules: Iterable[PartitionRule], rank: int) -> Iterator[Placement]:
    """What one rank's flat partition has of each parameter, in flat order."""
    for index, rule in enumerate(rules):
        left = rank * rule.step - rule.shift
        start = max(left, 0)
        stop = min(left + rule.step, rule.numel)
        if start < stop:
            yield Placement(index, FlatRange(start, stop), rule.start + start - left)


@dataclass(frozen=True, slots=True)
class FlatTensors:
    """The flat tensors of one state, one in each rank's file; shared by the parameters in them."""

    files: range  # index of each rank's file
    byte_offsets: array[int] = field(hash=False)  # where each rank's begins; a single one where all are equal
    numel: int  # of a plane, padding included
    dtype: str  # torch dtype in the files
    itemsize: int
    planes: int = 1  # values per element
    blocks: BlockFormat | None = None  # how the elements are quantized, each plane from a block of its own on
    scales_offsets: array[int] = field(default_factory=lambda: array("q"), hash=False)  # as ``byte_offsets``


def by_rank(offsets: Iterable[int]) -> array[int]:
    """Offsets as :class:`FlatTensors` keeps them."""
    every = array("q", offsets)
    return every[:1] if every.count(every[0]) == len(every) else every


@dataclass(frozen=True, slots=True)
class PartitionedChunks:
    """The chunks of one parameter, or one tensor-parallel shard of it, in all ranks' flat tensors, plane by plane."""

    rule: PartitionRule
    flat: FlatTensors
    files_before: int = 0  # added to indices of files

    def __iter__(self) -> Iterator[StorageChunk]:
        return (self._chunk(plane, rank) for plane in range(self.flat.planes) for rank in self.rule.ranks)

    def __bool__(self) -> bool:
        return self.rule.numel > 0

    @property
    def blocks(self) -> BlockFormat | None:
        return self.flat.blocks

    def within(self, start: int, stop: int) -> Sequence[StorageChunk]:
        numel = self.rule.numel
        step = self.rule.step
        shift = self.rule.shift
        found: list[StorageChunk] = []
        for plane in range(start // numel, -(-stop // numel)):
            before = plane * numel
            first = (max(start - before, 0) + shift) // step
            last = (min(stop - before, numel) - 1 + shift) // step
            found += [self._chunk(plane, rank) for rank in range(first, last + 1)]
        return found

    def in_files(self, files: Collection[int]) -> Iterator[StorageChunk]:
        ranks = self.rule.ranks
        before = self.files_before
        own = self.flat.files[ranks.start : ranks.stop]
        mine = sorted(ranks.start + own.index(file - before) for file in files if file - before in own)
        return (self._chunk(plane, rank) for plane in range(self.flat.planes) for rank in mine)

    def moved(self, files: int) -> PartitionedChunks:
        return replace(self, files_before=self.files_before + files)

    def tile(self, numel: int) -> bool:  # the rule proves it
        return numel == self.flat.planes * self.rule.numel

    def _chunk(self, plane: int, rank: int) -> StorageChunk:
        rule = self.rule
        flat = self.flat
        left = rank * rule.step - rule.shift
        before = plane * rule.numel
        right = left + rule.step
        start = left if left > 0 else 0
        stop = right if right < rule.numel else rule.numel
        position = rule.start + start - left
        offsets = flat.byte_offsets
        code = None
        base = offsets[rank] if len(offsets) > 1 else offsets[0]
        offset = base + (plane * flat.numel + position) * flat.itemsize
        if flat.blocks is not None:
            scales = flat.scales_offsets[rank if len(flat.scales_offsets) > 1 else 0]
            scales += plane * flat.blocks.blocks(flat.numel) * _SCALE_NBYTES
            code = BlockCode(flat.blocks, position, scales)
        elements = FlatRange(before + start, before + stop)
        return StorageChunk(elements, self.files_before + flat.files[rank], offset, code)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, in one file in row-major order (DCP's ChunkStorageMetadata)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    byte_offset: int


@dataclass(frozen=True, slots=True)
class BoxChunks:
    """The chunks of a tensor saved in boxes, as DTensors are: each box has many contiguous runs of elements."""

    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[Box, ...]  # those with elements
    blocks: ClassVar[None] = None

    def __iter__(self) -> Iterator[StorageChunk]:
        return merge(*map(self._runs, self.boxes), key=lambda chunk: chunk.range.start)

    def __bool__(self) -> bool:
        return bool(self.boxes)

    def within(self, start: int, stop: int) -> Sequence[StorageChunk]:
        found = chain.from_iterable(self._runs(box, start, stop) for box in self.boxes)
        return sorted(found, key=lambda chunk: chunk.range.start)

    def in_files(self, files: Collection[int]) -> Iterator[StorageChunk]:
        return (chunk for chunk in self if chunk.file in files)

    def moved(self, files: int) -> BoxChunks:
        return replace(self, boxes=tuple(replace(box, file=box.file + files) for box in self.boxes))

    def tile(self, numel: int) -> bool:
        """Whether the boxes are a grid, in which each of ``numel`` elements is in exactly one; others may tile too."""
        if not self.boxes or numel != sum(math.prod(box.sizes) for box in self.boxes):
            return not numel and not self.boxes
        cuts = [{(box.offsets[dim], box.sizes[dim]) for box in self.boxes} for dim in range(len(self.shape))]
        return len({box.offsets for box in self.boxes}) == len(self.boxes) == math.prod(map(len, cuts)) and all(
            _tile(sorted(cut), size) for cut, size in zip(cuts, self.shape, strict=True)
        )

    def _runs(self, box: Box, start: int = 0, stop: int | None = None) -> Iterator[StorageChunk]:
        """The runs of a box with some of the elements ``[start, stop)``, in order."""
        cut = [dim for dim, size in enumerate(self.shape) if box.sizes[dim] != size]
        last = cut[-1] if cut else 0
        inner = math.prod(self.shape[last + 1 :])
        numel = math.prod(box.sizes[last:])

        def first(run: int) -> int:
            at = box.offsets[last] * inner if self.shape else 0
            stride = math.prod(self.shape[last:])
            for dim in range(last - 1, -1, -1):
                run, index = divmod(run, box.sizes[dim])
                at += (box.offsets[dim] + index) * stride
                stride *= self.shape[dim]
            return at

        runs = range(math.prod(box.sizes[:last]))
        for run in runs[bisect_right(runs, start - numel, key=first) :]:
            at = first(run)
            if stop is not None and at >= stop:
                return
            yield StorageChunk(FlatRange(at, at + numel), box.file, box.byte_offset + run * numel * self.itemsize)


@dataclass(frozen=True, slots=True)
class QuantizedRun:
    """Rows of a tensor, equally far apart, that follow each other where they were quantized."""

    start: int  # first element of the first row, in the tensor
    numel: int  # elements of a row
    rows: int
    stride: int  # elements of the tensor from one row to the next
    origin: int  # number of the quantized tensor; -1: no other run is of it
    position: int  # of the first element in it

    @property
    def total_numel(self) -> int:
        return self.rows * self.numel

    @property
    def stop(self) -> int:
        """One past the last element in the tensor."""
        return self.start + (self.rows - 1) * self.stride + self.numel

    def blocks(self, block_numel: int) -> range:
        """The quantization blocks that it has elements of."""
        return range(self.position // block_numel, -(-(self.position + self.total_numel) // block_numel))

    def within(self, start: int, stop: int) -> range:
        """Its rows that have some of the elements ``[start, stop)`` of the tensor."""
        if self.rows == 1:
            return range(self.start < stop and self.start + self.numel > start)
        first = (start - self.start - self.numel) // self.stride + 1
        last = -((self.start - stop) // self.stride)
        return range(max(first, 0), max(min(last, self.rows), 0))


@dataclass(frozen=True, slots=True)
class QuantizedChunks:
    """The chunks of a tensor whose codes are whole in one file, and whose scales are in another, run by run."""

    runs: tuple[QuantizedRun, ...]
    format: BlockFormat
    file: int  # of the codes, the first of which is at ``byte_offset``; a code takes a byte
    byte_offset: int
    scales_file: int
    scales_offset: int  # of the first run's scales, which those of the others follow

    def __iter__(self) -> Iterator[StorageChunk]:
        return iter(self.within(0, max((run.stop for run in self.runs), default=0)))

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def blocks(self) -> BlockFormat | None:
        return self.format if self.runs else None

    def within(self, start: int, stop: int) -> Sequence[StorageChunk]:
        found = list[StorageChunk]()
        offset = self.scales_offset
        for run in self.runs:
            blocks = run.blocks(self.format.numel)
            first_scale = offset - blocks.start * _SCALE_NBYTES
            offset += len(blocks) * _SCALE_NBYTES
            for row in run.within(start, stop):
                at = run.start + row * run.stride
                position = run.position + row * run.numel
                code = BlockCode(self.format, position, first_scale, self.scales_file, run.origin)
                found.append(StorageChunk(FlatRange(at, at + run.numel), self.file, self.byte_offset + at, code))
        return sorted(found, key=lambda chunk: chunk.range.start)

    def in_files(self, files: Collection[int]) -> Iterator[StorageChunk]:
        return iter(self) if self.file in files else iter(())

    def moved(self, files: int) -> QuantizedChunks:
        return replace(self, file=self.file + files, scales_file=self.scales_file + files)

    def tile(self, numel: int) -> bool:
        """Whether each of ``numel`` elements is in exactly one row."""
        if sum(run.total_numel for run in self.runs) != numel:
            return False
        rows = ((run.start + row * run.stride, run.numel) for run in self.runs for row in range(run.rows))
        return _tile(sorted(rows), numel)


#: Where the elements of a tensor, or of one tensor-parallel shard of it, are; methods as of :class:`ListedChunks`.
ChunkSource = ListedChunks | PartitionedChunks | BoxChunks | QuantizedChunks


def boxed(shape: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...]) -> ChunkSource:
    """The chunks of a tensor in boxes, listed where each box is one run."""
    source = BoxChunks(shape, itemsize, boxes)
    cuts = (box.sizes[:dim] for box in boxes for dim in range(len(shape)) if box.sizes[dim] != shape[dim])
    return source if any(math.prod(before) > 1 for before in cuts) else ListedChunks(tuple(source))


def _tile(parts: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether (offset, size) of ascending parts follow each other from 0 to ``size``."""
    position = 0
    for offset, width in parts:
        if offset != position:
            return False
        position += width
    return position == size

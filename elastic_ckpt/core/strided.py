"""Strided copies between flat tensors, and tensor-parallel layouts. Pure arithmetic.

Sharded along one dimension, a parameter of any shape is a matrix: its *rows* are the dimensions before that one, its
*columns* that dimension and all after it. A rank holds the same column ranges of every row, so that two shards share
a few strided copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic_ckpt.core.flat_ranges import FlatRange

Shape = tuple[int, ...]
DimRange = tuple[int, int]  # elements ``[start, stop)`` of a dimension


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """``rows`` times ``width`` contiguous elements of a flat tensor, and where they go in another."""

    source: int  # the first element
    target: int
    width: int
    rows: int = 1
    source_stride: int = 0  # elements from one row to the next, at least ``width``; 0 for a single row
    target_stride: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.width

    def part(self, row: int, rows: int, column: int, width: int) -> StridedCopy:
        """Some rows, and some of their columns."""
        source = row * self.source_stride + column
        target = row * self.target_stride + column
        strides = (self.source_stride, self.target_stride) if rows > 1 else (0, 0)
        return StridedCopy(self.source + source, self.target + target, width, rows, *strides).joined()

    def reversed(self) -> StridedCopy:
        """The copy from target to source."""
        return StridedCopy(self.target, self.source, self.width, self.rows, self.target_stride, self.source_stride)

    def joined(self) -> StridedCopy:
        """The same copy with a single row, if neither side has gaps between rows."""
        if self.rows > 1 and self.source_stride == self.width == self.target_stride:
            return StridedCopy(self.source, self.target, self.numel)
        return self


def clip_target(copy: StridedCopy, wanted: FlatRange) -> Iterator[StridedCopy]:
    """The parts of a copy, at most three, whose target elements are in a range, sorted by target."""
    start = wanted.start - copy.target
    stop = wanted.stop - copy.target
    width = copy.width
    stride = max(copy.target_stride, 1)
    last = copy.rows - 1
    if not copy.numel or start >= stop:
        return
    if start <= 0 and last * copy.target_stride + width <= stop:
        yield copy.joined()
        return
    first = max(-(-(start - width + 1) // stride), 0)
    last = min((stop - 1) // stride, last)
    if first > last:
        return

    def columns(row: int) -> DimRange:
        return max(start - row * stride, 0), min(stop - row * stride, width)

    whole = range(first + (columns(first) != (0, width)), last + (columns(last) == (0, width)))
    if first not in whole:
        left, right = columns(first)
        yield copy.part(first, 1, left, right - left)
    if whole:
        yield copy.part(whole.start, len(whole), 0, width)
    if last not in whole and last > first:
        left, right = columns(last)
        yield copy.part(last, 1, left, right - left)


def clip_source(copy: StridedCopy, available: FlatRange) -> Iterator[StridedCopy]:
    """The parts of a copy, at most three, whose source elements are in a range, sorted by source."""
    for part in clip_target(copy.reversed(), available):
        yield part.reversed()


@dataclass(frozen=True)
class TPLayout:
    """How tensor-parallel ranks hold a parameter."""

    shape: Shape  # logical
    dim: int  # sharded
    ranges: tuple[tuple[DimRange, ...], ...]  # of ``dim``, per rank in its own order; ranks may share a range

    @property
    def degree(self) -> int:
        return len(self.ranges)

    @property
    def rows(self) -> int:
        """Elements of the dimensions before the sharded one; ``inner``: of those after it."""
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    def size(self, rank: int) -> int:
        """Size of a rank's shard along the sharded dimension."""
        return sum(stop - start for start, stop in self.ranges[rank])

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return all(ranges == ((0, self.shape[self.dim]),) for ranges in self.ranges)

    def shard_shape(self, rank: int) -> Shape:
        return (*self.shape[: self.dim], self.size(rank), *self.shape[self.dim + 1 :])

    def placed(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """A rank's ranges: (start, stop, offset in its shard)."""
        position = 0
        for start, stop in self.ranges[rank]:
            yield start, stop, position
            position += stop - start


def replicated(shape: Shape, degree: int) -> TPLayout:
    """The layout with which every rank holds the whole parameter."""
    size = shape[0] if shape else 1
    return TPLayout(shape or (1,), 0, (((0, size),),) * degree)


def fused(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> TPLayout:
    """The layout of consecutive sub-parameters of dimension ``dim``, each sharded by itself.

    ``widths``: per sub-parameter, the elements of each rank. A single sub-parameter is a plain ``Shard(dim)``.
    """
    ranges: list[list[DimRange]] = [[] for _ in widths[0]]
    position = 0
    for parts in widths:
        for rank, width in enumerate(parts):
            if width:
                ranges[rank].append((position, position + width))
            position += width
    return TPLayout(shape, dim, tuple(map(tuple, ranges)))


ShardCopy = tuple[int, StridedCopy]  # a saved shard, and a copy from it


@dataclass(frozen=True)
class ShardSources:
    """Where one live shard of a parameter gets its elements."""

    copies: tuple[ShardCopy, ...]
    scale: float | None = None  # if given, each element is so many times the sum of its sources
    missing: tuple[FlatRange, ...] = ()  # of the live shard, which no saved shard has


@functools.lru_cache(maxsize=1024)
def copied(shard: int, numel: int) -> ShardSources:
    """The live shard equals a saved one."""
    return ShardSources(((shard, StridedCopy(0, 0, numel)),))


def blended(shards: int, numel: int, scale: float) -> ShardSources:
    """The live shard is ``scale`` times the sum of all saved ones."""
    return ShardSources(tuple((shard, StridedCopy(0, 0, numel)) for shard in range(shards)), scale)


def reshard(source: TPLayout, target: TPLayout, rank: int) -> ShardSources:
    """What a live rank takes from the shards of a checkpoint; of replicas, the first.

    The target has the shape of the source except in the sharded dimension, whose end may differ (padding of a
    vocabulary). Raises :class:`ValueError` if no saved shard has some elements, and the dimension is not the first.
    """
    inner = target.inner
    rows = target.rows
    copies: list[ShardCopy] = []
    missing: list[FlatRange] = []
    for start, stop, position in target.placed(rank):
        to_live = position - start
        at = start
        for left, right, holders in _segments(source):
            low = max(left, start)
            high = min(right, stop)
            if low >= high or not holders:
                continue
            if low > at:
                missing.append(FlatRange((at + to_live) * inner, (low + to_live) * inner))
            shard, offset = holders[0]
            places = ((offset + low - left) * inner, (low + to_live) * inner)
            width = (high - low) * inner
            copy = StridedCopy(*places, width, rows, source.size(shard) * inner, target.size(rank) * inner)
            _append(copies, shard, copy.part(0, rows, 0, width))
            at = high
        if at < stop:
            missing.append(FlatRange((at + to_live) * inner, (stop + to_live) * inner))
    if missing and rows > 1:
        raise ValueError(f"no saved shard has all of dimension {target.dim}")
    return ShardSources(tuple(copies), missing=tuple(missing))


def _append(copies: list[ShardCopy], shard: int, copy: StridedCopy) -> None:
    """Append a copy, or join it to the last one, which it continues in each row."""
    if copies and copies[-1][0] == shard:
        last = copies[-1][1]
        source = last.source + last.width
        target = last.target + last.width
        if replace(last, source=source, target=target, width=copy.width) == copy:
            copies[-1] = shard, replace(last, width=last.width + copy.width).joined()
            return
    copies.append((shard, copy))


Overlap = tuple[ShardCopy, ShardCopy]  # the same elements in two saved shards; both copies have the same target


def duplicates(layout: TPLayout) -> tuple[Overlap, ...]:
    """The elements that several ranks hold: each replica paired with that of the first rank."""
    inner = layout.inner
    rows = layout.rows

    def copy(rank: int, offset: int, numel: int) -> ShardCopy:
        copy = StridedCopy(offset * inner, 0, numel, rows, layout.size(rank) * inner, numel)
        return rank, copy.part(0, rows, 0, numel)

    return tuple(
        (copy(*holders[0], (stop - start) * inner), copy(*other, (stop - start) * inner))
        for start, stop, holders in _segments(layout)
        for other in holders[1:]
    )


@functools.lru_cache(maxsize=64)
def _segments(layout: TPLayout) -> Sequence[tuple[int, int, Sequence[tuple[int, int]]]]:
    """The sharded dimension, cut where a rank's range begins or ends: (start, stop, [(rank, offset in its shard)])."""
    placements = [(rank, *placed) for rank in range(layout.degree) for placed in layout.placed(rank)]
    borders = sorted({border for _, start, stop, _ in placements for border in (start, stop)})
    return [
        (low, high, [(rank, at + low - start) for rank, start, stop, at in placements if start <= low and high <= stop])
        for low, high in pairwise(borders)
    ]

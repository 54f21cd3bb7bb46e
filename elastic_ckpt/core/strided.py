"""Strided copies between flat tensors, and how tensor-parallel ranks cut a parameter. Pure arithmetic.

Cut along one dimension, a parameter of any shape is a matrix: its *rows* are what lies before that dimension, its
*columns* the dimension and all behind it. A rank holds the same stretches of columns of every row, so what two shards
have in common is a few *bands*: rows of equal width, at a stride of its own in each of the two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.flat_ranges import FlatRange

Shape = tuple[int, ...]
#: Elements ``[start, stop)`` of a dimension.
Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """``rows`` times ``width`` elements of a source tensor, and where they go in a target tensor; both flat.

    Attributes:
        rows: how often.
        width: contiguous elements.
        source: first element in the source.
        source_stride: elements from one row to the next there; at least ``width``.
        target, target_stride: the same in the target.
    """

    rows: int
    width: int
    source: int
    source_stride: int
    target: int
    target_stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.width

    def part(self, row: int, rows: int, column: int, width: int) -> StridedCopy:
        """The band of some of the rows, and of some of the columns of these."""
        return StridedCopy(
            rows,
            width,
            self.source + row * self.source_stride + column,
            self.source_stride,
            self.target + row * self.target_stride + column,
            self.target_stride,
        )

    def turned(self) -> StridedCopy:
        """Source and target exchanged."""
        return StridedCopy(self.rows, self.width, self.target, self.target_stride, self.source, self.source_stride)

    def moved(self, source: int, target: int) -> StridedCopy:
        """The same band of tensors that start elsewhere."""
        return StridedCopy(
            self.rows, self.width, self.source + source, self.source_stride, self.target + target, self.target_stride
        )

    def joined(self) -> StridedCopy:
        """The same band as one row, where it has no gaps on either side."""
        if self.rows > 1 and self.source_stride == self.width == self.target_stride:
            return StridedCopy(1, self.numel, self.source, self.numel, self.target, self.numel)
        return self


def whole_band(numel: int) -> StridedCopy:
    """A tensor that is copied as it is."""
    return StridedCopy(1, numel, 0, numel, 0, numel)


def clip_target(band: StridedCopy, wanted: FlatRange) -> Iterator[StridedCopy]:
    """The parts of a band, at most three, whose target elements lie in a range; by ascending target."""
    if band.numel == 0 or not wanted.numel:
        return
    end = band.target + (band.rows - 1) * band.target_stride + band.width
    if wanted.start <= band.target and end <= wanted.stop:
        yield band.joined()
        return
    stride = max(band.target_stride, 1)
    first = max(-(-(wanted.start - band.target - band.width + 1) // stride), 0)
    last = min((wanted.stop - 1 - band.target) // stride, band.rows - 1)
    whole_first, whole_last = first, last
    if first > last:
        return

    def cut(row: int) -> StridedCopy | None:
        """A row of which not all is wanted."""
        start = band.target + row * band.target_stride
        left, right = max(wanted.start - start, 0), min(wanted.stop - start, band.width)
        return None if (left, right) == (0, band.width) else band.part(row, 1, left, right - left)

    head = cut(first)
    if head is not None:
        yield head
        whole_first += 1
    tail = cut(last) if last > first or head is None else None
    if tail is not None:
        whole_last -= 1
    if whole_first <= whole_last:
        yield band.part(whole_first, whole_last - whole_first + 1, 0, band.width).joined()
    if tail is not None and last >= whole_first:
        yield tail


def clip_source(band: StridedCopy, held: FlatRange) -> Iterator[StridedCopy]:
    """The parts of a band, at most three, whose source elements lie in a range; by ascending source."""
    for part in clip_target(band.turned(), held):
        yield part.turned()


@dataclass(frozen=True)
class TPLayout:
    """How tensor-parallel ranks hold a parameter.

    Attributes:
        shape: of the whole, logical parameter.
        dim: the dimension that is cut.
        held: per rank, the stretches of that dimension that it holds, in the order in which it holds them. Several
            ranks may hold the same one.
    """

    shape: Shape
    dim: int
    held: tuple[tuple[Stretch, ...], ...]

    @property
    def degree(self) -> int:
        return len(self.held)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return all(held == ((0, self.shape[self.dim]),) for held in self.held)

    def shard_shape(self, rank: int) -> Shape:
        """Shape of what one rank holds."""
        width = sum(stop - start for start, stop in self.held[rank])
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])


def replicated(shape: Shape, degree: int) -> TPLayout:
    """Every rank holds all."""
    size = shape[0] if shape else 1
    return TPLayout(shape or (1,), 0, (((0, size),),) * degree)


def fused(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> TPLayout:
    """Sub-parameters that lie one behind the other in a dimension, each cut on its own.

    Args:
        shape: of the logical parameter.
        dim: the dimension that is cut.
        widths: per sub-parameter, how many elements each rank holds. One sub-parameter is a plain cut.
    """
    degree = len(widths[0])
    held: list[list[Stretch]] = [[] for _ in range(degree)]
    position = 0
    for parts in widths:
        for rank, width in enumerate(parts):
            if width:
                held[rank].append((position, position + width))
            position += width
    return TPLayout(shape, dim, tuple(map(tuple, held)))


@dataclass(frozen=True)
class ShardSources:
    """Where one live shard of a parameter gets its elements from.

    Attributes:
        bands: (saved shard, band): the source is that shard, the target the live one.
        blend: whether an element is ``scale`` times the sum over all bands' sources, and not a copy of one.
        scale: see ``blend``.
        missing: ranges of the live shard that no saved one has.
    """

    bands: tuple[tuple[int, StridedCopy], ...]
    blend: bool = False
    scale: float = 1.0
    missing: tuple[FlatRange, ...] = ()


@functools.lru_cache(maxsize=1024)
def copied(shard: int, numel: int) -> ShardSources:
    """The live shard is a saved one."""
    return ShardSources(((shard, whole_band(numel)),))


def blended(shards: int, numel: int, scale: float) -> ShardSources:
    """The live shard is ``scale`` times the sum of all saved ones."""
    return ShardSources(tuple((shard, whole_band(numel)) for shard in range(shards)), True, scale)


def reshard(source: TPLayout, target: TPLayout, rank: int) -> ShardSources:
    """What a live rank takes from the shards of a checkpoint; of stretches that several hold, the first one's.

    Args:
        source: how the checkpoint's ranks held the parameter.
        target: how the live ranks hold it; of the same shape but for the dimension that is cut, which may have more or
            fewer elements at its end (padding of a vocabulary).
        rank: the live rank.

    Raises:
        ValueError: elements that no saved shard has, along a dimension that is not the first.
    """
    inner = math.prod(target.shape[target.dim + 1 :])
    rows = math.prod(target.shape[: target.dim])
    owners = _owners(source)
    target_width = sum(stop - start for start, stop in target.held[rank]) * inner
    bands: list[tuple[int, StridedCopy]] = []
    missing: list[FlatRange] = []
    position = 0
    for start, stop in target.held[rank]:
        at = start
        for low, high, shard, offset in _overlapping(owners, start, stop):
            if low > at:
                missing.append(FlatRange((position + at - start) * inner, (position + low - start) * inner))
            width = sum(b - a for a, b in source.held[shard]) * inner
            here = (position + low - start) * inner
            bands.append(
                (shard, StridedCopy(rows, (high - low) * inner, offset * inner, width, here, target_width).joined())
            )
            at = high
        if at < stop:
            missing.append(FlatRange((position + at - start) * inner, (position + stop - start) * inner))
        position += stop - start
    if missing and rows > 1:
        raise ValueError(f"no saved shard has all of dimension {target.dim}")
    return ShardSources(_merged(bands), missing=tuple(missing))


#: The same elements in two saved shards: (shard, band); both bands have the same target.
Overlap = tuple[tuple[int, StridedCopy], tuple[int, StridedCopy]]


def duplicates(split: TPLayout) -> tuple[Overlap, ...]:
    """The elements that several ranks hold: each copy beside that of the first rank that holds them."""
    inner, rows = math.prod(split.shape[split.dim + 1 :]), math.prod(split.shape[: split.dim])
    owners, found = _owners(split), []

    def band(rank: int, offset: int, width: int) -> tuple[int, StridedCopy]:
        stride = sum(stop - start for start, stop in split.held[rank]) * inner
        return rank, StridedCopy(rows, width * inner, offset * inner, stride, 0, width * inner).joined()

    for rank, stretches in enumerate(split.held):
        position = 0
        for start, stop in stretches:
            for low, high, owner, offset in _overlapping(owners, start, stop):
                mine = position + low - start
                if (owner, offset) != (rank, mine):
                    found.append((band(owner, offset, high - low), band(rank, mine, high - low)))
            position += stop - start
    return tuple(found)


def _owners(split: TPLayout) -> list[tuple[int, int, int, int]]:
    """The stretches of a dimension, each once: (start, stop, rank that holds it, where in its shard), ascending."""
    found: list[tuple[int, int, int, int]] = []
    for rank, stretches in enumerate(split.held):
        position = 0
        for start, stop in stretches:
            for low, high in _without(found, start, stop):
                found.append((low, high, rank, position + low - start))
            position += stop - start
    return sorted(found)


def _without(found: Iterable[tuple[int, int, int, int]], start: int, stop: int) -> list[Stretch]:
    """What of a stretch is not in any of those already found."""
    rest = [(start, stop)]
    for low, high, *_ in found:
        rest = [piece for a, b in rest for piece in ((a, min(b, low)), (max(a, high), b)) if piece[0] < piece[1]]
    return rest


def _overlapping(
    owners: Sequence[tuple[int, int, int, int]], start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    for low, high, rank, offset in owners:
        a, b = max(low, start), min(high, stop)
        if a < b:
            yield a, b, rank, offset + a - low


def _merged(bands: Sequence[tuple[int, StridedCopy]]) -> tuple[tuple[int, StridedCopy], ...]:
    """Neighbouring columns of one shard, joined."""
    merged: list[tuple[int, StridedCopy]] = []
    for shard, band in bands:
        if merged and merged[-1][0] == shard:
            last = merged[-1][1]
            if band == replace(band, source=last.source + last.width, target=last.target + last.width):
                if last.rows == 1:
                    width = last.width + band.width
                    merged[-1] = (shard, StridedCopy(1, width, last.source, width, last.target, width))
                else:
                    merged[-1] = (shard, replace(last, width=last.width + band.width).joined())
                continue
        merged.append((shard, band))
    return tuple(merged)

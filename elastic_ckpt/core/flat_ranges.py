"""Ranges of flat tensors: pure arithmetic.

A *flat range* counts elements of one logical parameter in row-major order and is half-open. Every ZeRO stage
partitions parameters along flat ranges only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class FlatRange:
    """Elements ``[start, stop)`` of a logical tensor, in row-major order."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: FlatRange) -> FlatRange | None:
        """The elements in both ranges, or ``None`` where they share none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return FlatRange(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class Placement:
    """Elements ``range`` of parameter number ``index``, at element ``flat_offset`` of one rank's flat partition."""

    index: int
    range: FlatRange
    flat_offset: int


def group_offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Offset of each parameter in a ZeRO-1/2 flat group, in elements; ``paddings``: ``param_alignment_paddings``."""
    offsets, position = [], 0
    for index, numel in enumerate(numels):
        offsets.append(position)
        position += numel + (paddings[index] if paddings else 0)
    return offsets


def contiguous_partition(
    numels: Sequence[int], offsets: Sequence[int], partition_numel: int, rank: int
) -> Iterator[Placement]:
    """A rank's placements with ZeRO-1/2, in flat order: the group is one flat buffer, divided equally over the ranks.

    See ``partition_size`` in ``DeepSpeedZeroOptimizer.__init__`` (stage_1_and_2.py).
    """
    left = rank * partition_numel
    mine = FlatRange(left, left + partition_numel)
    for index, (numel, offset) in enumerate(zip(numels, offsets, strict=True)):
        common = FlatRange(offset, offset + numel).intersect(mine)
        if common is not None:
            yield Placement(index, FlatRange(common.start - offset, common.stop - offset), common.start - left)


def per_parameter_numel(numel: int, world_size: int, multiple: int = 1) -> int:
    """Elements of one parameter's ZeRO-3 partition, padding included.

    DeepSpeed's own is ``ceil(numel / world_size)``; ``"align_partitions"`` rounds it up to ``multiple`` elements.
    """
    least = -(-numel // world_size)
    return -(-least // multiple) * multiple


def per_parameter_partition(numels: Sequence[int], steps: Sequence[int], rank: int) -> Iterator[Placement]:
    """A rank's placements with ZeRO-3: a padded range of each parameter, one after the other.

    A rank beyond the end of a small parameter has none of it. See ``Init._partition_param``
    (partition_parameters.py).

    Args:
        numels, steps: elements of each parameter, and of its partition (:func:`per_parameter_numel`).
        rank: the rank.
    """
    offset = 0
    for index, (numel, step) in enumerate(zip(numels, steps, strict=True)):
        start, stop = min(rank * step, numel), min((rank + 1) * step, numel)
        if start < stop:
            yield Placement(index, FlatRange(start, stop), offset)
        offset += step

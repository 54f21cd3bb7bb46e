"""Ranges of flat tensors. Pure arithmetic: no tensors, files, collectives or devices.

A *flat range* counts elements of one logical parameter in row-major order, whatever its shape. Ranges are
half-open. ZeRO cuts parameters along flat ranges only, in each of its stages.
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
    """A range of one parameter inside one rank's flat partition.

    Attributes:
        index: position of the parameter in its group.
        range: elements of the parameter.
        flat_offset: of the first of them in the flat partition, in elements.
    """

    index: int
    range: FlatRange
    flat_offset: int


def group_offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Offset of each parameter in a ZeRO-1/2 flat group.

    Args:
        numels: element counts, in flat-buffer order.
        paddings: elements of alignment padding behind each parameter (``param_alignment_paddings``), or none.
    """
    offsets, position = [], 0
    for index, numel in enumerate(numels):
        offsets.append(position)
        position += numel + (paddings[index] if paddings else 0)
    return offsets


def contiguous_partition(
    numels: Sequence[int], offsets: Sequence[int], partition_numel: int, rank: int
) -> Iterator[Placement]:
    """What a rank holds with ZeRO-1/2, in flat order: the group is one flat buffer in equal partitions, one a rank.

    Source of the rule: ``DeepSpeedZeroOptimizer.__init__`` (stage_1_and_2.py), ``partition_size``.
    """
    left = rank * partition_numel
    mine = FlatRange(left, left + partition_numel)
    for index, (numel, offset) in enumerate(zip(numels, offsets, strict=True)):
        common = FlatRange(offset, offset + numel).intersect(mine)
        if common is not None:
            yield Placement(index, FlatRange(common.start - offset, common.stop - offset), common.start - left)


def per_parameter_numel(numel: int, world_size: int, multiple: int = 1) -> int:
    """Elements of one parameter's partition with ZeRO-3, padding included.

    Args:
        numel: of the parameter.
        world_size: number of partitions.
        multiple: ``"align_partitions"``: partitions are multiples of so many elements; DeepSpeed's own are
            ``ceil(numel / world_size)``.
    """
    least = -(-numel // world_size)
    return -(-least // multiple) * multiple


def per_parameter_partition(numels: Sequence[int], steps: Sequence[int], rank: int) -> Iterator[Placement]:
    """What a rank holds with ZeRO-3: a padded range of each parameter, one after the other.

    A rank beyond the end of a small parameter holds nothing of it. Source of the rule: ``Init._partition_param``
    (partition_parameters.py).

    Args:
        numels: of the parameters.
        steps: elements of each parameter's partition (:func:`per_parameter_numel`).
        rank: the rank.
    """
    offset = 0
    for index, (numel, step) in enumerate(zip(numels, steps, strict=True)):
        start, stop = min(rank * step, numel), min((rank + 1) * step, numel)
        if start < stop:
            yield Placement(index, FlatRange(start, stop), offset)
        offset += step

"""Ranges of flat tensors, and the shapes that files claim: pure arithmetic.

A *flat range* counts elements of one logical parameter in row-major order and is half-open. Every ZeRO stage
partitions parameters along flat ranges only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, order=True, unsafe_hash=True)  # not frozen: that takes three times as long to make
class FlatRange:
    """Elements ``[start, stop)`` of a logical tensor, in row-major order. Immutable."""

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
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        return FlatRange(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class Placement:
    """Elements ``range`` of parameter number ``index``, at element ``flat_offset`` of one rank's flat partition."""

    index: int
    range: FlatRange
    flat_offset: int


def group_offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Offset of each parameter in a ZeRO-1/2 flat group, in elements; ``paddings``: ``param_alignment_paddings``."""
    offsets = []
    position = 0
    for index, numel in enumerate(numels):
        offsets.append(position)
        position += numel + (paddings[index] if paddings else 0)
    return offsets


def per_parameter_numel(numel: int, world_size: int, multiple: int = 1) -> int:
    """Elements of one parameter's ZeRO-3 partition, padding included.

    DeepSpeed's own is ``ceil(numel / world_size)``; ``"align_partitions"`` rounds it up to ``multiple`` elements.
    """
    least = -(-numel // world_size)
    return -(-least // multiple) * multiple


#: Dimensions of a tensor of torch, at most.
_MOST_DIMENSIONS = 64
#: Largest size of a dimension, and number of elements: those of torch have 63 bits.
_LARGEST_SIZE = 1 << 62


def checked_shape(sizes: Collection[Any], of: str = "a tensor") -> tuple[int, ...]:
    """Sizes, strides or offsets, checked to be such; :class:`ValueError`, which names what they are ``of``.

    Every shape that a file claims passes through here before its sizes are multiplied, which takes minutes for
    thousands of dimensions, or for a few of thousands of digits.
    """
    if len(sizes) > _MOST_DIMENSIONS:
        raise ValueError(f"{of[:200]} has {len(sizes)} dimensions, where {_MOST_DIMENSIONS} are the most")
    for size in sizes:
        if type(size) is not int or not 0 <= size < _LARGEST_SIZE:
            raise ValueError(f"{of[:200]} has a size, stride or offset that is none")
    return tuple(sizes)


def checked_tensor_shape(sizes: Collection[Any], of: str = "a tensor") -> tuple[int, ...]:
    """The shape of a tensor, checked to be one that torch can make: its strides have 63 bits, too.

    That matters for empty tensors alone, which are in any file whatever their sizes are.
    """
    shape = checked_shape(sizes, of)
    if 0 in shape and math.prod(size or 1 for size in shape) >= _LARGEST_SIZE:
        raise ValueError(f"{of[:200]} has a shape that no tensor has: {shape}")
    return shape

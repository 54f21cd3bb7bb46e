"""Shapes as files claim them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

#: torch has as many dimensions at most, and sizes of 63 bits.
_MOST_DIMENSIONS, _LARGEST_SIZE = 64, 1 << 62


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

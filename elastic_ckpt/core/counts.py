"""Numbers that a file claims, of which it may claim any: compared with what is there, never counted up to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

#: Digits of a number in a name; a longer one is none of a layer, an expert or a rank.
MOST_DIGITS = 9


def first_apart(count: int, present: Collection[int]) -> int | None:
    """The least number that is either below ``count`` or among ``present``; ``None``: these are all below ``count``.

    Takes as many steps as there are ``present``, whatever ``count`` is.
    """
    gap = next(gaps(count, present), None)
    beyond = min((number for number in present if not 0 <= number < count), default=None)
    return beyond if gap is None or (beyond is not None and beyond < gap) else gap


def gaps(count: int, present: Collection[int]) -> Iterator[int]:
    """The numbers below ``count`` that are not among ``present``, in order, one at a time."""
    return (number for number in range(count) if number not in present)


def in_proportion(widths: Sequence[int]) -> list[int]:
    """The smallest whole numbers that are to each other as some widths are."""
    unit = math.gcd(*widths)
    return [width // unit for width in widths]

"""Sets of half-open intervals of integers, as numpy arrays: who covers what, and how often. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """Intervals ``[starts[i], stops[i])``, in any order; they may overlap, and be empty."""

    starts: Numbers
    stops: Numbers

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def numel(self) -> int:
        """Integers in them; one in two intervals counts twice."""
        return int((self.stops - self.starts).sum())

    def moved(self, distance: int) -> Intervals:
        """The same intervals elsewhere."""
        return Intervals(self.starts + distance, self.stops + distance)


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Of (start, stop)."""
    array = rows_of(list(pairs), 2)
    return Intervals(array[:, 0], array[:, 1])


def together(parts: Sequence[Intervals]) -> Intervals:
    """All of several."""
    if not parts:
        return intervals(())
    return Intervals(np.concatenate([part.starts for part in parts]), np.concatenate([part.stops for part in parts]))


def strided(rows: Sequence[tuple[int, int, int, int]] | Numbers) -> Intervals:
    """Of (start, width, how often, distance from one to the next)."""
    array = rows_of(rows, 4)
    start, width, count, stride = array.T
    joined = (count > 1) & (stride == width)  # no gaps between them
    width, count = np.where(joined, width * count, width), np.where(joined, 1, count)
    which = np.repeat(np.arange(len(start)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    starts = start[which] + number * stride[which]
    return Intervals(starts, starts + width[which])


def rows_of(rows: Sequence[Any] | Numbers, columns: int) -> Numbers:
    """An array of so many columns, be it without rows."""
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


@dataclass(frozen=True)
class Stretches:
    """Neighbouring stretches of integers, ascending, and how often each is covered.

    Attributes:
        starts, stops: of the stretches, none of them empty.
        counts: sum of the weights of the intervals over each, a column for each kind of intervals.
    """

    starts: Numbers
    stops: Numbers
    counts: Numbers


def coverage(kinds: Sequence[tuple[Intervals, Numbers | int]]) -> Stretches:
    """How often each stretch is covered.

    Args:
        kinds: (intervals, the weight of each): a column of the result for each.
    """
    positions, changes = [], []
    for column, (held, weights) in enumerate(kinds):
        weight = np.broadcast_to(np.asarray(weights, dtype=np.int64), held.starts.shape)
        for ends, sign in ((held.starts, 1), (held.stops, -1)):
            change = np.zeros((len(ends), len(kinds)), dtype=np.int64)
            change[:, column] = sign * weight
            positions.append(ends)
            changes.append(change)
    position = np.concatenate(positions) if positions else rows_of([], 1)[:, 0]
    order = np.argsort(position, kind="stable")
    position = position[order]
    counts = np.cumsum(np.concatenate(changes)[order], axis=0) if len(position) else rows_of([], len(kinds))
    wide = np.flatnonzero(position[1:] > position[:-1]) if len(position) else np.array([], dtype=np.int64)
    return Stretches(position[wide], position[wide + 1], counts[wide])


def covers_exactly(held: Intervals, wanted: Intervals) -> bool:
    """Whether ``held`` covers every integer of ``wanted`` once, and nothing else; ``wanted`` does not overlap itself.

    The quick answer; :func:`coverage` tells where it does not.
    """
    runs, required = _runs(held), _runs(wanted)
    if runs is None or required is None:
        return False
    return np.array_equal(runs.starts, required.starts) and np.array_equal(runs.stops, required.stops)


def _runs(held: Intervals) -> Intervals | None:
    """Touching intervals joined, ascending; ``None``: some overlap."""
    full = held.stops > held.starts
    order = np.argsort(held.starts[full], kind="stable")
    starts, stops = held.starts[full][order], held.stops[full][order]
    if (starts[1:] < stops[:-1]).any():
        return None
    apart = starts[1:] != stops[:-1]
    ends = np.ones(1, dtype=bool) if len(starts) else np.ones(0, dtype=bool)
    return Intervals(starts[np.concatenate([ends, apart])], stops[np.concatenate([apart, ends])])

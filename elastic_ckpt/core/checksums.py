"""Checksums of records that several readers read in parts.

The CRC32 of a record is the XOR of its parts' CRC32s, each moved to the record's end. So one number sums up the ranges
of a record that a reader saw, and the XOR of several readers' numbers what all of them saw. Whether their ranges tile
the record, each byte once, is shown by a sum of hashes: each range adds the hash of its end and takes away that of its
start. Where one range ends at the other's start, the two cancel; of ranges that tile the record, the hash of its end
less that of its start is left, and of no others but for a chance of one in 2**64.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from isal import isal_zlib


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a file that hold tensors: byte offsets, ascending, sizes in bytes, and CRC32s (0: unknown)."""

    offsets: Sequence[int] = field(default_factory=lambda: array("Q"))
    nbytes: Sequence[int] = field(default_factory=lambda: array("Q"))
    crc32s: Sequence[int] = field(default_factory=lambda: array("I"))

    @classmethod
    def of(cls, records: Iterable[tuple[int, int, int]]) -> Records:
        """Records from (offset, size, CRC32), in any order; several of one offset are one."""
        return cls.of_columns(*chain.from_iterable(zip(*sorted(set(records)), strict=True)))

    @classmethod
    def of_columns(cls, *numbers: int) -> Records:
        """Records from all offsets, ascending, then all sizes, then all CRC32s."""
        count = len(numbers) // 3
        return cls(array("Q", numbers[:count]), array("Q", numbers[count:-count]), array("I", numbers[-count:]))

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.offsets, self.nbytes, self.crc32s, strict=True)

    def __reduce__(self) -> tuple[Any, ...]:  # of many small files, which the description of an array would double
        return Records.of_columns, (*self.offsets, *self.nbytes, *self.crc32s)

    def index(self, offset: int) -> int | None:
        """Number of the record with a byte of the file; ``None``: it is in none whose CRC32 is known."""
        number = bisect_right(self.offsets, offset) - 1
        if number < 0 or offset >= self.offsets[number] + self.nbytes[number] or not self.crc32s[number]:
            return None
        return number


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Sum of some ranges of a record."""

    crc32: int = 0  # XOR of the ranges' CRC32s, each moved to the record's end
    nbytes: int = 0  # of all ranges
    edges: int = 0  # hashes of the ranges' ends, less those of their starts, modulo 2**64

    @classmethod
    def of(cls, start: int, stop: int, crc32: int, record_nbytes: int) -> PartialSum:
        """The sum of one range whose bytes have a CRC32."""
        moved = isal_zlib.crc32_combine(crc32, 0, record_nbytes - stop)
        return cls(moved, stop - start, _hash(stop) - _hash(start) & _MASK)

    def __or__(self, other: PartialSum) -> PartialSum:
        edges = self.edges + other.edges & _MASK
        return PartialSum(self.crc32 ^ other.crc32, self.nbytes + other.nbytes, edges)

    def tiles(self, record_nbytes: int) -> bool:
        """Whether each byte of the record was summed once."""
        return self.nbytes == record_nbytes and self.edges == _hash(record_nbytes) - _hash(0) & _MASK


_MASK = (1 << 64) - 1


def _hash(position: int) -> int:
    """64 bits that look random, of a position in a record: the finalizer of SplitMix64."""
    mixed = position + 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31

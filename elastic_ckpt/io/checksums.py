"""Sums up the bytes that a load reads, while they are in the processor's cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from isal import isal_zlib

from elastic_ckpt.core.checksums import PartialSum
from elastic_ckpt.core.metadata import SourceFile

#: Bytes that are read before they are summed: few enough to be in the cache still, enough for few calls.
SUMMED_AT_ONCE_NBYTES = 1 << 20


class Unwanted(bytearray):
    """Memory for the bytes between two merged reads; threads overwrite each other's, so it is never summed."""


class ReadSums:
    """Sums of what was read of each record. Thread-safe.

    Attributes:
        sums: by (index of the file, number of its record).
        nbytes: bytes read, whether they are of a record or not.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.sums: dict[tuple[int, int], PartialSum] = {}
        self.nbytes = 0
        self._files = files
        self._lock = threading.Lock()

    def add(self, file: int, byte_offset: int, buffers: Sequence[memoryview]) -> None:
        """Add bytes that were just read from an offset on."""
        start, stop, crc32 = byte_offset, byte_offset, 0
        for buffer in buffers:
            if isinstance(buffer.obj, Unwanted):
                self._add_range(file, start, stop, crc32)
                stop += len(buffer)
                start, crc32 = stop, 0
            else:
                crc32 = isal_zlib.crc32(buffer, crc32)
                stop += len(buffer)
        self._add_range(file, start, stop, crc32)

    def _add_range(self, file: int, start: int, stop: int, crc32: int) -> None:
        if start == stop:
            return
        records = self._files[file].records
        number = records.index(start)
        with self._lock:
            self.nbytes += stop - start
            if number is not None:
                begin = records.offsets[number]
                part = PartialSum.of(start - begin, stop - begin, crc32, records.nbytes[number])
                key = file, number
                self.sums[key] = self.sums[key] | part if key in self.sums else part


def first_bytes(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The buffers up to a number of bytes; the last may be cut short."""
    found = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        found.append(buffer[:nbytes])
        nbytes -= len(buffer)
    return found

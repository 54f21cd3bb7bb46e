"""Sums up the bytes that a load reads, while they are in the processor's cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from elastic_ckpt.core.checksums import PartialSum
from elastic_ckpt.core.metadata import SourceFile

#: Bytes that are read before they are summed: few enough to be in the cache still, enough for few calls.
SUMMED_AT_ONCE_NBYTES = 1 << 20


class Unwanted(bytearray):
    """Memory for the bytes between two merged reads; threads overwrite each other's, so it is never summed."""


@dataclass(slots=True)
class _Run:
    """Consecutive bytes of a file that one thread has read."""

    file: int = -1
    start: int = 0
    stop: int = 0
    crc32: int = 0


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
        self._mine = threading.local()
        self._runs: list[_Run] = []
        self._lock = threading.Lock()

    def add(self, file: int, byte_offset: int, buffers: Sequence[memoryview]) -> None:
        """Add bytes that this thread has just read from an offset on."""
        run = self._run()
        for buffer in buffers:
            if not isinstance(buffer.obj, Unwanted):
                if run.file != file or run.stop != byte_offset:
                    self._end(run)
                    run.file, run.start, run.crc32 = file, byte_offset, 0
                run.crc32 = isal_zlib.crc32(buffer, run.crc32)
                run.stop = byte_offset + len(buffer)
            byte_offset += len(buffer)

    def finish(self) -> Mapping[tuple[int, int], PartialSum]:
        """The sums, once all threads are done."""
        for run in self._runs:
            self._end(run)
        return self.sums

    def _run(self) -> _Run:
        run: _Run | None = getattr(self._mine, "run", None)
        if run is None:
            run = self._mine.run = _Run()
            with self._lock:
                self._runs.append(run)
        return run

    def _end(self, run: _Run) -> None:
        if run.file < 0:
            return
        records = self._files[run.file].records
        number, nbytes = records.index(run.start), run.stop - run.start
        with self._lock:
            self.nbytes += nbytes
            if number is not None:
                start = run.start - records.offsets[number]
                part = PartialSum.of(start, start + nbytes, run.crc32, records.nbytes[number])
                key = run.file, number
                self.sums[key] = self.sums[key] | part if key in self.sums else part
        run.file = -1


def first_bytes(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The buffers up to a number of bytes; the last may be cut short."""
    return list(_first_bytes(buffers, nbytes))


def _first_bytes(buffers: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if nbytes <= 0:
            return
        yield buffer if len(buffer) <= nbytes else buffer[:nbytes]
        nbytes -= len(buffer)

"""One pass over the bytes of files: CRC32 of every record, and a look at every value that must be a number.

Files are cut into slices, which threads read through a small buffer each, whatever the size of a file or record: the
checksums of a record's parts are combined. A chunk is checked while it lies in the processor's cache. ``preadv``, not a
memory map: where a disk fails under a map, the process dies instead of naming the file.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from isal import isal_zlib
from tqdm import tqdm

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.tools.verification.records import Record
from elastic_ckpt.tools.verification.scan import FINE, Seen, Span, look

#: Small enough for a processor's cache; a multiple of every item size, so that no aligned value lies across two.
CHUNK_NBYTES = 1 << 20
SLICE_NBYTES = 64 * CHUNK_NBYTES


@dataclass(frozen=True)
class Work:
    """What is to be checked in one file.

    Attributes:
        path, nbytes: the file.
        records: of which the CRC32 is taken.
        spans: which are looked at.
    """

    path: str
    nbytes: int
    records: tuple[Record, ...] = ()
    spans: tuple[Span, ...] = ()


@dataclass
class Checked:
    """What came of one file.

    Attributes:
        nbytes: that were read.
        crc32: of each record, as its bytes are, and of how many of them.
        seen: the spans with values that are no numbers.
        failure: why the file could not be read to its end.
    """

    nbytes: int = 0
    crc32: dict[Record, tuple[int, int]] = field(default_factory=dict)
    seen: dict[Span, Seen] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class _Part:
    """What came of one slice: per record, the CRC32 of its bytes here and how many they are."""

    nbytes: int = 0
    crcs: list[tuple[int, int, int]] = field(default_factory=list)
    seen: dict[int, Seen] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class _Slice:
    """Bytes of one file, and the numbers of the records and spans of the work that lie in them."""

    work: int
    start: int
    stop: int
    records: tuple[int, ...]
    spans: tuple[int, ...]


def check(works: Sequence[Work], threads: int, show_progress: bool | None = False) -> list[Checked]:
    """Read files and check them.

    Args:
        works: the files.
        threads: how many read at once; each has a buffer of :data:`CHUNK_NBYTES`.
        show_progress: whether to draw a bar on standard error; ``None``: if that is a terminal.
    """
    results = [Checked() for _ in works]
    slices = [piece for number, work in enumerate(works) for piece in _slices(number, work)]
    disable = None if show_progress is None else not show_progress
    buffers = threading.local()

    def run(piece: _Slice) -> tuple[_Slice, _Part]:
        if not hasattr(buffers, "mine"):
            buffers.mine = bytearray(CHUNK_NBYTES)
        part = _Part()
        try:
            _check_slice(works[piece.work], piece, buffers.mine, part)
        except OSError as error:
            part.failure = f"{type(error).__name__}: {error.strerror or error}"
        return piece, part

    with _one_thread_each(), ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool:
        total = sum(work.nbytes for work in works)
        with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=disable, leave=False) as bar:
            try:
                for piece, part in pool.map(run, slices):
                    _add(results[piece.work], works[piece.work], part)
                    bar.update(part.nbytes)
            except BaseException:  # Ctrl-C must not wait for a terabyte that nobody will ask for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return results


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Our threads look at values side by side; torch shall not start threads of its own for each of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _slices(number: int, work: Work) -> Iterator[_Slice]:
    count = max(1, -(-work.nbytes // SLICE_NBYTES))
    records: list[list[int]] = [[] for _ in range(count)]
    spans: list[list[int]] = [[] for _ in range(count)]
    for index, record in enumerate(work.records):
        for place in _touched(record.offset, record.nbytes, count):
            records[place].append(index)
    for index, span in enumerate(work.spans):
        # a value of a misaligned span may lie across two chunks, so that such spans are read on their own, at once
        reach = span.nbytes if span.is_aligned else 1
        for place in _touched(span.byte_offset, reach, count):
            spans[place].append(index)
    for place in range(count):
        start = place * SLICE_NBYTES
        stop = min(start + SLICE_NBYTES, work.nbytes)
        yield _Slice(number, start, stop, tuple(records[place]), tuple(spans[place]))


def _touched(start: int, nbytes: int, count: int) -> range:
    """Numbers of the slices in which some bytes lie."""
    if not nbytes:
        return range(0)
    return range(min(start // SLICE_NBYTES, count), min((start + nbytes - 1) // SLICE_NBYTES + 1, count))


def _check_slice(work: Work, piece: _Slice, buffer: bytearray, part: _Part) -> None:
    chunks = -(-(piece.stop - piece.start) // CHUNK_NBYTES)
    records: list[list[int]] = [[] for _ in range(chunks)]
    spans: list[list[int]] = [[] for _ in range(chunks)]
    for index in piece.records:
        record = work.records[index]
        for chunk in _chunks(piece, record.offset, record.nbytes):
            records[chunk].append(index)
    alone = [index for index in piece.spans if not work.spans[index].is_aligned]
    for index in piece.spans:
        span = work.spans[index]
        for chunk in _chunks(piece, span.byte_offset, span.nbytes) if span.is_aligned else ():
            spans[chunk].append(index)
    crcs: dict[int, tuple[int, int]] = {}
    descriptor = os.open(work.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, piece.start, piece.stop - piece.start, os.POSIX_FADV_SEQUENTIAL)
        for chunk in range(chunks):
            start = piece.start + chunk * CHUNK_NBYTES
            view = memoryview(buffer)[: min(CHUNK_NBYTES, piece.stop - start)]
            _read(descriptor, start, view)
            part.nbytes += len(view)
            for index in records[chunk]:
                low, high = _inside(start, len(view), work.records[index].offset, work.records[index].nbytes)
                crc, nbytes = crcs.get(index, (0, 0))
                crcs[index] = isal_zlib.crc32(view[low:high], crc), nbytes + high - low
            for index in spans[chunk]:
                _look_inside(work.spans[index], index, start, view, part)
        for index in alone:
            _look_alone(descriptor, work.spans[index], index, buffer, part)
    finally:
        os.close(descriptor)
    part.crcs = [(index, crc, nbytes) for index, (crc, nbytes) in crcs.items()]


def _chunks(piece: _Slice, start: int, nbytes: int) -> range:
    """Numbers of the chunks of a slice in which some bytes lie."""
    low, high = max(start, piece.start), min(start + nbytes, piece.stop)
    if low >= high:
        return range(0)
    return range((low - piece.start) // CHUNK_NBYTES, (high - 1 - piece.start) // CHUNK_NBYTES + 1)


def _inside(chunk: int, chunk_nbytes: int, start: int, nbytes: int) -> tuple[int, int]:
    """The part of some bytes that lies in a chunk, counted from its start."""
    return max(start - chunk, 0), min(start + nbytes - chunk, chunk_nbytes)


def _read(descriptor: int, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, at byte {offset + done}") from error
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}: it became shorter while it was read")
        done += count


def _look_inside(span: Span, index: int, chunk: int, view: memoryview, part: _Part) -> None:
    low, high = _inside(chunk, len(view), span.byte_offset, span.nbytes)
    itemsize = ITEMSIZE[span.dtype]
    if (count := (high - low) // itemsize) > 0:
        values = torch.frombuffer(view, dtype=getattr(torch, span.dtype), count=count, offset=low)
        _note(look(values).moved((chunk + low - span.byte_offset) // itemsize), index, part)


def _look_alone(descriptor: int, span: Span, index: int, buffer: bytearray, part: _Part) -> None:
    for start in range(0, span.nbytes, CHUNK_NBYTES):
        view = memoryview(buffer)[: min(CHUNK_NBYTES, span.nbytes - start)]
        _read(descriptor, span.byte_offset + start, view)
        values = torch.frombuffer(view, dtype=getattr(torch, span.dtype))
        _note(look(values).moved(start // ITEMSIZE[span.dtype]), index, part)


def _note(seen: Seen, index: int, part: _Part) -> None:
    if seen != FINE:
        part.seen[index] = part.seen.get(index, FINE) + seen


def _add(result: Checked, work: Work, part: _Part) -> None:
    """Add what came of the next slice of a file, in file order."""
    result.nbytes += part.nbytes
    result.failure = result.failure or part.failure
    for index, crc, nbytes in part.crcs:
        record = work.records[index]
        before, done = result.crc32.get(record, (0, 0))
        combined = isal_zlib.crc32_combine(before, crc, nbytes) if done else crc
        result.crc32[record] = combined, done + nbytes
    for index, seen in part.seen.items():
        span = work.spans[index]
        result.seen[span] = result.seen.get(span, FINE) + seen


def wrong_records(work: Work, checked: Checked) -> dict[Record, int]:
    """The records that are not as they were written -> the CRC32 of what they are now.

    A CRC32 of 0 is none where all of a file's are (``torch.serialization.set_crc32_options(False)``); and of a record
    that could not be read to its end, nothing can be said.
    """
    if not has_checksums(work):
        return {}
    wrong = {}
    for record in work.records:
        crc, nbytes = checked.crc32.get(record, (0, 0))
        if nbytes == record.nbytes and crc != record.crc32:
            wrong[record] = crc
    return wrong


def has_checksums(work: Work) -> bool:
    """Whether the file was saved with checksums, or has nothing that could have one."""
    return any(record.crc32 for record in work.records) or not any(record.nbytes for record in work.records)

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
from elastic_ckpt.tools.verification.archive import Record
from elastic_ckpt.tools.verification.scan import Odd, Span, add_odd, look

#: Small enough for a processor's cache.
CHUNK_NBYTES = 1 << 20
SLICE_NBYTES = 64 * CHUNK_NBYTES
#: What is read behind a chunk, so that values that begin in it are whole: the largest item, less one byte.
_MORE_NBYTES = max(ITEMSIZE.values()) - 1


@dataclass(frozen=True)
class Work:
    """What is to be checked in one file, or in bytes ``[start, stop)`` of it.

    Attributes:
        path: of the file.
        stop: size of the file, or end of the part.
        items: the records, of which the CRC32 is taken, and the spans, whose values are looked at.
        start: of the part.
    """

    path: str
    stop: int
    items: tuple[Record | Span, ...] = ()
    start: int = 0


@dataclass
class Checked:
    """What came of one file, or of a part of it.

    Attributes:
        nbytes: that were read.
        crc32: of each record, as its bytes are, and of how many of them.
        odd: the spans with values that are no numbers.
        failure: why the file could not be read to its end.
    """

    nbytes: int = 0
    crc32: dict[Record, tuple[int, int]] = field(default_factory=dict)
    odd: dict[Span, Odd] = field(default_factory=dict)
    failure: str | None = None

    def add(self, following: Checked) -> None:
        """Add what came of the next part of the file."""
        self.nbytes += following.nbytes
        self.failure = self.failure or following.failure
        for record, (crc, nbytes) in following.crc32.items():
            before, done = self.crc32.get(record, (0, 0))
            self.crc32[record] = isal_zlib.crc32_combine(before, crc, nbytes) if done else crc, done + nbytes
        for span, odd in following.odd.items():
            add_odd(self.odd.setdefault(span, {}), odd)


def check(works: Sequence[Work], threads: int, show_progress: bool | None = False) -> list[Checked]:
    """Read files and check them.

    Args:
        works: the files.
        threads: how many read at once; each has a buffer of :data:`CHUNK_NBYTES`.
        show_progress: whether to draw a bar on standard error; ``None``: if that is a terminal.
    """
    results = [Checked() for _ in works]
    parts = [(number, part) for number, work in enumerate(works) for part in _split(work, SLICE_NBYTES)]
    disable = None if show_progress is None else not show_progress
    buffers = threading.local()

    def run(part: Work) -> Checked:
        if not hasattr(buffers, "mine"):
            buffers.mine = memoryview(bytearray(CHUNK_NBYTES + _MORE_NBYTES))
        result = Checked()
        try:
            _check_part(part, buffers.mine, result)
        except OSError as error:
            result.failure = f"{type(error).__name__}: {error.strerror or error}"
        return result

    with _one_thread_each(), ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool:
        total = sum(work.stop for work in works)
        with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=disable, leave=False) as bar:
            try:
                found = pool.map(run, [part for _, part in parts])
                for (number, _), result in zip(parts, found, strict=True):
                    results[number].add(result)
                    bar.update(result.nbytes)
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


def _split(work: Work, step: int) -> list[Work]:
    """Parts of ``step`` bytes, each with the items that have bytes in it; one part at least."""
    starts = range(work.start, max(work.stop, work.start + 1), step)
    items: list[list[Record | Span]] = [[] for _ in starts]
    for item in work.items:
        low, high = max(item.offset, work.start), min(item.offset + item.nbytes, work.stop)
        if low < high:
            for number in range((low - work.start) // step, (high - 1 - work.start) // step + 1):
                items[number].append(item)
    return [
        Work(work.path, min(start + step, work.stop), tuple(inside), start)
        for start, inside in zip(starts, items, strict=True)
    ]


def _check_part(part: Work, buffer: memoryview, result: Checked) -> None:
    descriptor = os.open(part.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, part.start, part.stop - part.start, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(descriptor).st_size
        for chunk in _split(part, CHUNK_NBYTES):
            nbytes = chunk.stop - chunk.start
            view = buffer[: max(nbytes, min(nbytes + _MORE_NBYTES, size - chunk.start))]
            _read(descriptor, chunk.start, view)
            result.nbytes += nbytes
            for item in chunk.items:
                if isinstance(item, Record):
                    low, high = max(item.offset - chunk.start, 0), item.offset + item.nbytes - chunk.start
                    crc, done = result.crc32.get(item, (0, 0))
                    inside = view[low : min(high, nbytes)]
                    result.crc32[item] = isal_zlib.crc32(inside, crc), done + len(inside)
                else:
                    _look_at(item, chunk, view, result)
    finally:
        os.close(descriptor)


def _look_at(span: Span, chunk: Work, view: memoryview, result: Checked) -> None:
    """Look at the values of a span that begin in a chunk."""
    itemsize = ITEMSIZE[span.dtype]
    first = max(-(-(chunk.start - span.offset) // itemsize), 0)
    stop = min(-(-(chunk.stop - span.offset) // itemsize), span.numel)
    if first < stop:
        low = span.offset + first * itemsize - chunk.start
        raw = view[low : low + (stop - first) * itemsize]
        aligned = raw if low % itemsize == 0 else bytearray(raw)
        if odd := look(torch.frombuffer(aligned, dtype=getattr(torch, span.dtype))):
            add_odd(result.odd.setdefault(span, {}), odd, first)


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


def wrong_records(work: Work, checked: Checked) -> dict[Record, int]:
    """The records that are not as they were written -> the CRC32 of what they are now.

    A CRC32 of 0 is none where all of a file's are (``torch.serialization.set_crc32_options(False)``); and of a record
    that could not be read to its end, nothing is known.
    """
    records = [item for item in work.items if isinstance(item, Record)] if has_checksums(work) else []
    now = {record: checked.crc32.get(record, (0, 0)) for record in records}
    return {record: crc for record, (crc, n) in now.items() if n == record.nbytes and crc != record.crc32}


def has_checksums(work: Work) -> bool:
    """Whether the file was saved with checksums, or has nothing that could have one."""
    records = [item for item in work.items if isinstance(item, Record)]
    return any(record.crc32 for record in records) or not any(record.nbytes for record in records)

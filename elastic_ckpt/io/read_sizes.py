"""How the reader splits a plan into reads, without a file and without memory. Pure.

What :mod:`elastic_ckpt.io.reader` does with buffers, piece after piece, is done here with numbers, copy after copy: a
strided copy of a hundred thousand rows takes no longer than one of two. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan
from elastic_ckpt.io.requantize import Chunk, chunks

#: Buffers that the kernel takes at most in one call (limits.h, IOV_MAX).
MAX_BUFFERS = 1024
#: Least size of a bounce buffer: an element of any dtype.
LEAST_STAGING_NBYTES = ITEMSIZE["complex128"]
_SCALE_NBYTES = 4
#: (bytes of a read, how many such reads)
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Sizes that the reader keeps within, in bytes.

    Attributes:
        chunk_nbytes: of a single read.
        staged_nbytes: of a single read into a bounce buffer.
        recode_nbytes: of host memory for one chunk of a recode.
        gap_nbytes: of what two reads may lie apart and yet be made in one.
    """

    chunk_nbytes: int
    staged_nbytes: int
    recode_nbytes: int
    gap_nbytes: int = 0


def read_sizes(plan: ReadPlan, limits: ReadLimits, on_accelerator: bool) -> list[Run]:
    """Sizes of the reads by which a plan is executed.

    Args:
        plan: of one rank.
        limits: see :class:`elastic_ckpt.io.reader.ReadOptions`.
        on_accelerator: whether its slots are where ``preadv`` cannot write, so that all goes through bounce buffers.
    """
    staged = [on_accelerator or copy.dtype != plan.slots[copy.slot].dtype for copy in plan.copies]
    direct = (copy for copy, through in zip(plan.copies, staged, strict=True) if not through)
    runs = list(_joined(direct, limits))
    for copy, through in zip(plan.copies, staged, strict=True):
        if through:
            runs += _split(copy, limits.staged_nbytes)
    for recode in plan.recodes:
        for chunk in chunks(recode, limits.recode_nbytes):
            runs.append((_nbytes_of(chunk), 1))
    return runs


def _nbytes_of(chunk: Chunk) -> int:
    nbytes = 0
    for piece in chunk.pieces:
        start = max(piece.start, chunk.start) - piece.start
        stop = min(piece.start + piece.numel, chunk.stop) - piece.start
        nbytes += (stop - start) * ITEMSIZE[piece.dtype]
        if piece.code is not None:
            block = piece.code.format.numel
            first, last = (piece.code.position + at for at in (start, stop - 1))
            nbytes += (last // block + 1 - first // block) * _SCALE_NBYTES
    return nbytes


def _split(copy: ReadItem, step_nbytes: int) -> Iterator[Run]:
    """Each row by itself, in steps of whole elements."""
    itemsize = ITEMSIZE[copy.dtype]
    step = max(step_nbytes // itemsize, 1)
    whole, rest = divmod(copy.numel, step)
    yield from ((numel * itemsize, count * copy.rows) for numel, count in ((step, whole), (rest, 1)) if numel and count)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one copy that are no longer than a chunk.

    Attributes:
        nbytes: of one.
        stride: bytes from one to the next.
        count: how many.
        buffers: that each but the first adds to a read: itself, and the gap before it.
        is_dense: whether several go into one read.
    """

    nbytes: int
    stride: int
    count: int
    buffers: int
    is_dense: bool

    def span(self, count: int) -> int:
        """Bytes from the start of the first to the end of the last."""
        return self.nbytes + (count - 1) * self.stride

    def fitting(self, room_nbytes: int, room_buffers: int) -> int:
        """How many go into so many bytes and, after the first, so many buffers."""
        if room_nbytes < self.nbytes or room_buffers < 0:
            return 0
        more = min((room_nbytes - self.nbytes) // self.stride, room_buffers // self.buffers) if self.is_dense else 0
        return min(1 + more, self.count)


@dataclass(slots=True)
class _Open:
    """The read that the next piece may still join."""

    file: int
    end: int
    nbytes: int
    buffers: int

    def join(self, copy: ReadItem, rows: _Rows, limits: ReadLimits) -> int:
        """How many of a copy's rows join it."""
        gap = copy.byte_offset - self.end
        if copy.file != self.file or not 0 <= gap <= limits.gap_nbytes:
            return 0
        first = 1 + (gap > 0)
        count = rows.fitting(limits.chunk_nbytes - self.nbytes - gap, MAX_BUFFERS - self.buffers - first)
        if count:
            self.nbytes += gap + rows.span(count)
            self.buffers += first + (count - 1) * rows.buffers
            self.end = copy.byte_offset + rows.span(count)
        return count


def _joined(copies: Iterable[ReadItem], limits: ReadLimits) -> Iterator[Run]:
    """Neighbours in the file, and those nearly so, go into one read; what is longer than a chunk is split."""
    last: _Open | None = None
    chunk_nbytes = limits.chunk_nbytes
    for copy in copies:
        nbytes, stride = copy.numel * ITEMSIZE[copy.dtype], copy.file_stride * ITEMSIZE[copy.dtype]
        if not nbytes:
            continue
        between = stride - nbytes
        is_dense = copy.rows > 1 and 0 <= between <= limits.gap_nbytes
        rows = _Rows(nbytes, stride, copy.rows, 1 + (between > 0), is_dense)
        end = copy.byte_offset + rows.span(copy.rows)
        left = copy.rows - (last.join(copy, rows, limits) if last is not None else 0)
        if not left:
            continue
        if last is not None:
            yield last.nbytes, 1
        if nbytes > chunk_nbytes:
            whole, rest = divmod(nbytes, chunk_nbytes)
            tail = rest or chunk_nbytes  # of the last row, which the next copy may join
            yield chunk_nbytes, whole * left - (0 if rest else 1)
            if rest and left > 1:
                yield rest, left - 1
            last = _Open(copy.file, end, tail, 1)
            continue
        at_once = rows.fitting(chunk_nbytes, MAX_BUFFERS - 1)
        whole, rest = divmod(left, at_once)
        whole, rest = (whole, rest) if rest else (whole - 1, at_once)
        if whole:
            yield rows.span(at_once), whole
        last = _Open(copy.file, end, rows.span(rest), 1 + (rest - 1) * rows.buffers)
    if last is not None:
        yield last.nbytes, 1

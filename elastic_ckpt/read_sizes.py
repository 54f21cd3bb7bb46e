"""How the reader splits a plan into reads, without a file and without memory. Pure.

What :mod:`elastic_ckpt.reader` does with buffers, piece after piece, is done here with numbers, copy after copy: a
strided copy of a hundred thousand rows takes no longer than one of two. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_ckpt.dtypes import ITEMSIZE
from elastic_ckpt.plan import Copy, Plan
from elastic_ckpt.recoder import chunks

#: Buffers that the kernel takes at most in one call (limits.h, IOV_MAX).
MAX_BUFFERS = 1024
#: Least size of a bounce buffer: an element of any dtype.
LEAST_STAGING_NBYTES = ITEMSIZE["complex128"]
_SCALE_NBYTES = 4
#: (bytes of a read, how many such reads)
Run = tuple[int, int]


def read_sizes(plan: Plan, threads: int, chunk_nbytes: int, staging_nbytes: int, on_accelerator: bool) -> list[Run]:
    """Sizes of the reads by which a plan is executed.

    Args:
        plan: of one rank.
        threads, chunk_nbytes, staging_nbytes: see :class:`elastic_ckpt.reader.ReadOptions`.
        on_accelerator: whether its slots are where ``preadv`` cannot write, so that all goes through bounce buffers.
    """
    staged = [on_accelerator or copy.dtype != plan.slots[copy.slot].dtype for copy in plan.copies]
    step_nbytes = min(max(staging_nbytes // threads, LEAST_STAGING_NBYTES), chunk_nbytes)
    direct = (copy for copy, through in zip(plan.copies, staged, strict=True) if not through)
    runs = list(_joined(direct, chunk_nbytes))
    for copy, through in zip(plan.copies, staged, strict=True):
        if through:
            runs += _split(copy, step_nbytes)
    for recode in plan.recodes:
        for chunk in chunks(recode, staging_nbytes // threads):
            nbytes = 0
            for piece in chunk.pieces:
                start = max(piece.start, chunk.start) - piece.start
                stop = min(piece.start + piece.numel, chunk.stop) - piece.start
                nbytes += (stop - start) * ITEMSIZE[piece.dtype]
                if piece.code is not None:
                    block = piece.code.format.numel
                    first, last = (piece.code.position + at for at in (start, stop - 1))
                    nbytes += (last // block + 1 - first // block) * _SCALE_NBYTES
            runs.append((nbytes, 1))
    return runs


def _split(copy: Copy, step_nbytes: int) -> Iterator[Run]:
    """Each row by itself, in steps of whole elements."""
    itemsize = ITEMSIZE[copy.dtype]
    step = max(step_nbytes // itemsize, 1)
    whole, rest = divmod(copy.numel, step)
    yield from ((numel * itemsize, count * copy.rows) for numel, count in ((step, whole), (rest, 1)) if numel and count)


@dataclass(slots=True)
class _Open:
    """The read that the next piece may still join."""

    file: int
    end: int
    nbytes: int
    buffers: int

    def takes(self, copy: Copy, nbytes: int, chunk_nbytes: int) -> int:
        """How many of the copy's pieces join it."""
        if (copy.file, copy.byte_offset) != (self.file, self.end) or nbytes > chunk_nbytes:
            return 0
        room = min((chunk_nbytes - self.nbytes) // nbytes, MAX_BUFFERS - self.buffers)
        is_dense = copy.file_stride * ITEMSIZE[copy.dtype] == nbytes
        return min(room, copy.rows if is_dense else 1)


def _joined(copies: Iterable[Copy], chunk_nbytes: int) -> Iterator[Run]:
    """Neighbours in the file go into one read; what is longer than a chunk is split."""
    last: _Open | None = None
    for copy in copies:
        nbytes, stride = copy.numel * ITEMSIZE[copy.dtype], copy.file_stride * ITEMSIZE[copy.dtype]
        if not nbytes:
            continue
        end = copy.byte_offset + (copy.rows - 1) * stride + nbytes
        joining = last.takes(copy, nbytes, chunk_nbytes) if last is not None else 0
        rows = copy.rows - joining
        if last is not None:
            last.nbytes, last.buffers = last.nbytes + joining * nbytes, last.buffers + joining
            last.end += joining * nbytes
            if not rows:
                continue
            yield last.nbytes, 1
        if nbytes > chunk_nbytes:
            whole, rest = divmod(nbytes, chunk_nbytes)
            tail = rest or chunk_nbytes  # of the last row, which the next copy may join
            yield chunk_nbytes, whole * rows - (0 if rest else 1)
            if rest and rows > 1:
                yield rest, rows - 1
            last = _Open(copy.file, end, tail, 1)
            continue
        at_once = min(chunk_nbytes // nbytes, MAX_BUFFERS) if stride == nbytes else 1
        whole, rest = divmod(rows, at_once)
        whole, rest = (whole, rest) if rest else (whole - 1, at_once)
        if whole:
            yield at_once * nbytes, whole
        last = _Open(copy.file, end, rest * nbytes, rest)
    if last is not None:
        yield last.nbytes, 1

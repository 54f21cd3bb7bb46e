"""Which reads a plan comes to: copies joined, split, and sorted by whether ``preadv`` can write into their slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan
from elastic_ckpt.io.read_sizes import MAX_BUFFERS, ReadLimits

#: What a thread takes on at a time, at most: a future for each small read would cost more than the read.
_TASK_NBYTES = 4 << 20
_TASK_READS = 64
#: Tasks for each thread, at least, so that all have something to do until the end.
_TASKS_OF_THREAD = 4


@dataclass(frozen=True, slots=True)
class DirectRead:
    """One ``preadv``: consecutive bytes of a file into these buffers, of which some may be for bytes nobody wants."""

    file: int
    byte_offset: int
    nbytes: int
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class StagedRead:
    """One bounce: elements through host memory into ``slot[slot_offset:]``, where its rows lie one after the other.

    Each row is a ``preadv`` of its own.
    """

    copy: ReadItem
    nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self.nbytes // self.copy.rows


#: (file, byte offset, where the bytes go)
_Piece = tuple[int, int, memoryview]


def sort_copies(
    plan: ReadPlan, tensors: Sequence[torch.Tensor], limits: ReadLimits
) -> tuple[list[DirectRead], list[StagedRead]]:
    """The reads that execute the copies of a plan, in file order.

    Args:
        plan: what to copy.
        tensors: the live tensor of every slot.
        limits: sizes to keep within.
    """
    for slot, tensor in zip(plan.slots, tensors, strict=True):
        if tensor.numel() != slot.numel:
            raise ValueError(f"{slot.key} {slot.name}: the plan is for {slot.numel} elements, not {tensor.numel()}")
    views = [_bytes_of(tensor) for tensor in tensors]
    direct: list[Iterable[_Piece]] = []
    staged: list[StagedRead] = []
    for copy in plan.copies:
        view = views[copy.slot]
        if view is not None and copy.dtype == plan.slots[copy.slot].dtype:
            direct.append(_rows(copy, view))
        else:
            staged += _staged(copy, limits.staged_nbytes)
    return list(_joined(chain.from_iterable(direct), limits)), staged


def tasks(reads: Sequence[DirectRead], threads: int) -> Iterator[Sequence[DirectRead]]:
    """Neighbouring reads, as many as a thread takes on at a time."""
    share = threads * _TASKS_OF_THREAD
    most_nbytes = min(sum(read.nbytes for read in reads) // share, _TASK_NBYTES)
    most_reads = min(-(-len(reads) // share), _TASK_READS)
    first = nbytes = 0
    for number, read in enumerate(reads):
        if number > first and (nbytes + read.nbytes > most_nbytes or number - first == most_reads):
            yield reads[first:number]
            first, nbytes = number, 0
        nbytes += read.nbytes
    if first < len(reads):
        yield reads[first:]


def _rows(copy: ReadItem, view: memoryview) -> Iterator[_Piece]:
    itemsize = ITEMSIZE[copy.dtype]
    nbytes, file_step, slot_step = (n * itemsize for n in (copy.numel, copy.file_stride, copy.slot_stride))
    start, offset = copy.slot_offset * itemsize, copy.byte_offset
    for _ in range(copy.rows):
        yield copy.file, offset, view[start : start + nbytes]
        start, offset = start + slot_step, offset + file_step


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's memory, or ``None`` where ``preadv`` cannot write into it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    # as_strided: a tensor of one element counts as contiguous whatever its stride is, and then has no byte view
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _staged(copy: ReadItem, step_nbytes: int) -> Iterator[StagedRead]:
    """Rows that are neighbours in the slot go together, as many as a buffer holds; longer ones are cut."""
    row_nbytes = copy.numel * ITEMSIZE[copy.dtype]
    is_dense = copy.rows > 1 and copy.slot_stride == copy.numel
    at_once = step_nbytes // row_nbytes if is_dense else 0
    if at_once < 2:
        for number in range(copy.rows):
            yield from _split_staged(copy.row(number), step_nbytes)
        return
    for first in range(0, copy.rows, at_once):
        rows = min(at_once, copy.rows - first)
        part = replace(copy.row(first), rows=rows, file_stride=copy.file_stride, slot_stride=copy.slot_stride)
        yield StagedRead(part, rows * row_nbytes)


def _split_staged(copy: ReadItem, step_nbytes: int) -> Iterator[StagedRead]:
    itemsize = ITEMSIZE[copy.dtype]
    step = max(step_nbytes // itemsize, 1)
    for start in range(0, copy.numel, step):
        numel = min(step, copy.numel - start)
        offset = copy.byte_offset + start * itemsize
        part = ReadItem(copy.file, offset, copy.slot, copy.slot_offset + start, numel, copy.dtype)
        yield StagedRead(part, numel * itemsize)


def _joined(pieces: Iterable[_Piece], limits: ReadLimits) -> Iterator[DirectRead]:
    """Join pieces that are neighbours in their file, or nearly so, and split what is longer than a chunk."""
    unwanted = memoryview(bytearray(limits.gap_nbytes))  # what lies between them; every read may write into it
    chunk_nbytes = limits.chunk_nbytes
    buffers: list[memoryview] = []
    file, start, end = -1, 0, 0
    for piece_file, piece_offset, view in pieces:
        for piece_start in range(0, len(view), chunk_nbytes):
            piece = view[piece_start : piece_start + chunk_nbytes]
            offset = piece_offset + piece_start
            gap = offset - end
            fits = piece_file == file and 0 <= gap <= limits.gap_nbytes
            fits = fits and offset - start + len(piece) <= chunk_nbytes and len(buffers) + 1 + (gap > 0) <= MAX_BUFFERS
            if buffers and not fits:
                yield DirectRead(file, start, end - start, tuple(buffers))
                buffers = []
            elif gap and buffers:
                buffers.append(unwanted[:gap])
            if not buffers:
                file, start, end = piece_file, offset, offset
            buffers.append(piece)
            end = offset + len(piece)
    if buffers:
        yield DirectRead(file, start, end - start, tuple(buffers))

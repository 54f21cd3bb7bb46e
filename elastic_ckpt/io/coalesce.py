"""Turns a plan's items into reads: joined, split, and sorted by whether ``preadv`` can write into their target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import SCALE_DTYPE, ReadItem, ReadPlan, RequantizeItem

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
#: Most buffers per call (limits.h, IOV_MAX).
MAX_BUFFERS = 1024
#: Smallest staging buffer: one element of any dtype.
_LEAST_STAGED_NBYTES = ITEMSIZE["complex128"]
#: Largest task of a thread: one future per small read would cost more than the read.
_TASK_NBYTES = 4 * _MIB
_TASK_READS = 64
#: Fewest tasks per thread, to keep all threads busy until the end.
_TASKS_OF_THREAD = 4
#: Peak host memory per requantized element: bytes, index, value, scales, the scale's bounds, normalized value.
_NBYTES_PER_ELEMENT = 48
#: Bytes between two reads of a file that cost less than another call does (docs/architecture.md has the rule).
_GAP_NBYTES = {"local": 0, "network": 64 << 10}


class Unwanted(bytearray):
    """Memory for the bytes between two merged reads; threads overwrite each other's, so it is never summed."""


@dataclass(frozen=True)
class ReadOptions:
    """How to read."""

    threads: int = 4
    chunk_nbytes: int = 16 * _MIB  # largest single read
    staging_nbytes: int = 64 * _MIB  # host memory of all staging buffers together
    progress: bool | None = False  # whether to draw a progress bar; ``None``: if standard error is a terminal
    gap_nbytes: int = 0  # reads of a file at most this far apart are merged, with the bytes between them

    @property
    def requantize_nbytes(self) -> int:
        """Host memory for one part of a requantize item."""
        return self.staging_nbytes // self.threads

    @property
    def staged_nbytes(self) -> int:
        """Largest read into a staging buffer; every thread has two."""
        return max(min(self.requantize_nbytes // 2, self.chunk_nbytes), _LEAST_STAGED_NBYTES)


def read_options(config: ElasticConfig) -> ReadOptions:
    """The configured read options."""
    reading = config.reading
    gap_nbytes = _GAP_NBYTES[reading.storage] if reading.gap_kib is None else reading.gap_kib << 10
    return ReadOptions(reading.threads, staging_nbytes=reading.extra_memory_mib << 20, gap_nbytes=gap_nbytes)


#: One ``preadv``: file, byte offset, bytes, and the buffers for them, some of which may be for unwanted gaps.
DirectRead = tuple[int, int, int, tuple[memoryview, ...]]


def sort_reads(
    plan: ReadPlan, tensors: Sequence[torch.Tensor], options: ReadOptions
) -> tuple[list[DirectRead], list[ReadItem]]:
    """The reads that execute the items of a plan, in file order; ``tensors`` are the live tensors of its targets.

    Returns reads straight into the tensors, and items that pass through a staging buffer, none larger than one: each
    row is a ``preadv``, and rows are contiguous in the target.
    """
    for target, tensor in zip(plan.targets, tensors, strict=True):
        if tensor.numel() != target.numel:
            what = f"{target.key} {target.name}"
            raise ValueError(f"{what}: the plan is for {target.numel} elements, not {tensor.numel()}")
    views = [_bytes_of(tensor) for tensor in tensors]
    direct: list[Iterable[tuple[int, int, memoryview]]] = []
    staged: list[ReadItem] = []
    for item in plan.items:
        view = views[item.target]
        if view is not None and item.dtype == plan.targets[item.target].dtype:
            direct.append(_rows(item, view))
        else:
            staged += _staged(item, options.staged_nbytes)
    return list(_joined(chain.from_iterable(direct), options)), staged


def staged_reads(plan: ReadPlan, options: ReadOptions) -> tuple[int, int]:
    """Bytes and number of the reads of a plan through staging buffers; a part of a requantize item counts as one."""
    parts = [part for item in plan.requantize_items for part in parts_of(item, options.requantize_nbytes)]
    calls = (item.rows * -(-item.numel // (options.staged_nbytes // ITEMSIZE[item.dtype])) for item in plan.items)
    return sum(item.nbytes for item in plan.items) + sum(map(nbytes_read, parts)), sum(calls) + len(parts)


def parts_of(item: RequantizeItem, staging_nbytes: int) -> Iterator[RequantizeItem]:
    """Split an item into parts that need at most ``staging_nbytes`` of memory, but at least one block; skip gaps."""
    block = 1 if item.blocks is None else item.blocks.numel
    step = max(staging_nbytes // _NBYTES_PER_ELEMENT // block, 1) * block
    for start in range(item.start, item.stop, step):
        part = item.part(start, min(start + step, item.stop))
        if part.sources:
            yield part


def scales_of(item: ReadItem) -> tuple[int, int]:
    """Byte offset and size, in their file, of the scales of quantized elements."""
    assert item.code is not None
    first, stop = item.code.position // item.code.format.numel, item.code.format.blocks(item.code.position + item.numel)
    itemsize = ITEMSIZE[SCALE_DTYPE]
    return item.code.scales_offset + first * itemsize, (stop - first) * itemsize


def nbytes_read(item: RequantizeItem) -> int:
    """Bytes of an item's sources and of their scales."""
    return item.nbytes + sum(scales_of(source)[1] for source in item.sources if source.code is not None)


def tasks(reads: Sequence[DirectRead], threads: int) -> Iterator[Sequence[DirectRead]]:
    """Neighbouring reads, grouped into tasks for one thread."""
    share = threads * _TASKS_OF_THREAD
    most_nbytes = min(sum(read[2] for read in reads) // share, _TASK_NBYTES)
    most_reads = min(-(-len(reads) // share), _TASK_READS)
    first = nbytes = 0
    for number, read in enumerate(reads):
        if number > first and (nbytes + read[2] > most_nbytes or number - first == most_reads):
            yield reads[first:number]
            first, nbytes = number, 0
        nbytes += read[2]
    if first < len(reads):
        yield reads[first:]


def _rows(item: ReadItem, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    itemsize = ITEMSIZE[item.dtype]
    nbytes, file_step, target_step = (n * itemsize for n in (item.numel, item.file_stride, item.target_stride))
    start, offset = item.target_offset * itemsize, item.byte_offset
    for _ in range(item.rows):
        yield item.file, offset, view[start : start + nbytes]
        start, offset = start + target_step, offset + file_step


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's memory, or ``None`` if ``preadv`` cannot write into it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    import torch  # noqa: PLC0415  who only plans need not wait for it

    # as_strided: a one-element tensor counts as contiguous whatever its stride, and then has no byte view
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _staged(item: ReadItem, step_nbytes: int) -> Iterator[ReadItem]:
    """Contiguous rows of the target, as many as fit into a buffer; longer rows are split."""
    itemsize = ITEMSIZE[item.dtype]
    at_once = step_nbytes // (item.numel * itemsize) if item.rows > 1 and item.target_stride == item.numel else 0
    if at_once > 1:
        for first in range(0, item.rows, at_once):
            rows = min(at_once, item.rows - first)
            yield replace(item.row(first), rows=rows, file_stride=item.file_stride, target_stride=item.target_stride)
        return
    step = step_nbytes // itemsize
    for row in map(item.row, range(item.rows)):
        yield from (row.clip(start, start + step) for start in range(row.target_offset, row.target_stop, step))


def _joined(ranges: Iterable[tuple[int, int, memoryview]], options: ReadOptions) -> Iterator[DirectRead]:
    """Merge ranges that are adjacent in their file, or nearly so, and split those longer than a chunk."""
    unwanted = memoryview(Unwanted(options.gap_nbytes))  # for the gaps; every read may write into it
    chunk_nbytes = options.chunk_nbytes
    buffers: list[memoryview] = []
    file, start, end = -1, 0, 0
    for next_file, first_byte, view in ranges:
        for position in range(0, len(view), chunk_nbytes):
            buffer = view[position : position + chunk_nbytes]
            offset = first_byte + position
            gap = offset - end
            fits = next_file == file and 0 <= gap <= options.gap_nbytes
            fits = fits and offset - start + len(buffer) <= chunk_nbytes
            fits = fits and len(buffers) + 1 + (gap > 0) <= MAX_BUFFERS
            if buffers and not fits:
                yield file, start, end - start, tuple(buffers)
                buffers = []
            elif gap and buffers:
                buffers.append(unwanted[:gap])
            if not buffers:
                file, start, end = next_file, offset, offset
            buffers.append(buffer)
            end = offset + len(buffer)
    if buffers:
        yield file, start, end - start, tuple(buffers)

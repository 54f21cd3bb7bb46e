"""Turns a plan's items into reads: joined, split, and sorted by whether ``preadv`` can write into their target.

Those that pass through staging buffers are packed into these side by side, with nothing of the gaps between them, and
joined like any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, RequantizeItem
from elastic_ckpt.storage import VIEW
from elastic_ckpt.storage.media import OBJECT_STORE, Medium
from elastic_ckpt.storage.remote import REQUEST_NBYTES

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
#: Most buffers per call (limits.h, IOV_MAX).
MAX_BUFFERS = 1024
#: Bytes that are read before they are summed, where calls are cheap: few enough to be in the processor's cache still,
#: enough for few calls.
SUMMED_AT_ONCE_NBYTES = _MIB
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
_GAP_NBYTES = {"network": 64 << 10}


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
    call_nbytes: int = 16 * _MIB  # how much of a read a call of ``preadv`` takes

    @cached_property
    def unwanted(self) -> memoryview:
        """Memory for the longest gap; every read may write into it."""
        return memoryview(Unwanted(min(self.gap_nbytes, self.chunk_nbytes)))

    @property
    def requantize_nbytes(self) -> int:
        """Host memory for one part of a requantize item."""
        return self.staging_nbytes // self.threads

    @property
    def staging_buffers(self) -> int:
        """Buffers of each thread: two overlap disk and bus; where calls wait, threads do, and one makes fewer reads."""
        return 1 if self.gap_nbytes else 2

    @property
    def staged_nbytes(self) -> int:
        """Size of a staging buffer."""
        return max(min(self.requantize_nbytes // self.staging_buffers, self.chunk_nbytes), _LEAST_STAGED_NBYTES)


def read_options(config: ElasticConfig, medium: Medium | None = None) -> ReadOptions:
    """The configured read options; ``medium``: where the files are, by default on a disk unless configured."""
    reading = config.reading
    kind = reading.storage if medium is None else medium.kind
    gap_nbytes = _GAP_NBYTES.get(kind, 0) if reading.gap_kib is None else reading.gap_kib << 10
    options = ReadOptions(reading.threads, staging_nbytes=reading.extra_memory_mib << 20, gap_nbytes=gap_nbytes)
    if medium == OBJECT_STORE:
        options = replace(options, chunk_nbytes=REQUEST_NBYTES)  # so that a read is a request
    if gap_nbytes or config.verify == "off" or VIEW.get() is not None:  # each read may be a request
        return options
    return replace(options, call_nbytes=SUMMED_AT_ONCE_NBYTES)


#: One read: file, byte offset, bytes, and the buffers for them, some of which may be for unwanted gaps.
DirectRead = tuple[int, int, int, tuple[memoryview, ...]]


@dataclass(slots=True)
class StagedBatch:
    """What fills a staging buffer: parts of items, in file order and side by side."""

    #: Parts of each read, with the byte of the buffer where each begins. Rows too far apart are a part, each a read.
    reads: list[list[tuple[ReadItem, int]]] = field(default_factory=list)
    nbytes: int = 0  # of the buffer
    read_nbytes: int = 0  # with the gaps between merged reads
    calls: int = 0  # reads

    @property
    def parts(self) -> Iterator[tuple[ReadItem, int]]:
        return chain.from_iterable(self.reads)


def sort_reads(
    plan: ReadPlan, tensors: Sequence[torch.Tensor], options: ReadOptions
) -> tuple[list[DirectRead], list[StagedBatch]]:
    """The reads that execute the items of a plan, in file order; ``tensors`` are the live tensors of its targets.

    Returns reads straight into the tensors, and those into staging buffers.
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
            staged.append(item)
    joined = _joined(chain.from_iterable(direct), options.chunk_nbytes, options.unwanted)
    return list(joined), list(staged_batches(staged, options))


def staged_reads(plan: ReadPlan, options: ReadOptions) -> tuple[int, int]:
    """Bytes and number of the reads of a plan all of whose items pass through staging buffers."""
    batches = list(staged_batches(plan.items, options))
    parts = (part for item in plan.requantize_items for part in parts_of(item, options.requantize_nbytes))
    sizes = [nbytes for part in parts for nbytes in read_sizes(part)]
    nbytes = sum(batch.read_nbytes for batch in batches) + sum(sizes)
    return nbytes, sum(batch.calls for batch in batches) + len(sizes)


def staged_batches(items: Sequence[ReadItem], options: ReadOptions) -> Iterator[StagedBatch]:
    """Pack items into staging buffers, in as few reads as these, chunks and gaps allow."""
    packer = _Packer(items, options)
    for item in items:
        # rows of which a buffer takes one are cut like single ones
        is_cut = item.rows > 1 and 2 * item.numel * ITEMSIZE[item.dtype] > options.staged_nbytes
        for part in map(item.row, range(item.rows)) if is_cut else (item,):
            yield from packer.add(part)
    if packer.batch.reads:
        yield packer.batch


def reads_into(memory: memoryview, batch: StagedBatch, options: ReadOptions) -> Iterator[DirectRead]:
    """The reads that fill a staging buffer."""
    chunk_nbytes = max(options.chunk_nbytes, options.staged_nbytes)
    for parts in batch.reads:
        ranges = []
        for item, position in parts:
            rows, numel = (1, item.rows * item.numel) if item.file_stride == item.numel else (item.rows, item.numel)
            offset = position // ITEMSIZE[item.dtype]
            part = replace(item, target_offset=offset, rows=rows, numel=numel, target_stride=numel)
            ranges.append(_rows(part, memory))
        yield from _joined(chain.from_iterable(ranges), chunk_nbytes, options.unwanted)


def parts_of(item: RequantizeItem, staging_nbytes: int) -> Iterator[RequantizeItem]:
    """Split an item into parts that need at most ``staging_nbytes`` of memory, but at least one block; skip gaps."""
    block = 1 if item.blocks is None else item.blocks.numel
    step = max(staging_nbytes // _NBYTES_PER_ELEMENT // block, 1) * block
    for start in range(item.start, item.stop, step):
        part = item.part(start, min(start + step, item.stop))
        if part.sources:
            yield part


def scales_of(item: ReadItem) -> tuple[int, int, int]:
    """File, byte offset and size of the scales of quantized elements."""
    assert item.code is not None
    return item.code.scales_of(item.numel, item.file)


def read_sizes(item: RequantizeItem) -> list[int]:
    """Bytes of each read of an item: of its sources, and of their scales."""
    scales = (scales_of(source)[2] for source in item.sources if source.code is not None)
    return [*(source.nbytes for source in item.sources), *scales]


def tasks(reads: Sequence[DirectRead], threads: int) -> Iterator[Sequence[DirectRead]]:
    """Neighbouring reads, grouped into tasks for one thread."""
    share = threads * _TASKS_OF_THREAD
    most_nbytes = min(sum(read[2] for read in reads) // share, _TASK_NBYTES)
    most_reads = min(-(-len(reads) // share), _TASK_READS)
    first = nbytes = 0
    for number, read in enumerate(reads):
        if number > first and (nbytes + read[2] > most_nbytes or number - first == most_reads):
            yield reads[first:number]
            first = number
            nbytes = 0
        nbytes += read[2]
    if first < len(reads):
        yield reads[first:]


def _rows(item: ReadItem, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    itemsize = ITEMSIZE[item.dtype]
    nbytes, file_step, target_step = (n * itemsize for n in (item.numel, item.file_stride, item.target_stride))
    start = item.target_offset * itemsize
    offset = item.byte_offset
    for _ in range(item.rows):
        yield item.file, offset, view[start : start + nbytes]
        start = start + target_step
        offset = offset + file_step


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's memory, or ``None`` if ``preadv`` cannot write into it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    import torch  # noqa: PLC0415  who only plans need not wait for it

    # as_strided: a one-element tensor counts as contiguous whatever its stride, and then has no byte view
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


class _Packer:
    """Packs batches, in time that does not depend on the number of rows."""

    def __init__(self, items: Sequence[ReadItem], options: ReadOptions) -> None:
        self.batch = StagedBatch()
        self._options = options
        self._limit = options.staged_nbytes
        self._gap_nbytes = len(options.unwanted)
        # of the last read, if it may go on
        self._file = -1
        self._start = 0
        self._end = 0
        self._buffers = 0
        share = options.threads * _TASKS_OF_THREAD  # as for tasks; but no read is split for it
        self._most_nbytes = min(sum(item.nbytes for item in items) // share, _TASK_NBYTES)
        self._most_calls = -(-sum(item.rows if self._are_apart(item) else 1 for item in items) // share)

    def _are_apart(self, item: ReadItem) -> bool:
        """Whether each row is a read."""
        between = (item.file_stride - item.numel) * ITEMSIZE[item.dtype]
        return item.rows > 1 and not 0 <= between <= self._gap_nbytes

    def add(self, item: ReadItem) -> Iterator[StagedBatch]:
        """Add an item in parts, of whole rows if it has several; yields batches that are full."""
        itemsize = ITEMSIZE[item.dtype]
        are_apart = self._are_apart(item)
        first = 0
        count = item.numel
        width = itemsize
        stride = itemsize
        if item.rows > 1:
            count = item.rows
            width = item.numel * itemsize
            stride = item.file_stride * itemsize
        while first < count:
            batch = self.batch
            offset = item.byte_offset + first * stride
            position = -(-batch.nbytes // itemsize) * itemsize
            left = count - first
            room = (self._limit - position) // width
            taken = 0 if are_apart or item.file != self._file else min(left, room, self._fitting(offset, width, stride))
            if taken < 1:  # another read
                self._file = item.file
                self._start = offset
                self._end = offset
                self._buffers = 0
                taken = 1 if are_apart else min(left, self._limit // width, self._fitting(offset, width, stride))
                is_full = taken > room or position + taken * width > self._most_nbytes
                if batch.reads and (is_full or batch.calls >= self._most_calls):
                    yield batch
                    self.batch = StagedBatch()
                    self._file = -1
                    continue
                if are_apart:
                    taken = min(left, room, max(self._most_calls - batch.calls, 1))
                    self._file = -1
                batch.reads.append([])
                batch.calls += taken if are_apart else 1
            end = offset + (taken - 1) * stride + width
            batch.read_nbytes += taken * width if are_apart else end - self._end
            self._buffers += (offset > self._end) + (2 * taken - 1 if stride > width else 1)
            self._end = end
            start = item.target_offset + first
            part = item.row(first) if item.rows > 1 else item.clip(start, start + taken)
            if item.rows > 1:
                part = replace(part, rows=taken, file_stride=item.file_stride, target_stride=item.target_stride)
            batch.reads[-1].append((part, position))
            batch.nbytes = position + taken * width
            first += taken

    def _fitting(self, offset: int, width: int, stride: int) -> int:
        """How many rows from an offset on the last read may take."""
        gap = offset - self._end
        between = stride - width
        free = MAX_BUFFERS - self._buffers - (gap > 0)
        if not 0 <= gap <= self._gap_nbytes or free < 1:
            return 0
        most_nbytes = max(self._options.chunk_nbytes, self._limit)
        by_nbytes = (most_nbytes - (offset - self._start) + between) // stride
        return min(by_nbytes, (free + 1) // 2) if between else by_nbytes


def _joined(
    ranges: Iterable[tuple[int, int, memoryview]], chunk_nbytes: int, unwanted: memoryview
) -> Iterator[DirectRead]:
    """Merge ranges at most as far apart as ``unwanted`` is long, and split those longer than a chunk."""
    buffers: list[memoryview] = []
    file = -1
    start = 0
    end = 0
    for next_file, first_byte, view in ranges:
        for position in range(0, len(view), chunk_nbytes):
            buffer = view[position : position + chunk_nbytes]
            offset = first_byte + position
            gap = offset - end
            fits = next_file == file and 0 <= gap <= len(unwanted)
            fits = fits and offset - start + len(buffer) <= chunk_nbytes
            fits = fits and len(buffers) + 1 + (gap > 0) <= MAX_BUFFERS
            if buffers and not fits:
                yield file, start, end - start, tuple(buffers)
                buffers = []
            elif gap and buffers:
                buffers.append(unwanted[:gap])
            if not buffers:
                file = next_file
                start = offset
                end = offset
            buffers.append(buffer)
            end = offset + len(buffer)
    if buffers:
        yield file, start, end - start, tuple(buffers)

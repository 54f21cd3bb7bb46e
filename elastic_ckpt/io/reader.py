"""Executes a plan: file bytes straight into the memory of the slots, from a pool of threads.

A copy whose slot is a contiguous CPU tensor of the file's dtype is *direct*: ``preadv`` writes into the tensor.
Neighbouring ranges of a file go into one call, whatever slots they are for. Any other copy (another dtype, an
accelerator, a strided buffer) is *staged* through bounce buffers of a fixed size (:mod:`elastic_ckpt.io.staging`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import torch
from tqdm import tqdm

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.coalesce import DirectRead, StagedRead, sort_copies, tasks
from elastic_ckpt.io.prefault import Prefault
from elastic_ckpt.io.read_sizes import LEAST_STAGING_NBYTES, ReadLimits
from elastic_ckpt.io.requantize import Chunk, RequantizeStats, chunks, run_chunk
from elastic_ckpt.io.staging import Lanes, Transfer, transfer_for

_MIB = 1 << 20


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        threads: size of the pool.
        chunk_nbytes: largest single read.
        staging_nbytes: host memory for all bounce buffers together.
        progress: whether to draw a progress bar; ``None``: if standard error is a terminal.
        gap_nbytes: reads that lie at most so far apart are made as one, with the bytes between them.
        huge_pages: whether to try huge pages for memory that was never touched.
    """

    threads: int = 4
    chunk_nbytes: int = 16 * _MIB
    staging_nbytes: int = 64 * _MIB
    progress: bool | None = None
    gap_nbytes: int = 0
    huge_pages: bool = True

    @property
    def limits(self) -> ReadLimits:
        """The sizes to keep within: every thread has two bounce buffers."""
        of_thread = self.staging_nbytes // self.threads
        staged = min(max(of_thread // 2, LEAST_STAGING_NBYTES), self.chunk_nbytes)
        return ReadLimits(self.chunk_nbytes, staged, of_thread, self.gap_nbytes)


def read_options(config: ElasticConfig) -> ReadOptions:
    """How a user wants it read."""
    return ReadOptions(
        threads=config.read_threads,
        chunk_nbytes=config.read_chunk_mib << 20,
        staging_nbytes=config.max_extra_memory_mib << 20,
        progress=config.progress,
        gap_nbytes=config.read_gap_kib << 10,
        huge_pages=config.huge_pages,
    )


@dataclass(frozen=True)
class ReadStats:
    """What was done: bytes read, calls made, bytes that went through bounce buffers, and 8-bit blocks cut anew."""

    nbytes: int
    calls: int
    staged_nbytes: int
    recoded: RequantizeStats = field(default_factory=RequantizeStats)


def execute(
    plan: ReadPlan,
    tensors: Sequence[torch.Tensor],
    options: ReadOptions,
    show_progress: bool,
    make_transfer: Callable[[torch.device], Transfer] = transfer_for,
) -> ReadStats:
    """Run every copy and recode of a plan. Local; call it on every rank.

    Args:
        plan: what to copy.
        tensors: the live tensor of every slot; overwritten.
        options: how to read.
        show_progress: whether this rank may draw the progress bar.
        make_transfer: how values get from bounce buffers into tensors of a device.

    Raises:
        DamagedError: a file ended early or could not be read; the slots are then partly overwritten.
    """
    limits = options.limits
    direct, staged = sort_copies(plan, tensors, limits)
    recoded = [chunk for recode in plan.recodes for chunk in chunks(recode, limits.recode_nbytes)]
    copied = sum(read.nbytes for read in direct) + sum(read.nbytes for read in staged)
    with ExitStack() as stack:
        bar = stack.enter_context(
            _bar(copied + sum(chunk.nbytes for chunk in recoded), options.progress if show_progress else False)
        )
        work = _Work(plan, tensors, _Descriptors(plan, stack), Prefault(options.huge_pages))
        if staged:
            held = [tensors[slot] for slot in {read.copy.slot for read in staged}]
            buffer_nbytes = max(limits.staged_nbytes, LEAST_STAGING_NBYTES)
            work.lanes = Lanes(options.threads, buffer_nbytes, held, make_transfer)
            stack.callback(work.lanes.finish)  # after a failure too: no transfer may outlive its slot
        pool = stack.enter_context(ThreadPoolExecutor(options.threads, thread_name_prefix="elastic_ckpt"))
        stack.callback(pool.shutdown, cancel_futures=True)  # after a failure nobody waits for the rest
        for nbytes in chain(
            pool.map(work.run_direct, tasks(direct, options.threads)), pool.map(work.run_staged, staged)
        ):
            bar.update(nbytes)
        if work.lanes is not None:
            work.lanes.finish()
        stats = RequantizeStats()
        for done, chunk in zip(pool.map(work.run_recode, recoded), recoded, strict=True):
            stats += done
            bar.update(chunk.nbytes)
    staged_nbytes = sum(read.nbytes for read in staged) + stats.nbytes
    calls = len(direct) + sum(read.copy.rows for read in staged) + len(recoded)
    return ReadStats(copied + stats.nbytes, calls, staged_nbytes, stats)


def _bar(total: int, progress: bool | None) -> tqdm:
    disable = None if progress is None else not progress
    return tqdm(total=total, unit="B", unit_scale=True, desc="elastic_ckpt", disable=disable, leave=False)


@dataclass
class _Work:
    """What the threads of the pool do."""

    plan: ReadPlan
    tensors: Sequence[torch.Tensor]
    descriptors: _Descriptors
    prefault: Prefault
    lanes: Lanes | None = None

    def run_direct(self, reads: Sequence[DirectRead]) -> int:
        for read in reads:
            self.prefault(read.buffers)
            _read_fully(self.descriptors, self.plan, read.file, read.byte_offset, read.buffers)
        return sum(read.nbytes for read in reads)

    def run_staged(self, read: StagedRead) -> int:
        assert self.lanes is not None
        copy, lane = read.copy, self.lanes.mine()
        buffer, row_nbytes = lane.buffer(read.nbytes), read.row_nbytes
        for number in range(copy.rows):
            row = buffer[number * row_nbytes : (number + 1) * row_nbytes]
            _read_fully(self.descriptors, self.plan, copy.file, copy.row(number).byte_offset, [row])
        lane.deliver(read.nbytes, copy.dtype, self.tensors[copy.slot], copy.slot_offset)
        return read.nbytes

    def run_recode(self, chunk: Chunk) -> RequantizeStats:
        try:
            return run_chunk(chunk, self.tensors, self._read_bytes)
        except DamagedError as error:
            raise _located(self.plan, chunk, error) from error

    def _read_bytes(self, file: int, byte_offset: int, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        _read_fully(self.descriptors, self.plan, file, byte_offset, [memoryview(raw)])
        return raw


class _Descriptors:
    """At most one open file for each thread: reads come in file order, and a checkpoint may have thousands."""

    def __init__(self, plan: ReadPlan, stack: ExitStack) -> None:
        self._plan = plan
        self._mine = threading.local()
        self._open: set[int] = set()
        stack.callback(self._close_all)

    def __getitem__(self, file: int) -> int:
        held = getattr(self._mine, "held", None)
        if held is not None and held[0] == file:
            return held[1]
        if held is not None:
            # forgotten first: once it is closed, another thread's open may be given its number
            self._open.discard(held[1])
            self._mine.held = None
            os.close(held[1])
        try:
            descriptor = os.open(self._plan.files[file].path, os.O_RDONLY)
        except OSError as error:
            raise _broken(self._plan, file, 0, f"{type(error).__name__}: {error.strerror}") from error
        self._open.add(descriptor)
        self._mine.held = (file, descriptor)
        return descriptor

    def _close_all(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)


def check_files(plan: ReadPlan) -> None:
    """Look at the size of every file the plan reads, before anything is overwritten. Local.

    Raises:
        DamagedError: a file is not visible on this rank, or not of the size its metadata was read at.
    """
    pieces = (piece for recode in plan.recodes for piece in recode.pieces)
    for file in sorted({copy.file for copy in plan.copies} | {piece.file for piece in pieces}):
        source = plan.files[file]
        try:
            with open(source.path, "rb") as stream:  # not only stat: a file may be visible and yet not readable
                nbytes = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise DamagedError(
                "a file of the checkpoint cannot be reached from this rank",
                file=source.path,
                expected="a file on storage that all ranks share",
                found=f"{type(error).__name__}: {error.strerror}",
                remedy="mount the folder on every node",
            ) from error
        if nbytes != source.nbytes:
            raise DamagedError(
                "a file of the checkpoint does not have the same size on every rank",
                file=source.path,
                expected=f"{source.nbytes} bytes",
                found=f"{nbytes} bytes",
                remedy="it is still being written or copied, or nodes hold different copies: wait, or share one",
            )


def _read_fully(
    descriptors: _Descriptors, plan: ReadPlan, file: int, byte_offset: int, buffers: Sequence[memoryview]
) -> None:
    """``preadv`` until all buffers are full; the kernel may return less than was asked for."""
    remaining = list(buffers)
    while remaining:
        try:
            count = os.preadv(descriptors[file], remaining, byte_offset)
        except OSError as error:
            raise _broken(plan, file, byte_offset, f"{type(error).__name__}: {error.strerror}") from error
        if count == 0:
            raise _broken(plan, file, byte_offset, "end of file")
        byte_offset += count
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if remaining and count:
            remaining[0] = remaining[0][count:]


def _located(plan: ReadPlan, chunk: Chunk, error: DamagedError) -> DamagedError:
    """Values that cannot be recoded know neither their state nor their file."""
    if error.file is not None:
        return error
    slot = plan.slots[chunk.recode.slot]
    return DamagedError(
        error.problem,
        parameter=f"{slot.key} of flat partition {slot.flat}",
        file=plan.files[chunk.pieces[0].file].path,
        expected=error.expected,
        found=error.found,
        remedy=error.remedy,
    )


def _broken(plan: ReadPlan, file: int, byte_offset: int, found: str) -> DamagedError:
    return DamagedError(
        "reading a file of the checkpoint failed",
        file=plan.files[file].path,
        expected=f"{plan.files[file].nbytes} readable bytes",
        found=f"{found} at byte {byte_offset}",
        remedy="check the disk or network file system",
    )

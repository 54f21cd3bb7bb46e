"""Executes a plan: file bytes straight into the memory of the slots, from a pool of threads.

A copy whose slot is a contiguous CPU tensor of the file's dtype is *direct*: ``preadv`` writes into the tensor.
Neighbouring ranges of a file go into one call, whatever slots they are for. Any other copy (another dtype, an
accelerator, a strided buffer) is *staged* through a bounce buffer of a fixed size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import torch
from tqdm import tqdm

from elastic_ckpt.dtypes import ITEMSIZE
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.memory import write_flat
from elastic_ckpt.plan import Copy, Plan
from elastic_ckpt.read_sizes import LEAST_STAGING_NBYTES, MAX_BUFFERS
from elastic_ckpt.recoder import Chunk, RecodeStats, chunks, run_chunk

_MIB = 1 << 20


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        threads: size of the pool.
        chunk_nbytes: largest single read.
        staging_nbytes: host memory for all bounce buffers together.
        progress: whether to draw a progress bar; ``None``: if standard error is a terminal.
    """

    threads: int = 4
    chunk_nbytes: int = 16 * _MIB
    staging_nbytes: int = 64 * _MIB
    progress: bool | None = None


@dataclass(frozen=True)
class ReadStats:
    """What was done: bytes read, calls made, bytes that went through bounce buffers, and 8-bit blocks cut anew."""

    nbytes: int
    calls: int
    staged_nbytes: int
    recoded: RecodeStats = field(default_factory=RecodeStats)


@dataclass(frozen=True)
class _DirectRead:
    """One ``preadv``: consecutive bytes of a file into these buffers."""

    file: int
    byte_offset: int
    nbytes: int
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True)
class _StagedRead:
    """One bounce: ``numel`` elements through host memory into ``slot[slot_offset:]``."""

    copy: Copy
    nbytes: int


def execute(plan: Plan, tensors: Sequence[torch.Tensor], options: ReadOptions, show_progress: bool) -> ReadStats:
    """Run every copy and recode of a plan. Local; call it on every rank.

    Args:
        plan: what to copy.
        tensors: the live tensor of every slot; overwritten.
        options: how to read.
        show_progress: whether this rank may draw the progress bar.

    Raises:
        DamagedError: a file ended early or could not be read; the slots are then partly overwritten.
    """
    direct, staged = _sort_copies(plan, tensors, options)
    recoded = [chunk for recode in plan.recodes for chunk in chunks(recode, options.staging_nbytes // options.threads)]
    with ExitStack() as stack:
        descriptors = _Descriptors(plan, stack)
        copied = sum(read.nbytes for read in direct) + sum(read.nbytes for read in staged)
        total = copied + sum(chunk.nbytes for chunk in recoded)
        disable: bool | None = (None if options.progress is None else not options.progress) if show_progress else True
        bar = stack.enter_context(
            tqdm(total=total, unit="B", unit_scale=True, desc="elastic_ckpt", disable=disable, leave=False)
        )
        pool = stack.enter_context(ThreadPoolExecutor(options.threads, thread_name_prefix="elastic_ckpt"))

        def run_direct(read: _DirectRead) -> int:
            _read_fully(descriptors, plan, read.file, read.byte_offset, read.buffers)
            return read.nbytes

        def run_staged(read: _StagedRead) -> int:
            _stage(descriptors, plan, read.copy, tensors)
            return read.nbytes

        def read_bytes(file: int, byte_offset: int, nbytes: int) -> bytearray:
            raw = bytearray(nbytes)
            _read_fully(descriptors, plan, file, byte_offset, [memoryview(raw)])
            return raw

        def run_recode(chunk: Chunk) -> RecodeStats:
            try:
                return run_chunk(chunk, tensors, read_bytes)
            except DamagedError as error:
                raise _located(plan, chunk, error) from error

        for nbytes in chain(pool.map(run_direct, direct), pool.map(run_staged, staged)):
            bar.update(nbytes)
        stats = RecodeStats()
        for done, chunk in zip(pool.map(run_recode, recoded), recoded, strict=True):
            stats += done
            bar.update(chunk.nbytes)
    staged_nbytes = sum(read.nbytes for read in staged) + stats.nbytes
    return ReadStats(copied + stats.nbytes, len(direct) + len(staged) + len(recoded), staged_nbytes, stats)


class _Descriptors:
    """At most one open file for each thread: reads come in file order, and a checkpoint may have thousands."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self._plan = plan
        self._mine = threading.local()
        self._open: set[int] = set()
        stack.callback(self._close_all)

    def __getitem__(self, file: int) -> int:
        held = getattr(self._mine, "held", None)
        if held is not None and held[0] == file:
            return held[1]
        if held is not None:
            os.close(held[1])
            self._open.discard(held[1])
            self._mine.held = None
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


def check_files(plan: Plan) -> None:
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


def _sort_copies(
    plan: Plan, tensors: Sequence[torch.Tensor], options: ReadOptions
) -> tuple[list[_DirectRead], list[_StagedRead]]:
    for slot, tensor in zip(plan.slots, tensors, strict=True):
        if tensor.numel() != slot.numel:
            raise ValueError(f"{slot.key} {slot.name}: the plan is for {slot.numel} elements, not {tensor.numel()}")
    views = [_bytes_of(tensor) for tensor in tensors]
    direct: list[tuple[Copy, memoryview]] = []
    staged: list[_StagedRead] = []
    staging_chunk = max(options.staging_nbytes // options.threads, LEAST_STAGING_NBYTES)
    for copy in chain.from_iterable(map(_rows, plan.copies)):
        view = views[copy.slot]
        if view is not None and copy.dtype == plan.slots[copy.slot].dtype:
            itemsize = ITEMSIZE[copy.dtype]
            start = copy.slot_offset * itemsize
            direct.append((copy, view[start : start + copy.numel * itemsize]))
        else:
            staged += _split_staged(copy, min(staging_chunk, options.chunk_nbytes))
    return list(_batch(direct, options.chunk_nbytes)), staged


def _rows(copy: Copy) -> Iterator[Copy]:
    return iter((copy,)) if copy.rows == 1 else (copy.row(number) for number in range(copy.rows))


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's memory, or ``None`` where ``preadv`` cannot write into it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    # as_strided: a tensor of one element counts as contiguous whatever its stride is, and then has no byte view
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _split_staged(copy: Copy, chunk_nbytes: int) -> Iterator[_StagedRead]:
    itemsize = ITEMSIZE[copy.dtype]
    step = max(chunk_nbytes // itemsize, 1)
    for start in range(0, copy.numel, step):
        numel = min(step, copy.numel - start)
        offset = copy.byte_offset + start * itemsize
        part = Copy(copy.file, offset, copy.slot, copy.slot_offset + start, numel, copy.dtype)
        yield _StagedRead(part, numel * itemsize)


def _batch(copies: Sequence[tuple[Copy, memoryview]], chunk_nbytes: int) -> Iterator[_DirectRead]:
    """Join copies that are neighbours in their file, and split what is longer than a chunk."""
    buffers: list[memoryview] = []
    file, start, end = -1, 0, 0
    for copy, view in copies:
        for piece_start in range(0, len(view), chunk_nbytes):
            piece = view[piece_start : piece_start + chunk_nbytes]
            offset = copy.byte_offset + piece_start
            fits = copy.file == file and offset == end and end - start + len(piece) <= chunk_nbytes
            if buffers and not (fits and len(buffers) < MAX_BUFFERS):
                yield _DirectRead(file, start, end - start, tuple(buffers))
                buffers = []
            if not buffers:
                file, start, end = copy.file, offset, offset
            buffers.append(piece)
            end += len(piece)
    if buffers:
        yield _DirectRead(file, start, end - start, tuple(buffers))


def _read_fully(
    descriptors: _Descriptors, plan: Plan, file: int, byte_offset: int, buffers: Sequence[memoryview]
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


def _located(plan: Plan, chunk: Chunk, error: DamagedError) -> DamagedError:
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


def _broken(plan: Plan, file: int, byte_offset: int, found: str) -> DamagedError:
    return DamagedError(
        "reading a file of the checkpoint failed",
        file=plan.files[file].path,
        expected=f"{plan.files[file].nbytes} readable bytes",
        found=f"{found} at byte {byte_offset}",
        remedy="check the disk or network file system",
    )


def _stage(descriptors: _Descriptors, plan: Plan, copy: Copy, tensors: Sequence[torch.Tensor]) -> None:
    raw = bytearray(copy.numel * ITEMSIZE[copy.dtype])
    _read_fully(descriptors, plan, copy.file, copy.byte_offset, [memoryview(raw)])
    values = torch.frombuffer(raw, dtype=getattr(torch, copy.dtype))
    target = tensors[copy.slot]
    if target.dim() == 1:
        target[copy.slot_offset : copy.slot_offset + copy.numel].copy_(values)
    else:
        write_flat(target, copy.slot_offset, values)

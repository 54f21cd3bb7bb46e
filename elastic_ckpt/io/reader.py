"""Executes a read plan: file bytes straight into the memory of the targets, from a pool of threads or the caller's own.

An item whose target is a contiguous CPU tensor of the file's dtype is *direct*: ``preadv`` writes into the tensor. Any
other item (other dtype, accelerator, strided tensor) is *staged* through staging buffers of fixed size
(:mod:`elastic_ckpt.io.staging`). Either way ranges of a file that are adjacent share a read, and where reads wait for
an answer, those that nearly are. Of replicated targets each data-parallel rank reads its shares, which are broadcast
afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from isal import isal_zlib

from elastic_ckpt.core.checksums import PartialSum
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.read_plan import BroadcastRange, ReadItem, ReadPlan, RequantizeItem
from elastic_ckpt.core.state_kinds import COMPANIONS
from elastic_ckpt.distributed import in_buckets, wait
from elastic_ckpt.errors import DamagedError, SavedOverError, refuse_used_up
from elastic_ckpt.io.coalesce import (
    DirectRead,
    ReadOptions,
    StagedBatch,
    Unwanted,
    parts_of,
    read_sizes,
    reads_into,
    sort_reads,
    tasks,
)
from elastic_ckpt.io.staging import Prefault, StagingBuffers, refuse_odd_scales, requantize, use_devices
from elastic_ckpt.report import ReadStats, progress_bar
from elastic_ckpt.storage import Ranges, holder_of, inherited, open_ranges, open_stream, size_of
from elastic_ckpt.storage.local import first_bytes

#: Keys of the scales of 8-bit blocks.
_SCALES = frozenset(scales for scales, _ in COMPANIONS.values())


class ReadSums:
    """Sums of what was read of each record. Thread-safe."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.sums: dict[tuple[int, int], PartialSum] = {}  # by (index of the file, number of its record)
        self.nbytes = 0  # bytes read, whether they are of a record or not
        self._files = files
        self._lock = threading.Lock()

    def add(self, file: int, byte_offset: int, buffers: Sequence[memoryview]) -> None:
        """Add bytes that were just read from an offset on."""
        records = self._files[file].records
        stop = byte_offset
        for is_unwanted, together in groupby(buffers, lambda buffer: isinstance(buffer.obj, Unwanted)):
            start = stop
            crc32 = 0
            for buffer in together:
                crc32 = crc32 if is_unwanted else isal_zlib.crc32(buffer, crc32)
                stop += len(buffer)
            if is_unwanted:
                continue
            number = records.index(start)
            with self._lock:
                self.nbytes += stop - start
                if number is not None:
                    begin = records.offsets[number]
                    key = (file, number)
                    part = PartialSum.of(start - begin, stop - begin, crc32, records.nbytes[number])
                    self.sums[key] = self.sums[key] | part if key in self.sums else part


def execute(
    plan: ReadPlan, tensors: Sequence[torch.Tensor], options: ReadOptions, sums: ReadSums | None = None
) -> ReadStats:
    """Execute every item of a plan, whose targets are these tensors; ``sums`` sums up what is read. Local.

    Raises :class:`DamagedError` for a file that ended early or could not be read; targets are then partly overwritten.
    """
    direct, staged = sort_reads(plan, tensors, options)
    parts = [part for item in plan.requantize_items for part in parts_of(item, options.requantize_nbytes)]
    total = sum(read[2] for read in direct) + sum(batch.read_nbytes for batch in staged)
    total += sum(sum(read_sizes(part)) for part in parts)
    stats = ReadStats()
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar("elastic_ckpt", total, options.progress, leave=False))
        devices = {tensors[item.target].device for batch in staged for item, _ in batch.parts}
        sizes = options.staged_nbytes, devices, options.staging_buffers
        staging = [StagingBuffers(*sizes) for _ in range(options.threads if staged else 0)]
        for buffers in staging:
            stack.callback(buffers.finish)  # after a failure too: no transfer may outlive its target
        reader = _Reader(plan, tensors, options, sums, staging)
        stack.callback(reader.close)
        run: Callable[..., Iterator[ReadStats]] = map
        if options.threads > 1:
            inherit = inherited()[0]
            devices = {tensor.device for tensor in tensors}

            def begin() -> None:
                inherit()
                use_devices(devices)

            pool = stack.enter_context(ThreadPoolExecutor(options.threads, "elastic_ckpt", begin))
            stack.callback(pool.shutdown, cancel_futures=True)  # after a failure nobody waits for the rest
            run = pool.map
        for done in chain(run(reader.read_direct, tasks(direct, options.threads)), run(reader.read_staged, staged)):
            stats += done
            bar.update(done.nbytes)
        for buffers in staging:
            buffers.finish()
        for done in run(reader.requantize, parts):
            stats += done
            bar.update(done.nbytes)
    check_copied_scales(plan, tensors)
    return stats


def check_copied_scales(plan: ReadPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Judge the scales of 8-bit blocks that were copied as those of which values were made are judged."""
    targets = {number for number, target in enumerate(plan.targets) if target.flat >= 0 and target.key in _SCALES}
    for item in plan.items if targets else ():
        if item.target in targets:
            with naming_values(plan, item.target, [item]):
                for row in map(item.row, range(item.rows)):
                    scales = tensors[item.target].view(-1)[row.target_offset : row.target_stop]
                    refuse_odd_scales(scales, row.byte_offset)


@contextmanager
def naming_values(plan: ReadPlan, number: int, sources: Sequence[ReadItem]) -> Iterator[None]:
    """Names state and file in an error about values, which carry neither."""
    try:
        yield
    except DamagedError as error:
        if error.file is None:
            target = plan.targets[number]
            error.parameter = f"{target.key} of flat partition {target.flat}"
            error.file = plan.files[sources[0].file].path
        raise


class _Reader:
    """At most one open file per thread: reads come in file order, and a checkpoint may have thousands of files."""

    def __init__(
        self,
        plan: ReadPlan,
        tensors: Sequence[torch.Tensor],
        options: ReadOptions,
        sums: ReadSums | None,
        staging: Sequence[StagingBuffers],
    ) -> None:
        self._plan = plan
        self._tensors = tensors
        self._options = options
        self._sums = sums
        self._prefault = Prefault()
        self._staging: SimpleQueue[StagingBuffers] = SimpleQueue()
        for buffers in staging:
            self._staging.put(buffers)
        self._open: dict[int, tuple[int, Ranges]] = {}  # by thread, its file

    def read_direct(self, reads: Sequence[DirectRead]) -> ReadStats:
        for file, byte_offset, _, buffers in reads:
            self._prefault(buffers)
            self._read(file, byte_offset, buffers)
        return ReadStats(sum(nbytes for _, _, nbytes, _ in reads), len(reads))

    def read_staged(self, batch: StagedBatch) -> ReadStats:
        staging = self._staging.get()
        try:
            for file, byte_offset, _, buffers in reads_into(staging.buffer(batch.nbytes), batch, self._options):
                self._read(file, byte_offset, buffers)
            staging.deliver(batch, self._tensors)
        finally:
            self._staging.put(staging)
        return ReadStats(batch.read_nbytes, batch.calls, sum(item.nbytes for item, _ in batch.parts))

    def requantize(self, item: RequantizeItem) -> ReadStats:
        with naming_values(self._plan, item.target, item.sources):
            return requantize(item, self._tensors, self._read_bytes)

    def _read_bytes(self, file: int, byte_offset: int, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        self._read(file, byte_offset, [memoryview(raw)])
        return raw

    def _read(self, file: int, byte_offset: int, buffers: Sequence[memoryview]) -> None:
        """``preadv`` until all buffers are full; the kernel may return less than requested."""
        remaining = list(buffers)
        while remaining:
            wanted = first_bytes(remaining, self._options.call_nbytes)
            try:
                count = self._ranges(file).read(wanted, byte_offset)
            except OSError as error:
                refuse_used_up(error, self._plan.files[file].path)
                raise self._broken(file, byte_offset, f"{type(error).__name__}: {error.strerror}") from error
            if count == 0:
                raise self._broken(file, byte_offset, "end of file")
            if self._sums is not None:
                self._sums.add(file, byte_offset, first_bytes(wanted, count))
            byte_offset += count
            while remaining and count >= len(remaining[0]):
                count -= len(remaining.pop(0))
            if remaining and count:
                remaining[0] = remaining[0][count:]

    def _ranges(self, file: int) -> Ranges:
        thread = threading.get_ident()
        if thread in self._open:
            number, ranges = self._open[thread]
            if number == file:
                return ranges
            del self._open[thread]  # first: closing may fail
            ranges.close()
        ranges = open_ranges(self._plan.files[file].path)
        self._open[thread] = file, ranges
        return ranges

    def _broken(self, file: int, byte_offset: int, found: str) -> DamagedError:
        source = self._plan.files[file]
        problem = "reading a file of the checkpoint failed"
        expected = f"{source.nbytes} readable bytes"
        remedy = "check the disk or network file system"
        return DamagedError(problem, source.path, expected, f"{found} at byte {byte_offset}", remedy=remedy)

    def close(self) -> None:
        for _, ranges in self._open.values():
            ranges.close()


def check_files(plan: ReadPlan) -> None:
    """Raise :class:`DamagedError` for a file of the plan that is unreadable here or whose size changed. Local.

    Those that other nodes have are looked at there.
    """
    for file in sorted(plan.files_read):
        source = plan.files[file]
        if holder_of(source.path) is not None:
            continue
        try:
            with open_stream(source.path) as stream:  # not only stat: a visible file may not be readable
                nbytes = size_of(stream)
        except SavedOverError:
            raise
        except DamagedError as error:
            problem = "a file of the checkpoint cannot be reached from this rank"
            expected = "one that all ranks share"
            remedy = "mount the folder on every node"
            raise DamagedError(problem, source.path, expected, error.found, remedy=remedy) from error
        if nbytes != source.nbytes:
            problem = "a file of the checkpoint does not have the same size on every rank"
            remedy = "it is still being written or copied, or nodes hold different copies: wait, or share one"
            raise DamagedError(problem, source.path, f"{source.nbytes} bytes", f"{nbytes} bytes", remedy=remedy)


def exchange_shares(plan: ReadPlan, tensors: Mapping[int, torch.Tensor], group: Any) -> int:
    """Broadcast every share of an executed plan from its owner. Collective over the data-parallel group.

    ``tensors``: of every replicated target. Returns the bytes that this rank received.
    """
    members = dist.get_process_group_ranks(group) if plan.shares else []
    me = dist.get_rank(group=group) if plan.shares else 0
    received_nbytes = 0
    for bucket in _buckets(plan, tensors):
        owner = bucket[0].owner
        parts = [tensors[s.target].detach().view(-1)[s.range.start : s.range.stop] for s in bucket]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        # as bytes: not every backend knows every dtype
        wait(dist.broadcast(joined.view(torch.uint8), src=members[owner], group=group, async_op=True))
        if owner == me:
            continue
        received_nbytes += joined.nbytes
        if len(parts) > 1:
            for part, values in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
                part.copy_(values)
    return received_nbytes


def _buckets(plan: ReadPlan, tensors: Mapping[int, torch.Tensor]) -> Iterator[list[BroadcastRange]]:
    """Shares of one owner, dtype and device that fit into a bucket together, or one larger share."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[BroadcastRange]] = {}
    for share in plan.shares:
        tensor = tensors[share.target]
        kinds.setdefault((share.owner, tensor.dtype, tensor.device), []).append(share)
    for (_, dtype, _), shares in kinds.items():
        yield from in_buckets(shares, [share.range.numel * dtype.itemsize for share in shares])

"""Executes read plans of which other nodes have some files: ranks exchange what they lack, and all read together.

What a rank sees itself it reads as ever. The rest is asked for in groups that need a bounded amount of host memory
beside the tensors: bytes that a contiguous tensor of their dtype takes arrive in it, others in staging buffers, from
which they go on as those of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch

from elastic_ckpt import distributed
from elastic_ckpt.core.read_plan import Part, ReadItem, ReadPlan, RequantizeItem
from elastic_ckpt.io.coalesce import DirectRead, ReadOptions, StagedBatch, parts_of, reads_into, scales_of, sort_reads
from elastic_ckpt.io.exchange import Piece, Ranks, exchange
from elastic_ckpt.io.node_files import NodeFiles, fill
from elastic_ckpt.io.reader import ReadSums, check_copied_scales, execute, naming_values
from elastic_ckpt.io.staging import StagingBuffers, requantize
from elastic_ckpt.report import ReadStats, progress_bar
from elastic_ckpt.storage import holder_of, open_ranges
from elastic_ckpt.storage.view import FolderView

#: Of a plan's files that other nodes have, which rank reads each, and its number there.
Holders = Mapping[int, tuple[int, int]]


def exchange_parts(
    doing: str, view: FolderView, parts: Iterator[Part], options: ReadOptions, sums: ReadSums | None = None
) -> ReadStats:
    """Read parts of which other nodes may have files; ranks may have different numbers of them. Collective.

    Raises the same :class:`ElasticCkptError` on every rank; tensors are then partly overwritten. Needs at most
    ``options.staging_nbytes`` of host memory, or one block of 8-bit states if that is more.
    """
    options = replace(options, gap_nbytes=0)  # a request takes no more than what is wanted
    with closing(NodeFiles(view.own_files)) as files:
        reads = _ExchangedReads(doing, parts, options, sums, files)
        while reads.read_next():
            pass
    return reads.stats


class _ExchangedReads:
    """Reads of one rank, part by part; all ranks call each method."""

    def __init__(
        self, doing: str, parts: Iterator[Part], options: ReadOptions, sums: ReadSums | None, files: NodeFiles
    ) -> None:
        self._doing = doing
        self._parts = parts
        self._options = options
        self._sums = sums
        self._files = files  # read for others
        self._ranks = Ranks()
        self._groups: list[list[_Transfer]] = []  # that the part lacks
        self.stats = ReadStats()

    def read_next(self) -> bool:
        """Read the next part of each rank that has one; whether any has. Collective."""
        counts = [count for count in distributed.all_gather(self._doing, self._begin_part) if count is not None]
        if not counts:
            return False
        lacking_nbytes = sum(transfer.read_nbytes for group in self._groups for transfer in group)
        arrived: list[_Transfer] = []
        with progress_bar("elastic_ckpt", lacking_nbytes, self._options.progress, leave=False) as bar:
            for _ in range(max(counts)):
                wanted: dict[int, list[Piece]] = {}
                with distributed.agree(self._doing):
                    bar.update(self._finish(arrived))
                    arrived = self._groups.pop(0) if self._groups else []
                    for transfer in arrived:
                        for holder, piece in transfer.pieces():
                            wanted.setdefault(holder, []).append(piece)
                exchange_all(self._doing, self._ranks, wanted, self._files, self._options.staging_nbytes // 2)
            with distributed.agree(self._doing):
                bar.update(self._finish(arrived))
        return True

    def _begin_part(self) -> int | None:
        """Read what this node has of the next part, if any; how many groups of transfers it lacks. Local."""
        part = next(self._parts, None)
        if part is None:
            self._groups = []
            return None
        plan, tensors = part
        here, there, holders = divided(plan)
        self.stats += execute(here, tensors, self._options, self._sums)
        transfers = _transfers(there, tensors, holders, self._options)
        self._groups = [*_grouped(transfers, self._options.staging_nbytes // 2)]
        return len(self._groups)

    def _finish(self, arrived: Iterable[_Transfer]) -> int:
        """Put what has arrived into the tensors; returns its bytes. Local."""
        nbytes = 0
        for transfer in arrived:
            done = transfer.finish(self._sums)
            self.stats += done
            nbytes += done.nbytes
        return nbytes


def check_elsewhere(doing: str, view: FolderView, plan: ReadPlan, most_nbytes: int) -> None:
    """Have the nodes that have the files which this rank lacks look at them. Collective.

    Raises the same :class:`ElasticCkptError` on every rank for a file that is unreadable there, or another one by now.
    """
    wanted: dict[int, list[Piece]] = {}
    with distributed.agree(doing):
        for file in sorted(plan.files_read):
            place = holder_of(plan.files[file].path)
            if place is not None and plan.files[file].nbytes:
                wanted.setdefault(place[0], []).append(Piece(place[1], 0, [memoryview(bytearray(1))]))
    with closing(NodeFiles(view.own_files)) as files:
        exchange_all(doing, Ranks(), wanted, files, most_nbytes)


def exchange_all(
    doing: str, ranks: Ranks, wanted: Mapping[int, Sequence[Piece]], files: NodeFiles, most_nbytes: int
) -> None:
    """:func:`exchange` of the job's ranks; if a holder cannot read a range, all raise its error. Collective."""
    with distributed.together(doing):
        errors = exchange(ranks, wanted, files, most_nbytes)
    with distributed.agree(doing):
        for error in errors.values():
            raise error


def divided(plan: ReadPlan) -> tuple[ReadPlan, ReadPlan, Holders]:
    """What of a plan this node can read, what it lacks files for, and who has these. Local."""
    places = {file: holder_of(plan.files[file].path) for file in plan.files_read}
    holders = {file: place for file, place in places.items() if place is not None}

    def is_lacking(item: ReadItem) -> bool:
        return item.file in holders or (item.code is not None and scales_of(item)[0] in holders)

    items = [item for item in plan.items if item.file in holders]
    blocks = [item for item in plan.requantize_items if any(map(is_lacking, item.sources))]
    here = replace(
        plan,
        items=tuple(item for item in plan.items if item.file not in holders),
        requantize_items=tuple(item for item in plan.requantize_items if not any(map(is_lacking, item.sources))),
    )
    return here, replace(plan, items=tuple(items), requantize_items=tuple(blocks)), holders


@dataclass
class _Transfer:
    """Ranges that are exchanged together, and what becomes of them."""

    nbytes: int  # of host memory beside the tensors
    read_nbytes: int
    holders: Holders
    #: Allocates that memory, and says which ranges of files go where.
    begin: Callable[[], Sequence[DirectRead]]
    #: Once all of it has arrived: writes what is not in its tensor yet.
    end: Callable[[], ReadStats]
    _reads: Sequence[DirectRead] = ()

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Ranges with the ranks that hold their files; what this node has itself is none of them."""
        self._reads = self.begin()
        for file, byte_offset, _, buffers in self._reads:
            if file in self.holders:
                holder, number = self.holders[file]
                yield holder, Piece(number, byte_offset, buffers)

    def finish(self, sums: ReadSums | None) -> ReadStats:
        """Sum up what has arrived, and put it into the tensors."""
        if sums is not None:
            for file, byte_offset, _, buffers in self._reads:
                sums.add(file, byte_offset, buffers)
        self._reads = ()
        return self.end()


def _grouped(transfers: Iterable[_Transfer], most_nbytes: int) -> Iterator[list[_Transfer]]:
    """Transfers in groups that need so much host memory together, or one that needs more."""
    group: list[_Transfer] = []
    nbytes = 0
    for transfer in transfers:
        if group and nbytes + transfer.nbytes > most_nbytes:
            yield group
            group = []
            nbytes = 0
        group.append(transfer)
        nbytes += transfer.nbytes
    if group:
        yield group


def _transfers(
    plan: ReadPlan, tensors: Sequence[torch.Tensor], holders: Holders, options: ReadOptions
) -> Iterator[_Transfer]:
    """All that a plan lacks."""
    direct, staged = sort_reads(plan, tensors, options)
    direct_nbytes = sum(read[2] for read in direct)
    stats = ReadStats(direct_nbytes, len(direct))

    def end_direct() -> ReadStats:
        check_copied_scales(plan, tensors)
        return stats

    for batch in staged:
        yield _staged(batch, tensors, holders, options)
    for item in plan.requantize_items:
        for part in parts_of(item, options.requantize_nbytes):
            yield _requantized(plan, part, tensors, holders)
    if plan.items:
        yield _Transfer(0, direct_nbytes, holders, lambda: direct, end_direct)  # last: scales may be staged


def _staged(batch: StagedBatch, tensors: Sequence[torch.Tensor], holders: Holders, options: ReadOptions) -> _Transfer:
    devices = {tensors[item.target].device for item, _ in batch.parts}
    buffers: list[StagingBuffers] = []

    def begin() -> list[DirectRead]:
        buffers[:] = [StagingBuffers(batch.nbytes, devices, 1)]
        return list(reads_into(buffers[0].buffer(batch.nbytes), batch, options))

    def end() -> ReadStats:
        staging = buffers.pop()
        staging.deliver(batch, tensors)
        staging.finish()
        return ReadStats(batch.read_nbytes, batch.calls, sum(item.nbytes for item, _ in batch.parts))

    return _Transfer(batch.nbytes, batch.read_nbytes, holders, begin, end)


def _requantized(plan: ReadPlan, item: RequantizeItem, tensors: Sequence[torch.Tensor], holders: Holders) -> _Transfer:
    # those of scales come several times if several sources share them, and count as often in the checksums
    ranges = [(source.file, source.byte_offset, source.nbytes) for source in item.sources]
    ranges += [scales_of(source) for source in item.sources if source.code is not None]
    memory: dict[tuple[int, int, int], bytearray] = {}

    def begin() -> list[DirectRead]:
        reads: list[DirectRead] = []
        for file, of_file in groupby(sorted(ranges), itemgetter(0)):
            source = plan.files[file]
            with nullcontext() if file in holders else closing(open_ranges(source.path)) as here:
                for _, byte_offset, nbytes in of_file:
                    raw = memory[file, byte_offset, nbytes] = bytearray(nbytes)
                    if here is not None:
                        fill(source.path, source.nbytes, here, byte_offset, memoryview(raw))
                    reads.append((file, byte_offset, nbytes, (memoryview(raw),)))
        return reads

    def end() -> ReadStats:
        with naming_values(plan, item.target, item.sources):
            done = requantize(item, tensors, lambda *key: memory[key])
        memory.clear()
        return done

    nbytes = sum(nbytes for _, _, nbytes in ranges)
    return _Transfer(nbytes, nbytes, holders, begin, end)

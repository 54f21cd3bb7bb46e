"""What each rank of a virtual job reads and fills, from its plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan
from elastic_ckpt.io.coalesce import ReadOptions, read_sizes


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank reads, and the memory that it fills.

    Attributes:
        nbytes_read, reads: bytes of tensors from files, and system calls, as :mod:`elastic_ckpt.io.reader` makes them.
        nbytes_compared, nbytes_received: of replicas that are compared before the load; from other ranks' broadcasts.
        by_file: bytes read of each file, by its index in the metadata.
        filled: (key, dtype) -> tensors, elements, and elements among them that no read fills.
        notes: of its plan.
    """

    rank: int
    nbytes_read: int
    reads: int
    nbytes_compared: int
    nbytes_received: int
    by_file: Mapping[int, int]
    filled: Mapping[tuple[str, str], tuple[int, int, int]]
    notes: tuple[str, ...]

    @property
    def files(self) -> int:
        """Number of files that it reads."""
        return len(self.by_file)

    @property
    def memory(self) -> int:
        """Bytes of masters, optimizer states, buffers and frozen weights."""
        return sum(numel * ITEMSIZE[dtype] for (_, dtype), (_, numel, _) in self.filled.items())


def forecast(
    rank: int, local_state: LocalState, plan: LoadPlan, options: ReadOptions, on_accelerator: bool = True
) -> RankForecast:
    """The forecast of a rank; ``on_accelerator``: tensors are read through staging buffers."""
    reads = plan.reads
    sizes = read_sizes(reads, options, on_accelerator)
    replicas = (replica for check in plan.replica_checks for replica in check.replicas)
    received = (share for share in reads.shares if share.owner != local_state.model.coordinates.dp_rank)
    filled: dict[tuple[str, str], tuple[int, int, int]] = {}
    for slot in reads.slots:
        tensors, numel, left = filled.get((slot.key, slot.dtype), (0, 0, 0))
        gaps = sum(gap.numel for gap in slot.gaps)
        filled[slot.key, slot.dtype] = tensors + 1, numel + slot.numel, left + gaps
    return RankForecast(
        rank,
        nbytes_read=sum(nbytes * count for nbytes, count in sizes.items()),
        reads=sizes.total(),
        nbytes_compared=sum(item.nbytes for replica in replicas for item in replica),
        nbytes_received=sum(share.range.numel * ITEMSIZE[reads.slots[share.slot].dtype] for share in received),
        by_file=bytes_by_file(reads),
        filled=filled,
        notes=plan.notes,
    )


def bytes_by_file(reads: ReadPlan) -> dict[int, int]:
    """Bytes of tensors that a plan reads from each file, without scales of requantized blocks."""
    found: dict[int, int] = {}
    for item in chain(reads.items, *(item.sources for item in reads.requantize_items)):
        found[item.file] = found.get(item.file, 0) + item.rows * item.numel * ITEMSIZE[item.dtype]
    return found

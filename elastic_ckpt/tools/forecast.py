"""What a load would cost one rank, from its plan: bytes and reads, and memory. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.io.read_sizes import read_sizes
from elastic_ckpt.io.reader import ReadOptions


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What a forecast depends on beside topology and checkpoint.

    Attributes:
        weights, gradients: dtype of the weights, and of the gradients that the run accumulates. With ``bfloat16`` and
            ``float32``, Adam takes 2 + 4 + 4 + 8 = 18 bytes for each parameter, before ZeRO divides them.
        offload: whether masters and states are in host memory (``offload_optimizer``).
        reading: how its ranks read.
    """

    weights: str = "bfloat16"
    gradients: str = "float32"
    offload: bool = False
    reading: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True, slots=True)
class Reads:
    """What one rank reads.

    Attributes:
        nbytes: of tensors, by its plan (:attr:`elastic_ckpt.report.RankWork.nbytes_read`).
        calls: reads, as :mod:`elastic_ckpt.io.reader` joins and splits them.
        least_nbytes, most_nbytes: smallest and largest of them; those of a requantize item count as one.
        files: files that it reads from.
        nbytes_compared: of copies that it compares before the load.
        nbytes_received: of tensors that other ranks read and send.
    """

    nbytes: int
    calls: int
    least_nbytes: int
    most_nbytes: int
    files: int
    nbytes_compared: int
    nbytes_received: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs for the state of training, in bytes.

    Attributes:
        masters: fp32 master weights.
        states: optimizer states, as (key, dtype, bytes).
        weights: those that the model computes with, where they are others than the masters.
        gradients: of the whole stage, or with ZeRO-2 and 3 of this rank's part.
        others: buffers and frozen weights.
        offloaded: whether masters and states are in host memory.
    """

    masters: int
    states: tuple[tuple[str, str, int], ...]
    weights: int
    gradients: int
    others: int
    offloaded: bool

    @property
    def host(self) -> int:
        """Host memory."""
        return self.masters + sum(nbytes for _, _, nbytes in self.states) if self.offloaded else 0

    @property
    def device(self) -> int:
        """Memory of the accelerator."""
        optimizer = 0 if self.offloaded else self.masters + sum(nbytes for _, _, nbytes in self.states)
        return self.weights + self.gradients + self.others + optimizer


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank reads and needs; ``by_file``: bytes read from each file, by index into the metadata's files."""

    rank: int
    reads: Reads
    memory: Memory
    by_file: Mapping[int, int]


def forecast_rank(rank: int, local_state: LocalState, plan: ReadPlan, run: LiveRun) -> RankForecast:
    """What one rank of a job with accelerators reads and needs.

    Args:
        rank: its global rank.
        local_state, plan: what it holds, and its plan.
        run: precision, and how it reads.
    """
    reads = reads_of(local_state, plan, run.reading, on_accelerator=not run.offload)
    return RankForecast(rank, reads, memory_of(local_state, plan, run), bytes_by_file(plan))


def reads_of(local_state: LocalState, plan: ReadPlan, options: ReadOptions, on_accelerator: bool) -> Reads:
    """What executing a plan reads; ``on_accelerator``: through bounce buffers, straight into memory otherwise."""
    runs = read_sizes(plan, options.limits, on_accelerator)
    sizes = [nbytes for nbytes, count in runs if count]
    copies = (pieces for comparison in plan.comparisons for pieces in comparison.copies)
    received = (share for share in plan.shares if share.owner != local_state.dp_rank)
    return Reads(
        nbytes=sum(nbytes * count for nbytes, count in runs),
        calls=sum(count for _, count in runs),
        least_nbytes=min(sizes, default=0),
        most_nbytes=max(sizes, default=0),
        files=len(bytes_by_file(plan)),
        nbytes_compared=sum(piece.numel * ITEMSIZE[piece.dtype] for pieces in copies for piece in pieces),
        nbytes_received=sum(share.range.numel * ITEMSIZE[plan.slots[share.slot].dtype] for share in received),
    )


def bytes_by_file(plan: ReadPlan) -> dict[int, int]:
    """Bytes of tensors that a plan reads from each file; scales of requantized blocks are left out."""
    found = Counter[int]()
    for copy in plan.copies:
        found[copy.file] += copy.rows * copy.numel * ITEMSIZE[copy.dtype]
    for recode in plan.recodes:
        for piece in recode.pieces:
            found[piece.file] += piece.numel * ITEMSIZE[piece.dtype]
    return dict(found)


def memory_of(local_state: LocalState, plan: ReadPlan, run: LiveRun) -> Memory:
    """What one rank needs for the state of training.

    Persistent parameters of ZeRO-3, communication buckets and activations are left out.
    """
    stage, flat_numel = local_state.zero_stage, sum(flat.numel for flat in local_state.flats)
    states = Counter[tuple[str, str]]()
    for slot in plan.slots:
        if slot.key not in (MASTER, BUFFER, FROZEN):
            states[slot.key, slot.dtype] += slot.numel * ITEMSIZE[slot.dtype]
    # the trainable parameters of this pipeline stage and tensor-parallel rank, however ZeRO cuts them
    members = [name for flat in local_state.flats for name in flat.members]
    whole_numel = sum(math.prod(local_state.layouts[name].shapes[local_state.tp_rank]) for name in members)
    is_master = stage == 0 and run.weights == "float32"  # then the optimizer steps on the weights themselves
    weights_numel = 0 if is_master else flat_numel if stage == 3 else whole_numel
    return Memory(
        masters=sum(flat.numel * ITEMSIZE[flat.dtype] for flat in local_state.flats),
        states=tuple((key, dtype, nbytes) for (key, dtype), nbytes in sorted(states.items())),
        weights=weights_numel * ITEMSIZE[run.weights],
        gradients=(flat_numel if stage >= 2 else whole_numel) * ITEMSIZE[run.gradients],
        others=sum(whole.range.numel * ITEMSIZE[whole.dtype] for whole in local_state.wholes),
        offloaded=run.offload,
    )

"""The cost of a load, from its plans: bytes, reads and memory per rank, and reading time per node. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import ITEMSIZE, WEIGHTS
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan
from elastic_ckpt.io.coalesce import ReadOptions, read_sizes
from elastic_ckpt.tools.virtual import VirtualJob

#: Default bytes/s of a node: a 25 Gbit/s link to a file system.
DEFAULT_BANDWIDTH = 3e9
#: Approximate number of ranks planned of a larger job, unless all are requested.
MOST_BY_DEFAULT = 64


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Options of a run that determine what its ranks need.

    ``weights`` and ``gradients`` (accumulated) are dtypes; with the defaults, Adam takes 2 + 4 + 4 + 8 = 18 bytes per
    parameter before ZeRO partitions. ``offload``: masters and states are in host memory (``offload_optimizer``).
    """

    weights: str = "bfloat16"
    gradients: str = "float32"
    offload: bool = False
    reading: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True, slots=True)
class Reads:
    """What one rank reads.

    Attributes:
        nbytes, files: bytes of tensors (:attr:`elastic_ckpt.report.RankWork.nbytes_read`), and number of files.
        calls: reads, as :mod:`elastic_ckpt.io.reader` joins and splits them.
        least_nbytes, most_nbytes: smallest and largest read; those of a requantize item count as one.
        nbytes_compared, nbytes_received: of replicas compared before the load; of tensors that other ranks broadcast.
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
    """Bytes of training state that one rank needs.

    Attributes:
        masters, gradients, others: fp32 masters, accumulated gradients, buffers and frozen weights.
        states, weights: optimizer states, as (key, dtype, bytes); the model's weights, unless they are the masters.
        offloaded: whether masters and states are in host memory.
    """

    masters: int
    states: tuple[tuple[str, str, int], ...]
    weights: int
    gradients: int
    others: int
    offloaded: bool

    @property
    def total(self) -> int:
        """Host and accelerator together."""
        optimizer = self.masters + sum(nbytes for _, _, nbytes in self.states)
        return self.weights + self.gradients + self.others + optimizer

    @property
    def device(self) -> int:
        """Accelerator memory."""
        return self.weights + self.gradients + self.others if self.offloaded else self.total

    @property
    def host(self) -> int:
        """Host memory."""
        return self.total - self.device


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Reads and memory of one rank; ``by_file``: bytes read per file, by index into the metadata's files."""

    rank: int
    reads: Reads
    memory: Memory
    by_file: Mapping[int, int]


def forecast_rank(rank: int, local_state: LocalState, plan: LoadPlan, run: LiveRun) -> RankForecast:
    """Reads and memory of one rank of a job with accelerators."""
    reads = reads_of(local_state, plan, run.reading, on_accelerator=not run.offload)
    return RankForecast(rank, reads, memory_of(local_state, plan, run), bytes_by_file(plan.reads))


def reads_of(local_state: LocalState, plan: LoadPlan, options: ReadOptions, on_accelerator: bool) -> Reads:
    """The reads of a plan; ``on_accelerator``: through staging buffers instead of straight into memory."""
    reads = plan.reads
    sizes = read_sizes(reads, options, on_accelerator)
    replicas = (replica for check in plan.replica_checks for replica in check.replicas)
    received = (share for share in reads.shares if share.owner != local_state.model.coordinates.dp_rank)
    return Reads(
        nbytes=sum(nbytes * count for nbytes, count in sizes.items()),
        calls=sizes.total(),
        least_nbytes=min(sizes, default=0),
        most_nbytes=max(sizes, default=0),
        files=len(reads.files_read),
        nbytes_compared=sum(item.nbytes for replica in replicas for item in replica),
        nbytes_received=sum(share.range.numel * ITEMSIZE[reads.slots[share.slot].dtype] for share in received),
    )


def bytes_by_file(reads: ReadPlan) -> dict[int, int]:
    """Bytes of tensors that a plan reads from each file, without scales of requantized blocks."""
    found: dict[int, int] = {}
    for item in chain(reads.items, *(item.sources for item in reads.requantize_items)):
        found[item.file] = found.get(item.file, 0) + item.rows * item.numel * ITEMSIZE[item.dtype]
    return found


def memory_of(local_state: LocalState, plan: LoadPlan, run: LiveRun) -> Memory:
    """Memory of one rank, without ZeRO-3's persistent parameters, communication buckets and activations."""
    stage, flat_numel = local_state.zero_stage, sum(flat.numel for flat in local_state.flats)
    states = Counter[tuple[str, str]]()
    for slot in plan.reads.slots:
        if slot.key not in WEIGHTS:
            states[slot.key, slot.dtype] += slot.numel * ITEMSIZE[slot.dtype]
    # trainable parameters of this pipeline stage and tensor-parallel rank, before ZeRO partitions them
    members = [name for flat in local_state.flats for name in flat.members]
    model = local_state.model
    whole_numel = sum(math.prod(model.layouts[name].shapes[model.coordinates.tp_rank]) for name in members)
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


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that a job's consecutive ranks fill one after the other; ``bandwidth``: bytes/s per node."""

    ranks: int
    nodes: int
    bandwidth: float = DEFAULT_BANDWIDTH

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    def ranks_of(self, node: int) -> int:
        """Number of ranks on a node; the last nodes may have fewer, or none."""
        return max(min(self.ranks - node * self.ranks_per_node, self.ranks_per_node), 0)

    def some_ranks(self) -> list[int]:
        """All ranks of a small job; of a large one, those of evenly spaced nodes from the first to the last."""
        if self.ranks <= MOST_BY_DEFAULT:
            return list(range(self.ranks))
        per_node = self.ranks_per_node
        filled = -(-self.ranks // per_node)
        count = max(MOST_BY_DEFAULT // per_node, min(filled, 2))
        nodes = sorted({round(number * (filled - 1) / max(count - 1, 1)) for number in range(count)})
        return [rank for node in nodes for rank in range(node * per_node, node * per_node + self.ranks_of(node))]


@dataclass(frozen=True, slots=True)
class Node:
    """Bytes that a node's planned ranks read and compare; ``is_complete``: whether all its ranks were planned."""

    node: int
    ranks: int
    nbytes: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class ReadingTime:
    """Seconds to read the slowest node's bytes at ``bandwidth`` bytes/s; an estimate unless all ranks were planned."""

    reading: float
    node_nbytes: int
    bandwidth: float
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """The planned ranks of a job, ascending; notes of their plans; LocalState and plan of the last one."""

    cluster: Cluster
    run: LiveRun
    ranks: tuple[RankForecast, ...]
    notes: tuple[str, ...]
    last: tuple[LocalState, LoadPlan]

    @property
    def heaviest(self) -> RankForecast:
        """The rank that needs most memory, on device and host together."""
        return max(self.ranks, key=lambda each: each.memory.total)


def survey(job: VirtualJob, ranks: Iterable[int], cluster: Cluster, run: LiveRun) -> Survey:
    """Plan ranks of a job. Raises :class:`ElasticCkptError` if the load would be refused, ValueError if none."""
    found: list[RankForecast] = []
    notes: dict[str, None] = {}
    for rank in ranks:
        last = job.planned(rank)
        found.append(forecast_rank(rank, *last, run))
        notes |= dict.fromkeys(last[1].notes)
    if not found:
        raise ValueError("a survey of no ranks")
    return Survey(cluster, run, tuple(found), tuple(notes), last)


def nodes_of(ranks: Sequence[RankForecast], cluster: Cluster) -> list[Node]:
    """The nodes of the planned ranks."""
    found: dict[int, list[int]] = {}
    for each in ranks:
        nbytes = each.reads.nbytes + each.reads.nbytes_compared
        found.setdefault(each.rank // cluster.ranks_per_node, []).append(nbytes)
    return [
        Node(node, len(planned), sum(planned), len(planned) == cluster.ranks_of(node))
        for node, planned in sorted(found.items())
    ]


def reading_time(ranks: Sequence[RankForecast], cluster: Cluster) -> ReadingTime:
    """Reading time of the slowest node; if none was planned completely, of ranks that all read the most."""
    complete = [node.nbytes for node in nodes_of(ranks, cluster) if node.is_complete]
    most = max(each.reads.nbytes + each.reads.nbytes_compared for each in ranks)
    nbytes = max(complete) if complete else most * cluster.ranks_per_node
    return ReadingTime(nbytes / cluster.bandwidth, nbytes, cluster.bandwidth, len(ranks) < cluster.ranks)


def spread(values: Sequence[int]) -> dict[str, float]:
    """Least, mean, most and total of at least one number."""
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values), "total": sum(values)}

"""What the ranks of a job that does not run would read and need, and how long its nodes read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.tools.forecast import LiveRun, RankForecast, forecast_rank
from elastic_ckpt.tools.virtual.job import VirtualJob

#: Bytes/s of a node, unless the user says another: what a 25 Gbit/s link to a file system gives.
DEFAULT_BANDWIDTH = 3e9
#: Of bigger jobs, about so many ranks are planned, unless all are asked for.
MOST_BY_DEFAULT = 64


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a job would run.

    Attributes:
        ranks: of the job.
        nodes: over which they are packed, one node after the other.
        bandwidth: of one node, in bytes/s.
    """

    ranks: int
    nodes: int
    bandwidth: float = DEFAULT_BANDWIDTH

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    def ranks_of(self, node: int) -> int:
        """How many ranks a node has; the last ones may have fewer, or none."""
        return max(min(self.ranks - node * self.ranks_per_node, self.ranks_per_node), 0)

    def some_ranks(self, most: int = MOST_BY_DEFAULT) -> list[int]:
        """All ranks of a small job; of a big one those of some nodes, evenly spread from the first to the last."""
        if self.ranks <= most:
            return list(range(self.ranks))
        per_node = self.ranks_per_node
        filled = -(-self.ranks // per_node)
        count = max(most // per_node, min(filled, 2))
        nodes = sorted({round(number * (filled - 1) / max(count - 1, 1)) for number in range(count)})
        return [rank for node in nodes for rank in range(node * per_node, node * per_node + self.ranks_of(node))]


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        node: its number.
        ranks: how many of its ranks were planned.
        nbytes: that these read, those that they compare among them.
        is_complete: whether they are all that it has.
    """

    node: int
    ranks: int
    nbytes: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class ReadingTime:
    """How long the slowest node reads: bytes over bandwidth, and nothing that was fitted.

    Attributes:
        reading: seconds: ``node_nbytes`` over ``bandwidth``.
        node_nbytes: bytes that the slowest node reads.
        bandwidth: bytes/s of a node.
        is_estimate: whether ``node_nbytes`` was estimated, because not all ranks were planned.
    """

    reading: float
    node_nbytes: int
    bandwidth: float
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """What the ranks of a job come to.

    Attributes:
        cluster, run: where the job would run, and how.
        ranks: those that were planned, ascending.
        notes: of their plans, each once.
        last: what the last of them holds, and its plan.
    """

    cluster: Cluster
    run: LiveRun
    ranks: tuple[RankForecast, ...]
    notes: tuple[str, ...]
    last: tuple[LocalState, ReadPlan]

    @property
    def heaviest(self) -> RankForecast:
        """The rank that needs most memory, of device and host together."""
        return max(self.ranks, key=lambda each: each.memory.device + each.memory.host)


def survey(job: VirtualJob, ranks: Iterable[int], cluster: Cluster, run: LiveRun) -> Survey:
    """Plan some ranks of a job.

    Args:
        job: the job.
        ranks: which ones.
        cluster, run: what the forecast depends on.

    Raises:
        ElasticCkptError: the load would be refused.
        ValueError: no rank.
    """
    found: list[RankForecast] = []
    notes: dict[str, None] = {}
    last: tuple[LocalState, ReadPlan] | None = None
    for rank in ranks:
        last = job.planned(rank)
        found.append(forecast_rank(rank, *last, run))
        notes |= dict.fromkeys(last[1].notes)
    if last is None:
        raise ValueError("a survey of no ranks")
    return Survey(cluster, run, tuple(found), tuple(notes), last)


def nodes_of(ranks: Sequence[RankForecast], cluster: Cluster) -> list[Node]:
    """The nodes whose ranks were planned."""
    found: dict[int, list[int]] = {}
    for each in ranks:
        nbytes = each.reads.nbytes + each.reads.nbytes_compared
        found.setdefault(each.rank // cluster.ranks_per_node, []).append(nbytes)
    return [
        Node(node, len(planned), sum(planned), len(planned) == cluster.ranks_of(node))
        for node, planned in sorted(found.items())
    ]


def reading_time(ranks: Sequence[RankForecast], cluster: Cluster) -> ReadingTime:
    """How long the slowest node reads.

    Args:
        ranks: those that were planned. If no node was planned as a whole, each rank of the slowest is taken to read as
            much as the one that reads most.
        cluster: where the job runs.
    """
    complete = [node.nbytes for node in nodes_of(ranks, cluster) if node.is_complete]
    most = max(each.reads.nbytes + each.reads.nbytes_compared for each in ranks)
    nbytes = max(complete) if complete else most * cluster.ranks_per_node
    return ReadingTime(nbytes / cluster.bandwidth, nbytes, cluster.bandwidth, len(ranks) < cluster.ranks)


def spread(values: Sequence[int]) -> dict[str, float]:
    """The least, the mean, the most, and the total of at least one number."""
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values), "total": sum(values)}

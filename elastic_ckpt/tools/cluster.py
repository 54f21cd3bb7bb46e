"""Where a job would run, and how long its nodes take to read: bytes over bandwidth, and nothing that was fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ckpt.tools.forecast import RankForecast

#: Bytes/s of a node that is not said to be faster: what a 25 Gbit/s link to a file system gives.
DEFAULT_BANDWIDTH = 3e9


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


@dataclass(frozen=True, slots=True)
class ReadingTime:
    """How long the slowest node reads.

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


def nodes_of(ranks: Sequence[RankForecast], cluster: Cluster) -> list[Node]:
    """The nodes whose ranks were planned."""
    found: dict[int, list[RankForecast]] = {}
    for each in ranks:
        found.setdefault(each.rank // cluster.ranks_per_node, []).append(each)
    return [
        Node(
            node,
            len(planned),
            sum(each.reads.nbytes + each.reads.nbytes_compared for each in planned),
            len(planned) == cluster.ranks_of(node),
        )
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

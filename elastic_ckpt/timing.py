"""How long a load would take, by the fitted model of :mod:`elastic_ckpt.scaling`. Pure.

It is the time of the slowest node: reading, opening files, metadata, planning and agreeing. It leaves out the commit,
what ranks send each other, and copies to accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ckpt.catalog import Catalog
from elastic_ckpt.forecast import RankForecast
from elastic_ckpt.scaling import (
    Factors,
    Room,
    Scaling,
    agreeing_factors,
    metadata_factors,
    opening_factors,
    planning_factors,
    reading_factors,
)

#: Of a node that is not said to be faster, in bytes/s: what a 25 Gbit/s link to a file system gives.
DEFAULT_BANDWIDTH = 3e9
#: Of such a node: what one of eight accelerators has at the least.
DEFAULT_CORES = 64


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
        cores: of one node.
    """

    ranks: int
    nodes: int
    bandwidth: float = DEFAULT_BANDWIDTH
    cores: int = DEFAULT_CORES

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    def ranks_of(self, node: int) -> int:
        """How many ranks a node has; the last ones may have fewer, or none."""
        return max(min(self.ranks - node * self.ranks_per_node, self.ranks_per_node), 0)


@dataclass(frozen=True, slots=True)
class Saved:
    """Of a checkpoint, what its metadata and planning cost time for.

    Attributes:
        files: of the checkpoint.
        parameters: that one of them describes: those of a pipeline stage.
        extents: of all its tensors.
        stages: pipeline stages of the live run, which share the extents.
        recut: parameters of one of them, where tensor-parallel shards are cut anew.
    """

    files: int
    parameters: float
    extents: int
    stages: int = 1
    recut: float = 0.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long a load would take, and what that follows from.

    Attributes:
        reading: of the slowest node: the greater of the two that follow.
        by_bandwidth: its bytes at its bandwidth.
        by_work: what its busiest rank has to do.
        opening: files, to read from them, by the rank that reads from most.
        metadata: opening each file once, and telling everybody.
        planning: of the rank with most copies.
        agreeing: waiting for each other.
        node_nbytes: bytes that the slowest node reads.
        bandwidth: bytes/s of a node.
        files, extents, ranks: of the checkpoint, and that read its metadata.
        is_estimate: whether ``node_nbytes`` was estimated, because not all ranks were planned.
    """

    reading: float
    by_bandwidth: float
    by_work: float
    opening: float
    metadata: float
    planning: float
    agreeing: float
    node_nbytes: int
    bandwidth: float
    files: int
    extents: int
    ranks: int
    is_estimate: bool

    @property
    def total(self) -> float:
        return self.reading + self.opening + self.metadata + self.planning + self.agreeing


def saved_of(catalog: Catalog, tp: int, stages: int) -> Saved:
    """Files and extents of a checkpoint, for a run of such a tensor-parallel degree, of so many pipeline stages."""
    extents = sum(len(tensor.extents) for tensor in catalog.tensors.values())
    recut = len(catalog.parameters) / stages if tp != catalog.source.tp else 0.0
    return Saved(len(catalog.files), len(catalog.parameters) / catalog.source.pp, extents, stages, recut)


def nodes_of(ranks: Sequence[RankForecast], cluster: Cluster) -> list[Node]:
    """The nodes whose ranks were planned."""
    found: dict[int, list[RankForecast]] = {}
    for each in ranks:
        found.setdefault(each.rank // cluster.ranks_per_node, []).append(each)
    return [
        Node(
            node,
            len(held),
            sum(each.reads.nbytes + each.reads.nbytes_compared for each in held),
            len(held) == cluster.ranks_of(node),
        )
        for node, held in sorted(found.items())
    ]


def seconds_of(
    ranks: Sequence[RankForecast], cluster: Cluster, saved: Saved, scaling: Scaling, threads: int
) -> Seconds:
    """How long the load takes: each file's metadata is read by one rank, all plan, and the slowest node reads.

    Args:
        ranks: those that were planned. If no node was planned as a whole, each rank of the slowest is taken to read as
            much as the one that reads most.
        cluster: where the job runs.
        saved: what it reads.
        scaling: what each of these costs.
        threads: by which each rank reads.
    """
    complete = [node.nbytes for node in nodes_of(ranks, cluster) if node.is_complete]
    most = max(each.reads.nbytes + each.reads.nbytes_compared for each in ranks)
    nbytes = max(complete) if complete else most * cluster.ranks_per_node
    room = Room(cluster.ranks_per_node, cluster.cores, threads)

    def longest(factors: Iterable[Factors]) -> float:
        return max(map(scaling.coefficients.of, factors))

    by_bandwidth = nbytes / cluster.bandwidth
    by_work = longest(reading_factors(each.reads.work, room) for each in ranks)
    extents = saved.extents / saved.stages
    return Seconds(
        reading=max(by_bandwidth, by_work),
        by_bandwidth=by_bandwidth,
        by_work=by_work,
        opening=longest(opening_factors(each.reads.work, room) for each in ranks),
        metadata=scaling.coefficients.of(
            metadata_factors(saved.files, saved.parameters, saved.extents, cluster.ranks, room)
        ),
        planning=longest(planning_factors(extents, each.reads.copies, saved.recut, room) for each in ranks),
        agreeing=scaling.coefficients.of(agreeing_factors(cluster.ranks)),
        node_nbytes=nbytes,
        bandwidth=cluster.bandwidth,
        files=saved.files,
        extents=saved.extents,
        ranks=cluster.ranks,
        is_estimate=len(ranks) < cluster.ranks,
    )

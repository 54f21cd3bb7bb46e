"""Looks at the ranks of a job that does not run: what each would read and need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.io.reader import ReadOptions
from elastic_ckpt.tools.cluster import Cluster, Node, ReadingTime, nodes_of, reading_time
from elastic_ckpt.tools.forecast import Precision, RankForecast, forecast_rank
from elastic_ckpt.tools.virtual.job import VirtualJob

#: Of bigger jobs, about so many ranks are planned, unless all are asked for.
MOST_BY_DEFAULT = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """What a forecast depends on beside topology and checkpoint.

    Attributes:
        cluster: where the job would run.
        precision: of its weights and gradients.
        reading: how its ranks read.
        offload: whether masters and states are in host memory.
        on_accelerator: whether it has accelerators.
    """

    cluster: Cluster
    precision: Precision
    reading: ReadOptions
    offload: bool = False
    on_accelerator: bool = True


@dataclass(frozen=True, slots=True)
class Survey:
    """What the ranks of a job come to.

    Attributes:
        ranks: those that were planned, ascending.
        nodes: theirs.
        time: that reading takes.
        notes: of their plans, each once.
        last: what the last of them holds, and its plan.
    """

    ranks: tuple[RankForecast, ...]
    nodes: tuple[Node, ...]
    time: ReadingTime
    notes: tuple[str, ...]
    last: tuple[LocalState, ReadPlan]


def some_ranks(cluster: Cluster, most: int = MOST_BY_DEFAULT) -> list[int]:
    """All ranks of a small job; of a big one those of some nodes, evenly spread, the first and the last among them."""
    if cluster.ranks <= most:
        return list(range(cluster.ranks))
    per_node = cluster.ranks_per_node
    filled = -(-cluster.ranks // per_node)
    count = max(most // per_node, min(filled, 2))
    nodes = sorted({round(number * (filled - 1) / max(count - 1, 1)) for number in range(count)})
    return [rank for node in nodes for rank in range(node * per_node, min((node + 1) * per_node, cluster.ranks))]


def survey(job: VirtualJob, ranks: Iterable[int], setting: Setting) -> Survey:
    """Plan some ranks of a job.

    Args:
        job: the job.
        ranks: which ones.
        setting: what the forecast depends on.

    Raises:
        ElasticCkptError: the load would be refused.
        ValueError: no rank.
    """
    found: list[RankForecast] = []
    notes: dict[str, None] = {}
    last: tuple[LocalState, ReadPlan] | None = None
    for rank in ranks:
        last = local_state, plan = job.planned(job.topology.place(rank))
        found.append(
            forecast_rank(
                rank,
                local_state,
                plan,
                setting.precision,
                setting.reading,
                setting.offload,
                setting.on_accelerator,
            )
        )
        notes |= dict.fromkeys(plan.notes)
    if last is None:
        raise ValueError("a survey of no ranks")
    return Survey(
        ranks=tuple(found),
        nodes=tuple(nodes_of(found, setting.cluster)),
        time=reading_time(found, setting.cluster),
        notes=tuple(notes),
        last=last,
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some numbers: the least, the mean, the most, and all together."""

    least: int
    mean: float
    most: int
    total: int


def spread(values: Sequence[int]) -> Spread:
    """Of at least one number."""
    return Spread(min(values), sum(values) / len(values), max(values), sum(values))


def heaviest(ranks: Sequence[RankForecast]) -> RankForecast:
    """The rank that needs most memory, of device and host together."""
    return max(ranks, key=lambda each: each.memory.device + each.memory.host)

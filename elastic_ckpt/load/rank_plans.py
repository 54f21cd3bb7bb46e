"""What ranks tell each other of their plans, and have to agree on, before anything is overwritten."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import NO_SHARE, LoadPlan, RestoredShare
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.io.compare_replicas import Drift, comparisons, find_drift, judge_drift, options_of_comparisons
from elastic_ckpt.io.exchanged_reads import check_elsewhere, exchange_parts
from elastic_ckpt.io.reader import check_files
from elastic_ckpt.load.extra_states import files_of
from elastic_ckpt.storage import VIEW, medium_of
from elastic_ckpt.storage.local import look_again
from elastic_ckpt.storage.media import UNKNOWN, Medium
from elastic_ckpt.storage.view import FolderView


@dataclass(frozen=True)
class RankPlan:
    """What the other ranks need to know of a rank's plan."""

    mp_rank: int  # tensor- and pipeline-parallel
    digest: str  # equal on ranks that divide replicated tensors in the same way
    differences: Sequence[Drift]  # of replicas in this rank's share of the comparisons
    may_differ: frozenset[str]  # the parameters that may; only ranks of their stage know
    notes: tuple[str, ...]
    runs_code: bool  # loads an lr scheduler's state, or those of DeepSpeed's own schedulers
    medium: Medium = UNKNOWN  # where the files are
    share: RestoredShare = NO_SHARE  # of the weights that this rank holds
    #: What the modules of this rank take beside parameters and buffers: whether any takes some, and the files of it.
    sets_extra_states: bool = False
    files_of_extra_states: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: LoadPlan, mp_rank: int, config: ElasticConfig, folder: str, runs_code: bool = False) -> RankPlan:
        """Check the files that a plan reads, and compare this rank's share of the replicas in them."""
        check_files(plan.reads)
        medium = medium_of(folder, config.reading.storage)
        view = VIEW.get()
        differences: Sequence[Drift] = ()
        if view is None or not view.is_shared:
            differences = find_drift(plan.reads.files, plan.replica_checks, read_options(config, medium))
        look_again(reopen=False)
        shared = [(s.key, s.name, s.flat, s.numel, s.dtype) for s in plan.reads.targets if s.replicated]
        digest = hashlib.sha256(repr((shared, plan.reads.shares)).encode()).hexdigest()
        notes = (*plan.notes, *(() if view is None else view.notes))
        extra = bool(plan.extra_states), files_of(plan.extra_states)
        return cls(mp_rank, digest, differences, plan.may_differ, notes, runs_code, medium, plan.share, *extra)


def agree_on_plans(
    make_plan: Callable[[], RankPlan], plan_made: Callable[[], LoadPlan], config: ElasticConfig
) -> tuple[list[RankPlan], tuple[str, ...], Medium]:
    """The plans of all ranks, their notes, and where the files are: a network if any rank says so. Collective.

    ``plan_made``: the plan of this rank, once ``make_plan`` has returned what the others need to know of it.
    """
    everybody = distributed.all_gather("plan the load", make_plan)
    _refuse_different_shares(everybody)
    if (view := VIEW.get()) is not None and view.is_shared:
        everybody = _compared_elsewhere(view, everybody, plan_made(), config)
    with distributed.deterministic("judge copies of replicated parameters"):
        return everybody, _notes(everybody, config), max(each.medium for each in everybody)


def _compared_elsewhere(
    view: FolderView, everybody: Sequence[RankPlan], plan: LoadPlan, config: ElasticConfig
) -> list[RankPlan]:
    """Look at the files of other nodes, and compare replicas in them, which takes collectives. Collective."""
    doing = "compare copies of replicated parameters"
    options = read_options(config, max(each.medium for each in everybody))
    check_elsewhere(doing, view, plan.reads, options.staging_nbytes)
    found: list[Drift] = []
    parts = comparisons(plan.reads.files, plan.replica_checks, options, found)
    exchange_parts(doing, view, parts, options_of_comparisons(options))
    of_all = distributed.all_gather(doing, lambda: found)
    return [replace(each, differences=drifts) for each, drifts in zip(everybody, of_all, strict=True)]


def _notes(everybody: Sequence[RankPlan], config: ElasticConfig) -> tuple[str, ...]:
    """All ranks' notes, and about replicas that differ; the same :class:`MismatchError` on all if these may not."""
    notes = tuple(dict.fromkeys(chain.from_iterable(each.notes for each in everybody)))
    differences = [difference for each in everybody for difference in each.differences]
    may_differ = frozenset[str]().union(*(each.may_differ for each in everybody))
    return notes + (judge_drift(differences, may_differ, config.replicated_params) if differences else ())


def _refuse_different_shares(everybody: Sequence[RankPlan]) -> None:
    """Refuse if ranks of one model-parallel rank divide replicated tensors differently, which would deadlock."""
    first: dict[int, tuple[int, str]] = {}
    for rank, other in enumerate(everybody):
        reference, expected = first.setdefault(other.mp_rank, (rank, other.digest))
        if other.digest != expected:
            problem = "ranks hold different models: their buffers, frozen or unpartitioned parameters do not agree"
            same = "the same names, sizes and dtypes on every rank"
            found = f"rank {rank} differs from rank {reference}"
            raise MismatchError(problem, None, same, found, remedy="build the same model on every rank", rank=rank)

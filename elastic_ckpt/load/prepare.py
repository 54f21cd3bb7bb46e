"""Describe the engine, read metadata, plan, agree: the part of a load that changes nothing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.local_state import LocalState, ModelLayout
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.compat import refuse_pending_gradients
from elastic_ckpt.engines.coordinates import model_of_all
from elastic_ckpt.engines.training_state import (
    LoadArguments,
    TrainingStateCommit,
    compare_batches,
    restores_states,
    warn_of_unscaled_gradients,
)
from elastic_ckpt.engines.zero import select_adapter
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats import Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.io.compare_replicas import Drift, find_drift, judge_drift
from elastic_ckpt.io.reader import check_files
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.storage.local import look_again


class Clock:
    """Wall-clock seconds by phase; a nested phase does not count towards the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as part of ``phase``."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._inner
        self._inner = outer + spent


@dataclass(frozen=True)
class LoadCall:
    """A call of ``load_checkpoint``: the live engine, arguments and configuration."""

    engine: Any
    arguments: LoadArguments
    config: ElasticConfig


@dataclass(frozen=True)
class RankPlan:
    """What the other ranks need to know of a rank's plan."""

    mp_rank: int  # tensor- and pipeline-parallel
    digest: str  # equal on ranks that divide replicated tensors in the same way
    differences: Sequence[Drift]  # of replicas in this rank's share of the comparisons
    may_differ: frozenset[str]  # the parameters that may; only ranks of their stage know
    notes: tuple[str, ...]
    runs_code: bool  # loads an lr scheduler's state, or those of DeepSpeed's own schedulers


@dataclass(frozen=True)
class Prepared:
    """Both sides, the plan, warnings, and the plans of all ranks: everything known before anything changes."""

    call: LoadCall
    found: CheckpointInfo
    clock: Clock
    adapter: EngineAdapter
    local_state: LocalState
    checkpoint: Checkpoint
    plan: LoadPlan
    host: TrainingStateCommit
    warnings: tuple[str, ...]
    #: Whether any rank loads the state of a scheduler; the others wait for it.
    runs_code: bool


def prepare(call: LoadCall, found: CheckpointInfo) -> Prepared:
    """Describe the engine, read metadata, plan, agree. Collective; changes nothing.

    Raises the same :class:`ElasticCkptError` on every rank.
    """
    engine, arguments, config, clock = call.engine, call.arguments, call.config, Clock()
    with clock("plan"):
        adapter, local_state = _describe(engine, arguments)
    at = local_state.model.coordinates
    with clock("metadata"):
        options = MetadataOptions(
            trust_pickle=config.trust_pickle,
            check_shards=config.verify == "load",
            states=state_options(config),
            with_states=restores_states(arguments),
            coordinates=at,
            skip_unreadable=config.on_unreadable_entry == "skip",
        )
        checkpoint = read_checkpoint(found, options, local_state, config.rename)
    with clock("plan"):
        planned: list[tuple[LoadPlan, TrainingStateCommit, tuple[str, ...]]] = []

        def make_plan() -> RankPlan:
            warnings = _compare_runs(call, at.data_degree, checkpoint)
            host = TrainingStateCommit(engine, checkpoint.training_state, arguments, at)
            warnings += tuple(checkpoint.training_state.left_out.values())
            options = LoadOptions.of(
                config,
                optimizer_states=restores_states(arguments),
                strict=arguments.load_module_strict,
                scheduler=host.loads_scheduler,
            )
            plan = plan_load(checkpoint.metadata, local_state, options)
            check_files(plan.reads)
            planned.append((plan, host, warnings))
            with clock("metadata"):
                differences = find_drift(plan.reads.files, plan.replica_checks, read_options(config))
            look_again(reopen=False)
            shared = [(s.key, s.name, s.flat, s.numel, s.dtype) for s in plan.reads.targets if s.replicated]
            digest = hashlib.sha256(repr((shared, plan.reads.shares)).encode()).hexdigest()
            return RankPlan(at.mp_rank, digest, differences, plan.may_differ, plan.notes, host.runs_code)

        everybody = distributed.all_gather("plan the load", make_plan)
        _refuse_different_shares(everybody)
        plan, host, warnings = planned[0]
        with distributed.deterministic("judge copies of replicated parameters"):
            plan = replace(plan, notes=_notes(everybody, config))
    runs_code = any(each.runs_code for each in everybody)
    return Prepared(call, found, clock, adapter, local_state, checkpoint, plan, host, warnings, runs_code)


def _describe(engine: Any, arguments: LoadArguments) -> tuple[EngineAdapter, LocalState]:
    """The adapter of this rank's engine, and its LocalState. Collective."""
    described: list[tuple[EngineAdapter, LocalState]] = []

    def describe() -> ModelLayout | None:
        adapter = select_adapter(engine, with_states=restores_states(arguments))
        refuse_pending_gradients(engine)
        local_state = adapter.local_state()
        described.append((adapter, local_state))
        coordinates = local_state.model.coordinates
        return replace(local_state.model, run={}) if coordinates.tp * coordinates.pp * coordinates.ep > 1 else None

    everybody = [model for model in distributed.all_gather("describe the live engine", describe) if model is not None]
    adapter, local_state = described[0]
    return adapter, replace(local_state, model=model_of_all(local_state.model, everybody))


def _compare_runs(call: LoadCall, data_degree: int, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Warnings about differences between the runs that no state shows; none if weights alone are loaded."""
    engine, saved, metadata = call.engine, checkpoint.training_state, checkpoint.metadata
    if call.arguments.load_module_only or not call.arguments.has_optimizer:
        return ()
    warnings = compare_batches(engine, data_degree, saved.batch, refuse=call.config.on_change == "error")
    if not restores_states(call.arguments):
        return warnings
    return warnings + metadata.warnings + warn_of_unscaled_gradients(engine, saved, metadata.source.zero_stage)


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
            expected, found = (
                "the same names, sizes and dtypes on every rank",
                f"rank {rank} differs from rank {reference}",
            )
            remedy = "build the same model on every rank"
            raise MismatchError(problem, expected=expected, found=found, remedy=remedy, rank=rank)

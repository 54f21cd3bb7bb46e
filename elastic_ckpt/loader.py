"""One elastic load, from folder to running engine: the flow of the README's picture, in order."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from elastic_ckpt import parallel
from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.destinations import Destinations, Place
from elastic_ckpt.drift import Difference, find_drift, judge_drift
from elastic_ckpt.engines import EngineAdapter, select_adapter
from elastic_ckpt.engines.batch import compare_batches
from elastic_ckpt.engines.host import (
    HostCommit,
    LoadArguments,
    refuse_pending_gradients,
    restores_scheduler,
    restores_states,
)
from elastic_ckpt.engines.loss_scale import warn_of_unscaled_gradients
from elastic_ckpt.engines.place import place_of, with_place
from elastic_ckpt.errors import ElasticCkptError, MismatchError, PartialLoadError
from elastic_ckpt.exchange import exchange_shares
from elastic_ckpt.formats import READERS, Checkpoint, Found
from elastic_ckpt.formats import ReadOptions as MetadataOptions
from elastic_ckpt.plan import Outcome, Plan
from elastic_ckpt.planner import LoadOptions, plan_load
from elastic_ckpt.reader import check_files, execute, read_options
from elastic_ckpt.recoder import RecodeStats
from elastic_ckpt.report import LoadReport, RankWork, united
from elastic_ckpt.rules.book import RuleBook
from elastic_ckpt.rules.presets import load_preset

logger = logging.getLogger(__name__)


def load(engine: Any, found: Found, arguments: LoadArguments, config: ElasticConfig) -> tuple[str, dict[str, Any]]:
    """Restore a checkpoint into a live engine. Collective: every rank of the job calls it.

    1. describe the engine; 2. read metadata, each file on one rank; 3. plan and agree; 4. scheduler; 5. read, and
    send around what every rank holds; 6. commit. Up to step 3 nothing of the engine changes, and step 4 is taken back
    where any rank fails in it.

    Returns:
        What ``DeepSpeedEngine.load_checkpoint`` returns: path of the model-states file, and client state.

    Raises:
        ElasticCkptError: the same on every rank. The engine is as it was before the call, unless the error is a
            :class:`PartialLoadError`.
    """
    clock = _Clock()
    with _uncollected():
        ready = _prepare(engine, found, arguments, config, clock)
    adapter, plan = ready.adapter, ready.plan
    host = HostCommit(engine, ready.checkpoint.host, arguments, ready.place)
    _load_scheduler(host, plan)
    try:
        with clock("read"):
            done = _read(adapter, plan, config)
        with clock("exchange"):
            received_nbytes = exchange_shares(plan, done.tensors, adapter.dp_group)
        with clock("commit"):
            client_state = _commit(adapter, plan, host, exact_masters=restores_states(arguments))
    except ElasticCkptError as error:
        raise _spoilt(error) from error
    except Exception as error:  # of a collective, where ranks cannot agree any more
        raise _spoilt(ElasticCkptError(f"{type(error).__name__}: {error}", rank=parallel.rank())) from error
    opened = ready.checkpoint.files_opened
    work = RankWork(
        rank=parallel.rank(),
        nbytes_read=done.nbytes,
        nbytes_received=received_nbytes,
        read_calls=done.calls,
        files_opened=opened,
        seconds=dict(clock.seconds),
        blocks=plan.blocks,
        blocks_requantized=done.recoded.blocks,
        worst_requantization_error=done.recoded.worst_error,
    )
    report = LoadReport(
        source=ready.checkpoint.catalog.source,
        zero_stage=ready.destinations.zero_stage,
        dp=ready.destinations.dp,
        rank=parallel.rank(),
        outcomes=_outcomes_of_all(plan, host, arguments, ready.place),
        global_steps=engine.global_steps,
        ranks=tuple(parallel.share(work)),
        notes=plan.notes + ready.warnings,
        tp=ready.place.tp,
        pp=ready.place.pp,
    )
    engine.elastic_report = report
    if parallel.rank() == 0:
        publish(report, ready.warnings, config)
    # as DeepSpeed's own loader returns it: below load_dir as the caller wrote it
    return os.path.join(arguments.load_dir, found.tag, os.path.basename(ready.checkpoint.model_path)), client_state


def _outcomes_of_all(plan: Plan, host: HostCommit, arguments: LoadArguments, place: Place) -> tuple[Outcome, ...]:
    """What became of everything, on all pipeline stages. Collective where there are several."""
    mine = plan.outcomes + tuple(host.outcomes) + _left_alone(arguments)
    if place.pp == 1:
        return mine
    stages = dict(reversed(parallel.share((place.pp_rank, mine))))
    return united([stages[stage] for stage in sorted(stages)])


@dataclass(frozen=True)
class _Prepared:
    """All that is known before anything changes: both sides, the plan, and what to warn of."""

    adapter: EngineAdapter
    destinations: Destinations
    checkpoint: Checkpoint
    plan: Plan
    place: Place
    warnings: tuple[str, ...]


def _prepare(engine: Any, found: Found, arguments: LoadArguments, config: ElasticConfig, clock: _Clock) -> _Prepared:
    """Describe the engine, read metadata, plan, agree. Collective; changes nothing."""
    with clock("plan"), parallel.agreement("describe the live engine"):
        adapter = select_adapter(engine, with_states=restores_states(arguments))
        refuse_pending_gradients(engine)
        destinations = adapter.destinations()
        place = place_of(engine, destinations.dp, destinations.dp_rank)
    with clock("plan"):
        destinations = with_place(destinations, engine, place)
    with clock("metadata"):
        live_groups = tuple(group.names for group in destinations.groups)
        hyperparameters = tuple(group.hyperparameters for group in destinations.groups)
        options = MetadataOptions(
            trust_pickle=config.trust_pickle,
            check_shards=config.check_shards,
            live_groups=live_groups,
            live_hyperparameters=hyperparameters,
            rename=config.rename,
            states=state_options(config),
            with_states=restores_states(arguments),
            place=place,
            live_names=frozenset(destinations.layouts) | destinations.elsewhere,
        )
        checkpoint = READERS[found.format](found, options)
    with clock("plan"):
        planned: list[tuple[Plan, tuple[str, ...]]] = []

        def make_plan() -> tuple[int, str]:
            warnings = _compare_runs(engine, checkpoint, arguments, config)
            scheduler = restores_scheduler(engine, checkpoint.host, arguments)
            plan = plan_load(checkpoint.catalog, destinations, _options(arguments, config, scheduler))
            check_files(plan)
            planned.append((plan, warnings))
            return place.mp_rank, _digest_of_shares(plan)

        _refuse_different_shares(parallel.gathered("plan the load", make_plan))
        plan, warnings = planned[0]
    with clock("metadata"):
        plan = _compare_copies(plan, place, config)
    return _Prepared(adapter, destinations, checkpoint, plan, place, warnings)


def _compare_copies(plan: Plan, place: Place, config: ElasticConfig) -> Plan:
    """The plan, with notes of copies in the checkpoint that are not the same. Collective; changes nothing."""

    def compare() -> tuple[list[Difference], frozenset[str]]:
        return find_drift(plan, read_options(config)), plan.averaged

    # of a parameter only ranks of its stage know that it may differ
    everybody = parallel.gathered("compare copies of replicated parameters", compare)
    found = [difference for differences, _ in everybody for difference in differences]
    averaged = frozenset().union(*(names for _, names in everybody))
    notes: tuple[str, ...] = ()
    if found:  # on all ranks alike
        with parallel.agreement("judge copies of replicated parameters"):
            notes = judge_drift(found, averaged, config.replicated_params)
    if place.tp * place.pp > 1:  # each knows of the parameters of its own stage and shard
        said = dict.fromkeys(note for other in parallel.share(plan.notes) for note in other)
        return replace(plan, notes=(*said, *notes))
    return replace(plan, notes=plan.notes + notes)


def _compare_runs(
    engine: Any, checkpoint: Checkpoint, arguments: LoadArguments, config: ElasticConfig
) -> tuple[str, ...]:
    """Warnings of what is not part of the state and yet changes the run; weights alone make no run."""
    if arguments.load_module_only or not arguments.has_optimizer:
        return ()
    warnings = compare_batches(engine, checkpoint.host.batch, config.on_batch_size_change == "error")
    if not restores_states(arguments):
        return warnings
    warnings += checkpoint.catalog.warnings
    return warnings + warn_of_unscaled_gradients(engine, checkpoint.host, checkpoint.catalog.source.zero_stage)


def _options(arguments: LoadArguments, config: ElasticConfig, scheduler: bool) -> LoadOptions:
    return LoadOptions(
        strict=arguments.load_module_strict,
        optimizer_states=restores_states(arguments),
        scheduler=scheduler,
        keep_live_groups=config.param_groups == "keep_live",
        rename=config.rename,
        convert_optimizer=config.convert_optimizer,
        realign=config.eight_bit_realign == "requantize",
        rules=RuleBook(
            tuple(config.tp_rules),
            load_preset(config.tp_preset) if config.tp_preset else None,
            load_preset("megatron-core"),
        ),
        replicated=config.replicated_params,
    )


def _digest_of_shares(plan: Plan) -> str:
    """The same on ranks that deal out replicated tensors in the same way."""
    shared = [(slot.key, slot.name, slot.flat, slot.numel, slot.dtype) for slot in plan.slots if slot.replicated]
    return hashlib.sha256(repr((shared, plan.shares)).encode()).hexdigest()


def _refuse_different_shares(digests: Sequence[tuple[int, str]]) -> None:
    """Ranks that would deal out replicated tensors differently would wait for each other for ever.

    Args:
        digests: by rank, its tensor- and pipeline-parallel place, and the digest; other places deal out others.
    """
    first: dict[int, tuple[int, str]] = {}
    for rank, (mp_rank, other) in enumerate(digests):
        reference, expected = first.setdefault(mp_rank, (rank, other))
        if other != expected:
            raise MismatchError(
                "ranks hold different models: their buffers, frozen or unpartitioned parameters do not agree",
                expected="the same names, sizes and dtypes on every rank",
                found=f"rank {rank} differs from rank {reference}",
                remedy="build the same model on every rank",
                rank=rank,
            )


def publish(report: LoadReport, warnings: tuple[str, ...], config: ElasticConfig) -> None:
    """Print the report and write it down. A load that succeeded must not fail for want of a place to do so."""
    for warning in warnings:
        logger.warning("elastic_ckpt: %s", warning)
    if config.report:
        _print(report)
    if config.report_path is not None:
        try:
            with open(config.report_path, "w", encoding="utf-8") as stream:
                stream.write(report.as_json() + "\n")
        except OSError as error:
            logger.warning("elastic_ckpt could not write its load report to %s: %s", config.report_path, error)


def _print(report: LoadReport) -> None:
    """A load that succeeded must not fail for want of a place to print."""
    try:
        Console(file=sys.stderr).print(report.table())
    except Exception:
        logger.warning("elastic_ckpt could not print its load report", exc_info=True)


def _load_scheduler(host: HostCommit, plan: Plan) -> None:
    """The one step of a commit that runs a user's code: done first, and taken back on all ranks if any fails."""
    try:
        with parallel.agreement("load the lr scheduler"):
            host.load_scheduler(plan)
    except ElasticCkptError:
        host.undo_scheduler()
        raise


@dataclass
class _Read:
    """What was read: bytes, calls, 8-bit blocks that were cut anew, and live tensors by slot."""

    nbytes: int = 0
    calls: int = 0
    recoded: RecodeStats = field(default_factory=RecodeStats)
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)


def _read(adapter: EngineAdapter, plan: Plan, config: ElasticConfig) -> _Read:
    options = read_options(config)
    done = _Read()

    def read(part: Plan, tensors: Sequence[torch.Tensor]) -> None:
        stats = execute(part, tensors, options, show_progress=parallel.rank() == 0)
        done.nbytes += stats.nbytes
        done.calls += stats.calls
        done.recoded += stats.recoded

    with parallel.agreement("read the checkpoint's tensors"):
        done.tensors = adapter.fill(plan, read)
    return done


def _commit(adapter: EngineAdapter, plan: Plan, host: HostCommit, exact_masters: bool) -> dict[str, Any]:
    with parallel.agreement("set optimizer states and hyperparameters"):
        adapter.set_scalars_and_groups(plan)
    adapter.refresh_weights(plan, exact_masters)
    with parallel.agreement("set counters and client state"):
        return host.finish()


def _spoilt(error: ElasticCkptError) -> PartialLoadError:
    return PartialLoadError(
        f"{error.problem}: the engine is partly overwritten and must not be trained or saved",
        parameter=error.parameter,
        file=error.file,
        expected=error.expected,
        found=error.found,
        remedy="mend the cause, then load again into this engine or a new one",
        rank=error.rank,
    )


def _left_alone(arguments: LoadArguments) -> tuple[Outcome, ...]:
    if restores_states(arguments):
        return ()
    if not arguments.has_optimizer:
        return (Outcome("optimizer states", "skipped", (), "the live engine has no optimizer"),)
    asked = "load_module_only" if arguments.load_module_only else "load_optimizer_states=False"
    states = Outcome("optimizer states", "skipped", (), f"{asked}: left as they were; masters are the weights")
    others = ("param groups", "counters") if arguments.load_module_only else ("param groups",)
    return states, *(Outcome(role, "skipped", (), f"{asked}: left as they were") for role in others)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Metadata and plans are many small objects that all stay: a quarter of the time would go to finding no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Clock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

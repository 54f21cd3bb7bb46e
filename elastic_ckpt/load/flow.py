"""One elastic load: describe the engine, read metadata, plan, agree; then schedulers, tensors, commit, report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.read_plan import NO_SHARE, LoadPlan, Outcome
from elastic_ckpt.core.resume_sheet import ResumeSheet
from elastic_ckpt.core.text import one_line
from elastic_ckpt.engines import compat, training_state
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.data_position import samples_consumed
from elastic_ckpt.engines.extra_states import set_extra_states
from elastic_ckpt.errors import (
    CommunicationError,
    ElasticCkptError,
    PartialLoadError,
    SavedOverError,
    errors_of_file,
)
from elastic_ckpt.formats import Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.same_save import steps_not_counted
from elastic_ckpt.io.coalesce import ReadOptions, read_options
from elastic_ckpt.io.exchanged_reads import exchange_parts
from elastic_ckpt.io.reader import ReadSums, exchange_shares, execute
from elastic_ckpt.load.early_schedulers import EarlyStates, early_schedulers, with_other_schedulers
from elastic_ckpt.load.extra_states import read_extra_states
from elastic_ckpt.load.live_engine import adapter_of, describe
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.load.nothing_matched import refuse_nothing
from elastic_ckpt.load.publishing import publish
from elastic_ckpt.load.rank_plans import RankPlan, agree_on_plans
from elastic_ckpt.load.resume_sheet import compare_run, sheet_to_compare
from elastic_ckpt.load.scheduler_hook import check_client_schedulers, expect_schedulers
from elastic_ckpt.load.trainer_hook import splits_batches
from elastic_ckpt.load.verify_reads import RankSums, verify_reads
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.report import LoadReport, RankWork, ReadStats, Verified, united
from elastic_ckpt.storage import VIEW
from elastic_ckpt.storage.local import look_again, moved
from elastic_ckpt.storage.media import Medium

logger = logger_of(__name__)
#: One rank's work and pipeline stage, from one rank of each of several stages the outcomes there, and what it has read.
_Done = tuple[RankWork, int, tuple[Outcome, ...], RankSums | None]


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the wall-clock seconds of the body to those of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class LoadCall:
    """A call of ``load_checkpoint``: the live engine, arguments and configuration."""

    engine: Any
    arguments: training_state.LoadArguments
    config: ElasticConfig


@dataclass(frozen=True)
class Prepared:
    """Both sides, the plan, warnings, and the plans of all ranks: everything known before anything changes."""

    call: LoadCall
    found: CheckpointInfo
    seconds: dict[str, float]  # wall-clock, by phase
    adapter: EngineAdapter
    local_state: LocalState
    checkpoint: Checkpoint
    plan: LoadPlan
    host: training_state.TrainingStateCommit
    early: EarlyStates  # of schedulers that were restored before the load
    warnings: tuple[str, ...]
    medium: Medium  # where the files are, for one rank at least
    runs_code: bool  # whether any rank loads the state of a scheduler; the others wait for it
    sheet: ResumeSheet | None  # of the saved run, to compare this one with
    extra_states: Mapping[str, Any] | None  # what this rank's modules are given beside tensors; ``None``: no rank's are


def prepare(call: LoadCall, found: CheckpointInfo) -> Prepared:
    """Describe the engine, read metadata, plan, agree. Collective; changes nothing.

    Raises the same :class:`ElasticCkptError` on every rank.
    """
    engine = call.engine
    arguments = call.arguments
    config = call.config
    seconds: dict[str, float] = {}
    with_states = arguments.restores_states
    strict = arguments.load_module_strict
    with timed("plan", seconds):
        adapter, local_state = describe(lambda: adapter_of(engine, arguments.restores_states))
    at = local_state.model.coordinates
    with timed("metadata", seconds):
        skips = config.on_unreadable_entry == "skip"
        of_live = {"coordinates": at, "live_names": local_state.model.names}
        options = MetadataOptions.of(config, with_states=with_states, skip_unreadable=skips, **of_live)
        checkpoint = read_checkpoint(found, options, local_state, config.rename)
    with timed("plan", seconds):
        planned: list[tuple[LoadPlan, training_state.TrainingStateCommit, EarlyStates, tuple[str, ...]]] = []
        sheets: list[ResumeSheet | None] = [None]

        def make_plan() -> RankPlan:
            warnings = _compare_runs(call, at.data_degree, checkpoint)
            restored = early_schedulers(engine)
            host = training_state.TrainingStateCommit(engine, checkpoint.training_state, arguments, at, restored)
            warnings += tuple(checkpoint.training_state.left_out.values())
            scheduler = with_other_schedulers(host.scheduler, engine, config)
            wanted = {"optimizer_states": with_states, "strict": strict, "goes_on": not arguments.load_module_only}
            plan = plan_load(checkpoint.metadata, local_state, LoadOptions.of(config, scheduler=scheduler, **wanted))
            adapter.check(plan, checkpoint.metadata.source.zero_stage)
            check_client_schedulers(engine, plan, checkpoint.training_state.checkpoint)
            if _compares_run(call):
                sheets[:] = [sheet_to_compare(found.folder)]
            early = EarlyStates(engine, plan, engine.lr_scheduler if host.scheduler.is_restored else None)
            planned[:] = [(plan, host, early, warnings)]
            return RankPlan.of(plan, at.mp_rank, config, found.folder, host.runs_code or bool(early))

        everybody, notes, medium = agree_on_plans(make_plan, lambda: planned[0][0], config)
        plan, host, early, warnings = planned[0]
        plan = replace(plan, notes=notes, share=sum((each.share for each in everybody), NO_SHARE))
        if plan.share.is_nothing(with_states):
            refuse_nothing(checkpoint.metadata, local_state, plan.share, config.rename, with_states)
    runs_code = any(each.runs_code for each in everybody)
    extra = None
    if any(each.sets_extra_states for each in everybody):
        with timed("metadata", seconds):
            files = [each.files_of_extra_states for each in everybody]
            extra = read_extra_states(plan.extra_states, files, config.trust_pickle)
    return Prepared(
        call,
        found,
        seconds,
        adapter,
        local_state,
        checkpoint,
        plan,
        host,
        early,
        warnings,
        medium,
        runs_code,
        sheets[0],
        extra,
    )


def _compares_run(call: LoadCall) -> bool:
    """Whether this rank compares the saved run with this one, for the report."""
    return call.config.sheet and call.arguments.restores_states and distributed.rank() == 0


def _compare_runs(call: LoadCall, data_degree: int, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Warnings about differences between the runs that no state shows; none if weights alone are loaded."""
    engine = call.engine
    saved = checkpoint.training_state
    metadata = checkpoint.metadata
    if call.arguments.load_module_only or not call.arguments.has_optimizer:
        return ()
    refuse = call.config.on_change == "error"
    is_split = splits_batches()
    with errors_of_file(saved.file):
        warnings = training_state.compare_batches(engine, data_degree, saved.batch, refuse, is_split)
    warnings += training_state.warn_of_data(saved)
    if call.arguments.restores_states:
        warnings += metadata.warnings
        warnings += training_state.warn_of_unscaled_gradients(engine, saved, metadata.source.zero_stage)
    return warnings


def execute_load(ready: Prepared) -> tuple[str, dict[str, Any]]:
    """Load the schedulers, which runs a user's code and is undone if any rank fails; read, broadcast and commit.

    Collective. Returns what ``load_checkpoint`` does: path of the model-states file, and client state. Raises the
    same :class:`ElasticCkptError` on every rank; the engine is as it was unless it is a :class:`PartialLoadError`.
    """
    call = ready.call
    if ready.runs_code:
        try:
            with distributed.agree("load the schedulers"):
                look_again(reopen=False)  # the last chance to leave the engine as it was
                ready.host.load_schedulers(ready.plan)
                ready.early.load()
        except ElasticCkptError:
            ready.early.undo()
            ready.host.undo_schedulers()
            raise
    else:
        ready.host.load_schedulers(ready.plan)  # reports why not
    try:
        everybody, verified = _overwrite(ready)
    except Exception as error:  # including a collective's, after which ranks cannot agree
        ready.early.undo()  # whose scripts may load again
        cause = told_apart(error) if isinstance(error, ElasticCkptError) else error
        raise as_partial_load_error(cause) from cause
    compat.record_counts(call.engine)
    restored = [call.engine.lr_scheduler] if ready.host.scheduler.is_restored else []
    expect_schedulers(call.engine, ready.plan, restored, ready.checkpoint.training_state.lr_scheduler)
    same = ""
    other: tuple[str, ...] = ()
    if _compares_run(call):
        plan = ready.plan
        same, other = compare_run(call.engine, ready.sheet, plan.replaces_live_values, plan.member_groups)
    of_stages = [outcomes for _, _, outcomes, _ in sorted(everybody, key=itemgetter(1)) if outcomes]
    call.engine.elastic_report = report = LoadReport(
        source=ready.checkpoint.metadata.source,
        zero_stage=ready.local_state.zero_stage,
        live=ready.local_state.model.coordinates,
        rank=distributed.rank(),
        outcomes=united(of_stages) or _outcomes(ready),
        global_steps=call.engine.global_steps,
        batch=ready.checkpoint.training_state.batch,
        **_data_progress(ready),
        ranks=tuple(work for work, *_ in everybody),
        notes=ready.plan.notes + ready.warnings,
        goes_on=same,
        differs=other,
        verified=verified,
        storage=str(ready.medium),
        share=ready.plan.share,
    )
    if distributed.rank() == 0:
        publish(report, ready.warnings, call.config)
    # like DeepSpeed's own loader: below load_dir as the caller wrote it
    file = os.path.basename(ready.checkpoint.model_path)
    return os.path.join(call.arguments.load_dir, ready.found.tag, file), ready.host.client_state


def _overwrite(ready: Prepared) -> tuple[list[_Done], Verified | None]:
    """Read, broadcast and commit. Collective; returns all ranks' work, and what of the bytes was verified."""
    plan = ready.plan
    seconds = ready.seconds
    config = ready.call.config
    at = ready.local_state.model.coordinates
    source = ready.checkpoint.metadata.source
    # DeepSpeed rounds the masters of native checkpoints if states are left out, not those of universal ones
    exact_masters = ready.call.arguments.restores_states or not source.by_rank
    options = read_options(config, ready.medium)
    read, received_nbytes, sums = overwrite(ready.adapter, plan, config, options, seconds, exact_masters)
    if ready.extra_states is not None:
        with timed("commit", seconds), distributed.agree("give modules what they kept beside parameters and buffers"):
            set_extra_states(ready.adapter.extra_states, ready.extra_states)

    def finish() -> _Done:
        with timed("commit", seconds):
            ready.host.finish()
        files_opened = ready.checkpoint.files_opened
        files_read = plan.reads.files_read
        mine = (distributed.rank(), read, received_nbytes, files_opened, dict(seconds))
        requests = None if (view := VIEW.get()) is None else view.requests
        work = RankWork(*mine, plan.blocks, len(files_read), requests)
        outcomes = _outcomes(ready) if at.pp > 1 and at.tp_rank == at.partition_rank == 0 else ()
        return work, at.pp_rank, outcomes, None if sums is None else (sums.sums, sums.nbytes)

    everybody = distributed.all_gather("set the counters", finish)
    verified = None
    if sums is not None:
        with timed("verify", seconds):
            sums_of_all = [read for *_, read in everybody if read is not None]
            verified = verify_reads(ready.checkpoint.metadata, sums_of_all, plan.reads, options)
    return everybody, verified


def overwrite(
    adapter: EngineAdapter,
    plan: LoadPlan,
    config: ElasticConfig,
    options: ReadOptions,
    seconds: dict[str, float],
    exact_masters: bool,
) -> tuple[ReadStats, int, ReadSums | None]:
    """Read and broadcast tensors, and derive the weights from their masters. Collective.

    Returns what this rank read, the bytes that it received, and sums of what it read unless nothing is verified.
    """
    options = replace(options, progress=None if config.report and distributed.rank() == 0 else False)
    sums = ReadSums(plan.reads.files) if config.verify != "off" else None

    doing = "read the checkpoint's tensors and set hyperparameters"
    tensors: dict[int, torch.Tensor] = {}
    read = ReadStats()
    view = VIEW.get()
    # closed on every rank, whoever fails: an engine's memory on NVMe is swapped out again
    with timed("read", seconds), closing(adapter.fill(plan, tensors)) as parts:
        if view is not None and view.is_shared:
            read = exchange_parts(doing, view, parts, options, sums)
        with distributed.agree(doing):
            for part, memory in parts:  # none, if they were exchanged
                read += execute(part, memory, options, sums)
            look_again()
            adapter.set_scalars_and_groups(plan)
    with timed("exchange", seconds), distributed.together("broadcast what every rank needs"):
        received_nbytes = exchange_shares(plan.reads, tensors, adapter.dp_group)
    with timed("commit", seconds), distributed.together("derive the weights from their masters"):
        adapter.refresh_weights(plan, exact_masters)
    return read, received_nbytes, sums


def _outcomes(ready: Prepared) -> tuple[Outcome, ...]:
    outcomes = (*ready.plan.outcomes, *ready.host.outcomes)
    arguments = ready.call.arguments
    if arguments.restores_states:
        return outcomes
    if not arguments.has_optimizer:
        return (*outcomes, Outcome("optimizer states", "skipped", (), "the live engine has no optimizer"))
    asked = "load_module_only" if arguments.load_module_only else "load_optimizer_states=False"
    states = Outcome("optimizer states", "skipped", (), f"{asked}: left as they were; masters are the weights")
    others = ("param groups", "counters") if arguments.load_module_only else ("param groups",)
    return (*outcomes, states, *(Outcome(role, "skipped", (), f"{asked}: left as they were") for role in others))


def _data_progress(ready: Prepared) -> dict[str, int]:
    """The report's numbers about the data; none if the job begins anew, or the saved counters have not counted it."""
    consumed = samples_consumed(ready.checkpoint.training_state)
    if consumed is None or ready.call.arguments.load_module_only or not ready.call.arguments.has_optimizer:
        return {}
    if splits_batches():  # DeepSpeed counts each as many times as there are ranks
        return {}
    if steps_not_counted(ready.checkpoint.metadata, ready.checkpoint.training_state.counters):
        return {}
    micro_batch = ready.call.engine.train_micro_batch_size_per_gpu() * ready.local_state.model.coordinates.data_degree
    batches, samples = divmod(consumed, micro_batch)
    return {"samples_consumed": consumed, "batches_to_skip": batches, "samples_to_skip": samples}


def told_apart(error: ElasticCkptError) -> ElasticCkptError:
    """An error of all ranks, or the one that explains it, if files moved meanwhile on any. Collective.

    Files of two saves may contradict each other in any way, without being damaged.
    """
    if isinstance(error, (CommunicationError, SavedOverError)):
        return error
    for why in distributed.all_gather("look at the checkpoint's files again", moved):
        if why is not None:
            why.__cause__ = error
            return why
    return error


def as_partial_load_error(error: Exception) -> PartialLoadError:
    """An error that leaves the engine partly overwritten."""
    if not isinstance(error, ElasticCkptError):
        error = ElasticCkptError(f"{type(error).__name__}: {one_line(str(error))}", rank=distributed.rank())
    problem = f"{error.problem}: the engine is partly overwritten and must not be trained or saved"
    partial = PartialLoadError(problem, **error.details)
    partial.remarks = () if isinstance(error, CommunicationError) else (PartialLoadError.LOAD_AGAIN,)
    return partial

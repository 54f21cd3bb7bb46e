"""One elastic load, from plan to running engine: scheduler, tensors, commit, report."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from rich.console import Console

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import Outcome, ReadPlan
from elastic_ckpt.engines.compat import record_counts
from elastic_ckpt.engines.training_state import restores_states
from elastic_ckpt.errors import CommunicationError, ElasticCkptError, PartialLoadError, SavedOverError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.io.reader import ReadSums, exchange_shares, execute
from elastic_ckpt.io.requantize import ReadStats
from elastic_ckpt.load.prepare import Prepared
from elastic_ckpt.load.verify_reads import RankSums, verify_reads
from elastic_ckpt.report import LoadReport, RankWork, Verified, united
from elastic_ckpt.storage.local import look_again, moved

logger = logging.getLogger(__name__)


def execute_load(ready: Prepared) -> tuple[str, dict[str, Any]]:
    """Load the schedulers, undone on all ranks if any fails; read and broadcast; commit. Collective over the job.

    Returns what ``DeepSpeedEngine.load_checkpoint`` does: path of the model-states file, and client state. Raises the
    same :class:`ElasticCkptError` on every rank; the engine is as it was unless it is a :class:`PartialLoadError`.
    """
    call, at, model_path = ready.call, ready.local_state.model.coordinates, ready.checkpoint.model_path
    _load_schedulers(ready)
    try:
        everybody, verified = _overwrite(ready)
    except Exception as error:  # including a collective's, after which ranks cannot agree
        cause = told_apart(error) if isinstance(error, ElasticCkptError) else error
        raise as_partial_load_error(cause) from cause
    record_counts(call.engine)
    of_stages = [outcomes for _, _, outcomes, _ in sorted(everybody, key=itemgetter(1)) if outcomes]
    report = LoadReport(
        source=ready.checkpoint.metadata.source,
        zero_stage=ready.local_state.zero_stage,
        dp=at.dp,
        rank=distributed.rank(),
        outcomes=united(of_stages) or _outcomes(ready),
        global_steps=call.engine.global_steps,
        ranks=tuple(work for work, *_ in everybody),
        notes=ready.plan.notes + ready.warnings,
        tp=at.tp,
        pp=at.pp,
        ep=at.ep,
        sequence=at.sequence,
        verified=verified,
    )
    call.engine.elastic_report = report
    if distributed.rank() == 0:
        publish(report, ready.warnings, call.config)
    # like DeepSpeed's own loader: below load_dir as the caller wrote it
    path = os.path.join(call.arguments.load_dir, ready.found.tag, os.path.basename(model_path))
    return path, ready.host.client_state


def _load_schedulers(ready: Prepared) -> None:
    """The only step of a commit that runs a user's code: first, and undone on all ranks if any fails."""
    if not ready.runs_code:
        ready.host.load_schedulers(ready.plan)  # reports why not
        return
    try:
        with distributed.agree("load the schedulers"):
            look_again(reopen=False)  # the last chance to leave the engine as it was
            ready.host.load_schedulers(ready.plan)
    except ElasticCkptError:
        ready.host.undo_schedulers()
        raise


#: One rank's work and pipeline stage, from one rank of each of several stages the outcomes there, and what it has read.
_Done = tuple[RankWork, int, tuple[Outcome, ...], RankSums | None]


def _overwrite(ready: Prepared) -> tuple[list[_Done], Verified | None]:
    """Read, broadcast and commit. Collective; returns all ranks' work, and what of the bytes was verified."""
    adapter, plan, clock, config = ready.adapter, ready.plan, ready.clock, ready.call.config
    options, source, at = read_options(config), ready.checkpoint.metadata.source, ready.local_state.model.coordinates
    parts: list[ReadStats] = []
    sums = ReadSums(plan.reads.files) if config.verify != "off" else None

    def read(part: ReadPlan, tensors: Sequence[torch.Tensor]) -> None:
        parts.append(execute(part, tensors, options, show_progress=distributed.rank() == 0, sums=sums))

    with clock("read"), distributed.agree("read the checkpoint's tensors and set hyperparameters"):
        tensors = adapter.fill(plan, read)
        look_again()
        adapter.set_scalars_and_groups(plan)
    done = sum(parts, ReadStats())
    with clock("exchange"), distributed.together("broadcast what every rank needs"):
        received_nbytes = exchange_shares(plan.reads, tensors, adapter.dp_group)
    with clock("commit"), distributed.together("derive the weights from their masters"):
        # DeepSpeed rounds the masters of native checkpoints if states are left out, not those of universal ones
        adapter.refresh_weights(plan, exact_masters=restores_states(ready.call.arguments) or not source.by_rank)

    def finish() -> _Done:
        with clock("commit"):
            ready.host.finish()
        work = RankWork(
            rank=distributed.rank(),
            nbytes_read=done.nbytes,
            nbytes_received=received_nbytes,
            read_calls=done.calls,
            files_opened=ready.checkpoint.files_opened,
            seconds=dict(clock.seconds),
            blocks=plan.blocks,
            blocks_requantized=done.blocks,
            worst_requantization_error=done.worst_error,
            files_read=len(plan.reads.files_read),
        )
        outcomes = _outcomes(ready) if at.pp > 1 and at.tp_rank == at.dp_rank == 0 else ()
        return work, at.pp_rank, outcomes, None if sums is None else (sums.sums, sums.nbytes)

    everybody = distributed.all_gather("set the counters", finish)
    verified = None
    if sums is not None:
        with clock("verify"):
            sums_of_all = [read for *_, read in everybody if read is not None]
            verified = verify_reads(ready.checkpoint.metadata, sums_of_all, plan.reads, options)
    return everybody, verified


def _outcomes(ready: Prepared) -> tuple[Outcome, ...]:
    outcomes, arguments = (*ready.plan.outcomes, *ready.host.outcomes), ready.call.arguments
    if restores_states(arguments):
        return outcomes
    if not arguments.has_optimizer:
        return (*outcomes, Outcome("optimizer states", "skipped", (), "the live engine has no optimizer"))
    asked = "load_module_only" if arguments.load_module_only else "load_optimizer_states=False"
    states = Outcome("optimizer states", "skipped", (), f"{asked}: left as they were; masters are the weights")
    others = ("param groups", "counters") if arguments.load_module_only else ("param groups",)
    return (*outcomes, states, *(Outcome(role, "skipped", (), f"{asked}: left as they were") for role in others))


def publish(report: LoadReport, warnings: tuple[str, ...], config: ElasticConfig) -> None:
    """Print the report and write it to its file; failing to do so does not fail the load."""
    for warning in warnings:
        logger.warning("elastic_ckpt: %s", warning)
    if config.report:
        try:
            report.print_to(Console(file=sys.stderr))
        except Exception:
            logger.warning("elastic_ckpt could not print its load report", exc_info=True)
    if isinstance(config.report, str):
        try:
            with open(config.report, "w", encoding="utf-8") as stream:
                stream.write(report.as_json() + "\n")
        except Exception as error:  # a full disk, or text that is none
            logger.warning("elastic_ckpt could not write its load report to %s: %s", config.report, error)


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
        error = ElasticCkptError(f"{type(error).__name__}: {error}", rank=distributed.rank())
    problem = f"{error.problem}: the engine is partly overwritten and must not be trained or saved"
    can_go_on = not isinstance(error, CommunicationError)
    remedy = "fix the cause, then load again into this engine or a new one" if can_go_on else error.remedy
    return PartialLoadError(problem, **{**error.details, "remedy": remedy})

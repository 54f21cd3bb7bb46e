"""One elastic load, from folder to running engine: the flow of the README's picture, in order."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import Outcome, ReadPlan
from elastic_ckpt.engines import EngineAdapter
from elastic_ckpt.engines.training_state import LoadArguments, TrainingStateCommit, restores_states
from elastic_ckpt.errors import ElasticCkptError, PartialLoadError
from elastic_ckpt.formats import Found
from elastic_ckpt.io.broadcast import exchange_shares
from elastic_ckpt.io.reader import execute, read_options
from elastic_ckpt.io.requantize import RequantizeStats
from elastic_ckpt.load.prepare import Clock, Prepared
from elastic_ckpt.report import LoadReport, RankWork, united

logger = logging.getLogger(__name__)


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable cyclic garbage collection: a load makes many small objects that stay, and collection finds none to free.

    It costs about a quarter of a load's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def execute_load(
    engine: Any, found: Found, ready: Prepared, arguments: LoadArguments, config: ElasticConfig, clock: Clock
) -> tuple[str, dict[str, Any]]:
    """Restore a checkpoint into a live engine. Collective: every rank of the job calls it.

    1. scheduler; 2. read, and send around what every rank holds; 3. commit. Step 1 is taken back where any rank fails
    in it.

    Args:
        engine: the live engine.
        found: the checkpoint.
        ready: what :func:`elastic_ckpt.load.prepare.prepare` returned.
        arguments: of ``load_checkpoint``.
        config: the options.
        clock: on which the phases of this load are timed.

    Returns:
        What ``DeepSpeedEngine.load_checkpoint`` returns: path of the model-states file, and client state.

    Raises:
        ElasticCkptError: the same on every rank. The engine is as it was before the call, unless the error is a
            :class:`PartialLoadError`.
    """
    host = TrainingStateCommit(engine, ready.checkpoint.training_state, arguments, ready.place)
    _load_scheduler(host, ready)
    try:
        everybody, client_state = _overwrite(ready, host, arguments, config, clock)
    except ElasticCkptError as error:
        raise _spoilt(error) from error
    except Exception as error:  # of a collective, where ranks cannot agree any more
        raise _spoilt(ElasticCkptError(f"{type(error).__name__}: {error}", rank=distributed.rank())) from error
    report = LoadReport(
        source=ready.checkpoint.metadata.source,
        zero_stage=ready.local_state.zero_stage,
        dp=ready.local_state.dp,
        rank=distributed.rank(),
        outcomes=_of_all_stages(everybody) or _outcomes(ready.plan, host, arguments),
        global_steps=engine.global_steps,
        ranks=tuple(each.work for each in everybody),
        notes=ready.plan.notes + ready.warnings,
        tp=ready.place.tp,
        pp=ready.place.pp,
        sequence=ready.place.sequence,
    )
    engine.elastic_report = report
    if distributed.rank() == 0:
        publish(report, ready.warnings, config)
    # as DeepSpeed's own loader returns it: below load_dir as the caller wrote it
    return os.path.join(arguments.load_dir, found.tag, os.path.basename(ready.checkpoint.model_path)), client_state


@dataclass(frozen=True)
class _Done:
    """What one rank tells the others at the end.

    Attributes:
        work: what it did.
        pp_rank: its pipeline stage.
        outcomes: what became of everything there, from one rank of each stage, where there are several.
    """

    work: RankWork
    pp_rank: int
    outcomes: tuple[Outcome, ...] = ()


def _overwrite(
    ready: Prepared, host: TrainingStateCommit, arguments: LoadArguments, config: ElasticConfig, clock: Clock
) -> tuple[list[_Done], dict[str, Any]]:
    """Steps 5 and 6. Collective: returns what all ranks have done, and the client state."""
    adapter, plan = ready.adapter, ready.plan
    with clock("read"), distributed.agreement("read the checkpoint's tensors and set hyperparameters"):
        done = _read(adapter, plan, config)
        adapter.set_scalars_and_groups(plan)
    with clock("exchange"):
        received_nbytes = exchange_shares(plan, done.tensors, adapter.dp_group)
    with clock("commit"):
        adapter.refresh_weights(plan, exact_masters=restores_states(arguments))
    client_state: list[dict[str, Any]] = []

    def finish() -> _Done:
        with clock("commit"):
            client_state.append(host.finish())
        work = RankWork(
            rank=distributed.rank(),
            nbytes_read=done.nbytes,
            nbytes_received=received_nbytes,
            read_calls=done.calls,
            files_opened=ready.checkpoint.files_opened,
            seconds=dict(clock.seconds),
            blocks=plan.blocks,
            blocks_requantized=done.recoded.blocks,
            worst_requantization_error=done.recoded.worst_error,
        )
        place = ready.place
        tells = place.pp > 1 and place.tp_rank == place.dp_rank == 0
        return _Done(work, place.pp_rank, _outcomes(plan, host, arguments) if tells else ())

    everybody = distributed.gathered("set counters and client state", finish)
    return everybody, client_state[0]


def _of_all_stages(everybody: Sequence[_Done]) -> tuple[Outcome, ...]:
    """What became of everything on any pipeline stage; empty where there is one."""
    told = sorted((done for done in everybody if done.outcomes), key=lambda done: done.pp_rank)
    return united([done.outcomes for done in told])


def _outcomes(plan: ReadPlan, host: TrainingStateCommit, arguments: LoadArguments) -> tuple[Outcome, ...]:
    return plan.outcomes + tuple(host.outcomes) + _left_alone(arguments)


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


def _load_scheduler(host: TrainingStateCommit, ready: Prepared) -> None:
    """The one step of a commit that runs a user's code: done first, and taken back on all ranks if any fails."""
    if not ready.loads_scheduler:
        host.load_scheduler(ready.plan)  # says why not
        return
    try:
        with distributed.agreement("load the lr scheduler"):
            host.load_scheduler(ready.plan)
    except ElasticCkptError:
        host.undo_scheduler()
        raise


@dataclass
class _Read:
    """What was read: bytes, calls, 8-bit blocks that were cut anew, and live tensors by slot."""

    nbytes: int = 0
    calls: int = 0
    recoded: RequantizeStats = field(default_factory=RequantizeStats)
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)


def _read(adapter: EngineAdapter, plan: ReadPlan, config: ElasticConfig) -> _Read:
    options = read_options(config)
    done = _Read()

    def read(part: ReadPlan, tensors: Sequence[torch.Tensor]) -> None:
        stats = execute(part, tensors, options, show_progress=distributed.rank() == 0)
        done.nbytes += stats.nbytes
        done.calls += stats.calls
        done.recoded += stats.recoded

    done.tensors = adapter.fill(plan, read)
    return done


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

"""One elastic load, from folder to running engine: the flow of the README's picture, in order."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from elastic_ckpt import parallel
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.destinations import Destinations
from elastic_ckpt.engines import EngineAdapter, select_adapter
from elastic_ckpt.engines.host import HostCommit, LoadArguments, refuse_pending_gradients, restores_scheduler
from elastic_ckpt.errors import ElasticCkptError, PartialLoadError
from elastic_ckpt.formats import READERS, Checkpoint, Found
from elastic_ckpt.formats import ReadOptions as MetadataOptions
from elastic_ckpt.plan import Plan
from elastic_ckpt.planner import LoadOptions, plan_load
from elastic_ckpt.reader import ReadOptions, ReadStats, check_files, execute
from elastic_ckpt.report import LoadReport, count_restored

logger = logging.getLogger(__name__)


def load(engine: Any, found: Found, arguments: LoadArguments, config: ElasticConfig) -> tuple[str, dict[str, Any]]:
    """Restore a checkpoint into a live engine. Collective: every rank of the job calls it.

    1. read metadata, each file on one rank; 2. describe the engine and plan; 3. agree; 4. scheduler; 5. read;
    6. commit. Up to step 3 nothing of the engine changes, and step 4 is taken back where any rank fails in it.

    Returns:
        What ``DeepSpeedEngine.load_checkpoint`` returns: path of the model-states file, and client state.

    Raises:
        ElasticCkptError: the same on every rank. The engine is as it was before the call, unless the error is a
            :class:`PartialLoadError`.
    """
    clock = _Clock()
    with clock("metadata"):
        metadata = MetadataOptions(config.trust_pickle, config.check_shards)
        checkpoint = READERS[found.format](found, metadata)
    states = arguments.load_optimizer_states and not arguments.load_module_only
    with clock("plan"), parallel.agreement("plan the load"):
        adapter = select_adapter(engine, with_states=states)
        refuse_pending_gradients(engine)
        destinations = adapter.destinations()
        scheduler = restores_scheduler(engine, checkpoint.host, arguments)
        options = LoadOptions(strict=arguments.load_module_strict, optimizer_states=states, scheduler=scheduler)
        plan = plan_load(checkpoint.catalog, destinations, options)
        check_files(plan)
    host = HostCommit(engine, checkpoint.host, arguments)
    _load_scheduler(host)
    try:
        with clock("read"):
            stats = _read(adapter, plan, config)
        with clock("commit"):
            client_state = _commit(adapter, plan, host, exact_masters=states)
    except ElasticCkptError as error:
        raise _spoilt(error) from error
    report = _report(checkpoint, destinations, plan, stats)
    notes = plan.notes + tuple(host.notes) + _notes(arguments)
    report = replace(report, global_steps=engine.global_steps, seconds=clock.seconds, notes=notes)
    engine.elastic_report = report
    if config.report and parallel.rank() == 0:
        _print(report)
    # as DeepSpeed's own loader returns it: below load_dir as the caller wrote it
    return os.path.join(arguments.load_dir, found.tag, os.path.basename(checkpoint.model_path)), client_state


def _report(checkpoint: Checkpoint, destinations: Destinations, plan: Plan, stats: ReadStats) -> LoadReport:
    return LoadReport(
        source=checkpoint.catalog.source,
        zero_stage=destinations.zero_stage,
        dp=destinations.dp,
        rank=parallel.rank(),
        restored=count_restored(destinations, plan),
        fresh=plan.fresh,
        ignored=plan.ignored,
        nbytes_read=stats.nbytes,
        read_calls=stats.calls,
        files_opened=checkpoint.files_opened,
    )


def _print(report: LoadReport) -> None:
    """A load that succeeded must not fail for want of a place to print."""
    try:
        Console(file=sys.stderr).print(report.table())
    except Exception:
        logger.warning("elastic_ckpt could not print its load report", exc_info=True)


def _load_scheduler(host: HostCommit) -> None:
    """The one step of a commit that runs a user's code: done first, and taken back on all ranks if any fails."""
    try:
        with parallel.agreement("load the lr scheduler"):
            host.load_scheduler()
    except ElasticCkptError:
        host.undo_scheduler()
        raise


def _read(adapter: EngineAdapter, plan: Plan, config: ElasticConfig) -> ReadStats:
    options = ReadOptions(
        threads=config.read_threads,
        chunk_nbytes=config.read_chunk_mib << 20,
        staging_nbytes=config.max_extra_memory_mib << 20,
        progress=config.progress,
    )
    with parallel.agreement("read the checkpoint's tensors"):
        return execute(plan, adapter.prepare(plan), options, show_progress=parallel.rank() == 0)


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


def _notes(arguments: LoadArguments) -> tuple[str, ...]:
    if arguments.load_module_only:
        return ("load_module_only: optimizer, scheduler and counters are left as they were",)
    if not arguments.load_optimizer_states:
        return ("load_optimizer_states=False: optimizer states are left as they were; masters are the weights",)
    return ()


class _Clock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

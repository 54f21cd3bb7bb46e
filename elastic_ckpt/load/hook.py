"""The patch of ``DeepSpeedEngine.load_checkpoint``: elastic_ckpt's load where it is exact, else DeepSpeed's own."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

from elastic_ckpt import distributed, errors
from elastic_ckpt.config import flag_given, requires_elastic
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.load.agreed_config import agreed_config
from elastic_ckpt.load.data_position import check_own_states, check_position, save_checkpoint, with_position
from elastic_ckpt.load.early_schedulers import in_live_order
from elastic_ckpt.load.fallback import (
    at_saved_topology,
    check_objects,
    deepspeed_loads_it_right,
    on_own_disks,
    refuse_other_saves,
)
from elastic_ckpt.load.flow import LoadCall, Prepared, as_partial_load_error, execute_load, prepare, told_apart
from elastic_ckpt.load.framework_arguments import calling_framework, in_words_of
from elastic_ckpt.load.installation import with_flags
from elastic_ckpt.load.older import refuse_proven
from elastic_ckpt.load.own_loader import load_by_deepspeed
from elastic_ckpt.load.pretrained_hook import unwatch_pretrained, watch_pretrained
from elastic_ckpt.load.publishing import publish_refusal
from elastic_ckpt.load.retries import RetryPolicy
from elastic_ckpt.load.scheduler_hook import end_load, forget_schedulers, unwatch_schedulers, watch_schedulers
from elastic_ckpt.load.trainer_hook import unwatch_trainer, watch_trainer
from elastic_ckpt.patches import aligned_partitions, argument, config_errors, pipeline_stages, unwrap, wrap
from elastic_ckpt.storage import VIEW, is_url, seen_through
from elastic_ckpt.storage.local import look_again, pinned

logger = logger_of(__name__)


def patch_engine() -> None:
    """Patch ``DeepSpeedEngine``; see :func:`elastic_ckpt.install`. Idempotent."""
    wrap(DeepSpeedEngine, "load_checkpoint", errors.printable_errors()(_load_checkpoint))
    wrap(DeepSpeedEngine, "save_checkpoint", save_checkpoint)
    wrap(DeepSpeedEngine, "__init__", _initialize)
    wrap(deepspeed, "add_config_arguments", with_flags)
    DeepSpeedEngine.elastic_report = None
    aligned_partitions.watch_alignment()
    pipeline_stages.watch_pipe()
    config_errors.watch_config()
    watch_pretrained()
    watch_schedulers()


def unpatch_engine() -> None:
    """Undo :func:`patch_engine`, unless another wrapper is around the patch."""
    if unwrap(DeepSpeedEngine, "load_checkpoint"):
        unwrap(DeepSpeedEngine, "save_checkpoint")
        unwrap(DeepSpeedEngine, "__init__")
        unwrap(deepspeed, "add_config_arguments")
        del DeepSpeedEngine.elastic_report
        aligned_partitions.unwatch_alignment()
        pipeline_stages.unwatch_pipe()
        config_errors.unwatch_config()
        unwatch_pretrained()
        unwatch_trainer()
        unwatch_schedulers()


def _initialize(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedEngine.__init__``: with aligned partitions, if its config asks for them."""
    aligned_partitions.align_engine(argument(original, "config_class", (engine, *args), kwargs))
    original(engine, *args, **kwargs)
    watch_trainer()
    watch_schedulers(engine)


@distributed.one_at_a_time()
def _load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load, and take the data position back."""
    given = inspect.signature(original).bind(engine, *args, **kwargs)
    arguments = LoadArguments.of(given, compat.has_optimizer(engine))
    load = functools.partial(_decide_and_load, functools.partial(_call, original, given), engine, arguments)
    try:
        with in_live_order():
            result = with_position(engine, load, wanted=not arguments.load_module_only)
        end_load(engine, result)
        return result
    except errors.ElasticCkptError as error:
        framework = calling_framework()
        if framework is not None and (words := in_words_of(framework, error.remedies)):
            error.remarks = (*error.remarks, words)
        raise


def _decide_and_load(own: Callable[..., Any], engine: Any, arguments: LoadArguments) -> Any:
    """Decide, the same way on every rank, who loads; then load."""
    engine.elastic_report = None
    forget_schedulers(engine)
    distributed.begin_load()
    call = LoadCall(engine, arguments, agreed_config(engine, arguments))
    if call.config.mode == "off":
        if is_url(os.fspath(arguments.load_dir or "")):
            raise no_other_loader(errors.ConfigError('"mode" is "off", so that DeepSpeed\'s own loader is called'))
        return own()
    compat.commit_pending_save(engine)
    policy = RetryPolicy(call, prefer_universal=bool(engine.load_universal_checkpoint()) or flag_given())
    with closing(policy.nodes):
        while True:
            found = None
            try:
                found = policy.find()
                with pinned(policy.nodes.pins):
                    result = _load(call, found, policy, own)
                policy.report_loss()
                return result
            except errors.ElasticCkptError as error:
                if not policy.recover(error, found):
                    if found is not None and at_saved_topology(engine, found):
                        error.refuse_its_topology()
                    publish_refusal(error, call.config)
                    raise


def _call(original: Callable[..., Any], given: inspect.BoundArguments, tag: str | None = None) -> Any:
    """Call DeepSpeed's own loader with what it was given; ``tag``: of the checkpoint that was found."""
    if tag is not None and ((asked := given.arguments.get("tag")) is None or os.path.normpath(str(asked)) != tag):
        given.arguments["tag"] = tag
    return original(*given.args, **given.kwargs)


def _load(call: LoadCall, found: CheckpointInfo | None, policy: RetryPolicy, own: Callable[..., Any]) -> Any:
    """Load what was found; leave to DeepSpeed's own loader what only that restores. Collective."""
    engine = call.engine
    if found is None:
        if policy.is_asked or call.arguments.tag is not None:  # of a tag that is not there, DeepSpeed's asserts
            problem = "there is no DeepSpeed checkpoint to load"
            expected = "one, since tag, mode, load_universal or --universal-checkpoint asks for it"
            remedy = "check the path; to begin a run in an empty folder, leave the flag or the option out"
            raise errors.NotFoundError(problem, call.arguments.load_dir, expected, "none", remedy=remedy)
        # as DeepSpeed's own loader, in which each rank would look once more, and may see one that is there by now
        return None, None
    with collector_off(), distributed.together("load the checkpoint"):
        elastic_only = requires_elastic(call.config) or policy.partly_overwritten
        try:
            ready = _prepare_unless_left(call, found, elastic_only)
        except errors.MixedSavesError as suspicion:
            if call.config.on_damage != "error":
                refuse_proven(call, found, suspicion)
            raise
        if ready is not None:
            policy.will_overwrite(ready)
            return execute_load(ready)
    try:
        check_position(call, found)
        check_own_states(call, found)
        is_universal = found.files.is_universal
        result = load_by_deepspeed(call, is_universal, functools.partial(own, found.tag))
        with distributed.agree("look at the checkpoint's files again"):
            look_again()
    except errors.SavedOverError as error:
        raise as_partial_load_error(error) from error
    if is_universal:
        compat.separate_steps(engine)
    compat.record_counts(engine)
    return result


def no_other_loader(error: errors.ElasticCkptError, url: str = "") -> errors.ElasticCkptError:
    """An error about a checkpoint in an object store, with what remains to be done. ``url``: the tag's, once known."""
    error.remedy = "DeepSpeed's own loader reads only folders: elastic-ckpt fetch URL FOLDER --all brings all files"
    if url:
        run, tag = url.rstrip("/").split("/")[-2:]
        command = "elastic-ckpt", "fetch", url, f"{run}/{tag}", "--all"
        loads = {"load_dir": run, "tag": tag}
        text = "gives DeepSpeed's own loader all files (--config names a DeepSpeed config with storage_options)"
        error.remedy = errors.Remedy(text, command=command, arguments=loads)
    return error


def _prepare_unless_left(call: LoadCall, found: CheckpointInfo, elastic_only: bool) -> Prepared | None:
    """Prepare the load; ``None`` if DeepSpeed's own loader restores what elastic_ckpt cannot. Collective.

    Raises the same :class:`ElasticCkptError` on every rank if DeepSpeed's is not known to restore it either.
    """
    own_files = False
    why = "each node has files of its own (use_node_local_storage), those of this topology"
    if not elastic_only and on_own_disks(call.engine, found):
        here = replace(found, folder=os.path.abspath(os.path.join(call.arguments.load_dir, found.tag)))
        with seen_through(None):
            own_files = deepspeed_loads_it_right(call, here, check_steps=True, own_files=True)
            if own_files and not call.config.trust_pickle:
                check_objects(here, own_files)
        if own_files and (view := VIEW.get()) is not None:
            below = (path for path, _ in view.walk(found.folder) if os.path.dirname(path) != found.folder)
            paths = sorted({*map(found.path, found.files.names), *below})  # not what users put beside them
            mine = paths[distributed.rank() :: distributed.world_size()]
            compare = functools.partial(view.compare_copies, mine)
            distributed.all_gather("compare the copies of the checkpoint's files", compare)
            refuse_other_saves(call, found)
    if not own_files:
        try:
            if others := call.arguments.others:
                raise errors.UnsupportedError(f"{', '.join(others)}: handled by DeepSpeed's own loader only")
            return prepare(call, found)
        except errors.ElasticCkptError as first:
            error = told_apart(first)
            understood = isinstance(error, errors.UnsupportedError)
            may_leave = understood or isinstance(error, (errors.UnknownLayoutError, errors.UnforeseenError))
            may_leave = may_leave and VIEW.get() is None  # DeepSpeed's own looks at this node alone
            if understood and is_url(found.folder):
                raise no_other_loader(error, found.folder) from error.__cause__
            if elastic_only or not may_leave or not deepspeed_loads_it_right(call, found, check_steps=not understood):
                raise error from error.__cause__
            why = error.problem
        if not call.config.trust_pickle:
            check_objects(found, own_files)
    if distributed.rank() == 0:
        logger.warning("elastic_ckpt leaves this load to DeepSpeed's own loader: %s", "; ".join((why, *found.notes)))
    return None

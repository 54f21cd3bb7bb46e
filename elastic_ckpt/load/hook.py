"""The patch of ``DeepSpeedEngine.load_checkpoint``: elastic_ckpt's load where it is exact, else DeepSpeed's own."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig, flag_given, read_config, requires_elastic
from elastic_ckpt.engines.compat import (
    commit_pending_save,
    ds_config,
    has_optimizer,
    record_counts,
    separate_steps,
    universal_flag,
)
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.errors import (
    ConfigError,
    ElasticCkptError,
    LayoutError,
    NotFoundError,
    SavedOverError,
    UnforeseenError,
    UnsupportedError,
)
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.load.fallback import deepspeed_loads_it_right, on_own_disks, screen_folder, screened_loads
from elastic_ckpt.load.flow import LoadCall, Prepared, as_partial_load_error, execute_load, prepare, told_apart
from elastic_ckpt.load.on_damage import RetryPolicy
from elastic_ckpt.patches import argument, unwrap, wrap
from elastic_ckpt.patches.aligned_partitions import align_engine, unwatch_alignment, watch_alignment
from elastic_ckpt.patches.pipeline_stages import unwatch_pipe, watch_pipe
from elastic_ckpt.storage.local import look_again, pinned

logger = logging.getLogger(__name__)


def patch_engine() -> None:
    """Patch ``DeepSpeedEngine``; see :func:`elastic_ckpt.install`. Idempotent."""
    wrap(DeepSpeedEngine, "load_checkpoint", _load_checkpoint)
    wrap(DeepSpeedEngine, "__init__", _initialize)
    DeepSpeedEngine.elastic_report = None
    watch_alignment()
    watch_pipe()


def unpatch_engine() -> None:
    """Undo :func:`patch_engine`, unless another wrapper is around the patch."""
    if unwrap(DeepSpeedEngine, "load_checkpoint"):
        unwrap(DeepSpeedEngine, "__init__")
        del DeepSpeedEngine.elastic_report
        unwatch_alignment()
        unwatch_pipe()


def _initialize(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedEngine.__init__``: with aligned partitions, if its config asks for them."""
    align_engine(argument(original, "config_class", (engine, *args), kwargs))
    original(engine, *args, **kwargs)


def _load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Decide, the same way on every rank, who loads; then load."""
    given = inspect.signature(original).bind(engine, *args, **kwargs)
    arguments = LoadArguments.of(given, has_optimizer(engine))
    engine.elastic_report = None
    distributed.begin_load()
    call = LoadCall(engine, arguments, _read_config(engine, arguments))
    if call.config.mode == "off":
        return _call(original, given)
    commit_pending_save(engine)
    policy = RetryPolicy(call, prefer_universal=bool(engine.load_universal_checkpoint()) or flag_given())
    while True:
        found = None
        try:
            found = policy.find()
            with pinned():
                return _load(call, found, policy, functools.partial(_call, original, given))
        except ElasticCkptError as error:
            if not policy.recover(error, found):
                raise


def _call(original: Callable[..., Any], given: inspect.BoundArguments, tag: str | None = None) -> Any:
    """Call DeepSpeed's own loader with what it was given; ``tag``: of the checkpoint that was found."""
    asked = given.arguments.get("tag")
    if tag is not None and (asked is None or os.path.normpath(str(asked)) != tag):
        given.arguments["tag"] = tag
    return original(*given.args, **given.kwargs)


def _load(call: LoadCall, found: CheckpointInfo | None, policy: RetryPolicy, own: Callable[..., Any]) -> Any:
    """Load what was found; leave to DeepSpeed's own loader what only that restores. Collective."""
    engine = call.engine
    if found is None:
        if call.config.mode == "require":
            problem, expected = "there is no DeepSpeed checkpoint to load", "a checkpoint, since the mode is 'require'"
            raise NotFoundError(problem, call.arguments.load_dir, expected, "none")
        with screened_loads(call):
            return own()
    with collector_off(), distributed.together("load the checkpoint"):
        elastic_only = requires_elastic(call.config) or policy.partly_overwritten
        ready = _prepare_unless_left(call, found, elastic_only)
        if ready is not None:
            policy.will_overwrite(ready)
            return execute_load(ready)
    try:
        with universal_flag(engine, found.files.is_universal), screened_loads(call):
            result = own(found.tag)
        with distributed.agree("look at the checkpoint's files again"):
            look_again()
    except SavedOverError as error:
        raise as_partial_load_error(error) from error
    if found.files.is_universal:
        separate_steps(engine)
    record_counts(engine)
    return result


def _read_config(engine: Any, arguments: LoadArguments) -> ElasticConfig:
    """The configuration; :class:`ConfigError` on every rank if it is wrong, or ranks disagree about it. Collective."""
    configs: list[ElasticConfig] = []
    mine: dict[str, Any] = {}

    def digest() -> bytes:
        configs.append(read_config(ds_config(engine)))
        mine.update(_meaning(arguments, configs[0]), use_node_local_storage=bool(engine.use_node_local_storage()))
        return hashlib.sha256(repr(mine).encode()).digest()

    def call() -> tuple[dict[str, Any], str, Any]:
        """With what two paths of one folder have in common."""
        try:
            path, status = os.path.realpath(arguments.load_dir), os.stat(arguments.load_dir)
            return mine, path, (status.st_dev, status.st_ino, status.st_mtime_ns)
        except (OSError, TypeError, ValueError):  # of no folder, or of what is none
            return mine, str(arguments.load_dir), None

    if len(set(distributed.all_gather("read the configuration", digest))) == 1:
        return configs[0]
    (first, path, inode), *others = distributed.all_gather("read the configuration", call)
    for rank, (other, other_path, other_inode) in enumerate(others, 1):
        differ = {key for key, value in first.items() if other[key] != value}
        if first["use_node_local_storage"] or path == other_path or (inode is not None and inode == other_inode):
            differ.discard("load_dir")
        if keys := sorted(differ):
            problem = f"ranks call load_checkpoint with different arguments or options: {', '.join(keys)}"
            here, there = ({key: values[key] for key in keys} for values in (first, other))
            expected, found = f"{here}, as on rank 0", f"{there} on rank {rank}"
            remedy = "give every rank the same arguments and the same DeepSpeed config"
            raise ConfigError(problem, None, expected, found, remedy=remedy, rank=rank)
    return configs[0]


def _meaning(arguments: LoadArguments, config: ElasticConfig) -> dict[str, Any]:
    """Arguments and options in a form that is equal where they mean the same."""
    load_dir, tag = arguments.load_dir, arguments.tag
    if isinstance(load_dir, (str, os.PathLike)):
        load_dir = os.path.normpath(load_dir)
    elif config.mode != "off":
        problem, expected = "load_checkpoint was given no folder", "load_dir as a str or a Path"
        remedy = "give the folder that save_checkpoint was given; without one, do not call load_checkpoint"
        raise ConfigError(problem, None, expected, repr(load_dir)[:200], remedy=remedy)
    return {
        **{key: bool(value) for key, value in vars(arguments).items()},
        "others": arguments.others,
        "load_dir": load_dir,
        "tag": None if tag is None else os.path.normpath(str(tag)),
        **config.model_dump(exclude={"report"}),
    }


def _prepare_unless_left(call: LoadCall, found: CheckpointInfo, elastic_only: bool) -> Prepared | None:
    """Prepare the load; ``None`` if DeepSpeed's own loader restores what elastic_ckpt cannot. Collective.

    Raises the same :class:`ElasticCkptError` on every rank if DeepSpeed's is not known to restore it either.
    """
    own_files = not elastic_only and on_own_disks(call.engine, found)
    own_files = own_files and deepspeed_loads_it_right(call, found, check_steps=True, own_files=True)
    why = "each node has files of its own (use_node_local_storage), those of this topology"
    if not own_files:
        try:
            if others := call.arguments.others:
                raise UnsupportedError(f"{', '.join(others)}: handled by DeepSpeed's own loader only")
            return prepare(call, found)
        except ElasticCkptError as first:
            error = told_apart(first)
            may_leave = isinstance(error, (UnsupportedError, LayoutError, UnforeseenError)) and not elastic_only
            understood = isinstance(error, UnsupportedError)
            if not may_leave or not deepspeed_loads_it_right(call, found, check_steps=not understood):
                raise error from error.__cause__
            why = error.problem
    if not call.config.trust_pickle:
        screen_folder(found, own_files)
    if distributed.rank() == 0:
        logger.warning("elastic_ckpt leaves this load to DeepSpeed's own loader: %s", why)
    return None

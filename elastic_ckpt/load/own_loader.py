"""Runs DeepSpeed's own loader, with the objects that this package's reader has made of each file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.text import one_line
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.data_efficiency import clusters_anew
from elastic_ckpt.errors import CommunicationError, ElasticCkptError, UnforeseenError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.load.flow import LoadCall, as_partial_load_error
from elastic_ckpt.storage import seen_through


def load_by_deepspeed(call: LoadCall, is_universal: bool, own: Callable[[], Any]) -> Any:
    """What DeepSpeed's own loader returns; what it raises is the cause of a :class:`PartialLoadError`."""
    in_its_mode = compat.universal_flag(call.engine, is_universal)
    clusters = clusters_anew(call.engine)
    on_all_ranks = distributed.together("load the checkpoint", agrees=False)
    try:
        with seen_through(None), in_its_mode, _objects_for_deepspeed(call), clusters, on_all_ranks:
            return _run_own_loader(own, call.arguments.load_dir)
    except (CommunicationError, UnforeseenError) as error:
        raise as_partial_load_error(error) from _foreign_cause(error)


def _objects_for_deepspeed(call: LoadCall) -> AbstractContextManager[None]:
    """Gives DeepSpeed's loader the objects of each file that it opens, unless the config trusts pickles."""
    if call.config.trust_pickle:
        return nullcontext()
    return compat.replaced_loads(call.engine, os.fspath(call.arguments.load_dir), read_objects)


def _run_own_loader(own: Callable[[], Any], load_dir: str) -> Any:
    """What it returns; :class:`UnforeseenError` for what it raises itself."""
    try:
        return own()
    except ElasticCkptError:
        raise
    except Exception as error:
        problem = f"DeepSpeed's own loader failed: {type(error).__name__}: {one_line(str(error))}"
        raise UnforeseenError(problem, load_dir) from error


def _foreign_cause(error: BaseException) -> BaseException | None:
    """What another package raised: an error of ours may be one rank's alone, and another way for it to go on."""
    cause = error.__cause__
    while isinstance(cause, ElasticCkptError):
        cause = cause.__cause__
    return cause

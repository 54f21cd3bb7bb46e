"""Loads that are left to DeepSpeed's own loader: ``fallback_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.load import flow as preparation
from elastic_ckpt.load import hook
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import resume
from tests.distributed.model import TinyLM, build_engine, close


def resume_with_a_bug(case: dict[str, Any]) -> list[Loaded]:
    """:func:`resume`, while elastic_ckpt's own planning raises what nobody foresaw, on the last rank alone."""
    broken = mock.Mock(side_effect=KeyError("what nobody foresaw"))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(preparation, "plan_load", broken if is_last else preparation.plan_load):
        return resume(case)


def exchanged(case: dict[str, Any]) -> list[Refused]:
    """Load weights, while the file ``to`` becomes the one ``from`` between the check and the hand-over."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], TinyLM(seed=8))
    check_objects = hook.check_objects

    def check_and_exchange(*arguments: Any) -> None:
        check_objects(*arguments)
        if dist.get_rank() == 0:
            source, target = (os.path.join(case["folder"], case[key]) for key in ("from", "to"))
            shutil.copy(source, f"{target}.new")
            os.replace(f"{target}.new", target)
        dist.barrier()

    with mock.patch.object(hook, "check_objects", check_and_exchange):
        refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"], load_module_only=True))
    close(engine)
    return [refused]

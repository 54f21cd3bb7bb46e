"""Loads that are left to DeepSpeed's own loader: ``fallback_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import os
import shutil
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import PartialLoadError, UnsafePickleError
from elastic_ckpt.load import flow as preparation
from elastic_ckpt.load import hook
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, log_lines, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, where
from tests.distributed.model import TinyLM, build_engine, close, train


def left(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load each folder and compare with the ``truth`` of another one.

    ``fails``: elastic_ckpt's own planning raises, on the last rank alone.
    """
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = truth_of(case["truth"])
        engine = build_engine(case["setup"], TinyLM(seed=8))
        with log_lines() as lines, planning_that_fails(case["fails"]):
            _, client_state = engine.load_checkpoint(case["folder"])
        differences = oracle.differences(engine, truth)
        gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap, client_state, lines))
        close(engine)
    return facts


def planning_that_fails(fails: bool) -> Any:
    """As an exception that nobody foresaw, on one rank."""
    last = dist.get_rank() == dist.get_world_size() - 1
    broken = mock.Mock(side_effect=KeyError("what nobody foresaw")) if fails and last else preparation.plan_load
    return mock.patch.object(preparation, "plan_load", broken)


def exchanged(case: dict[str, Any]) -> None:
    """Load a folder of which a file becomes another one between the check and the hand-over: refused."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], TinyLM(seed=8))
    check_objects = hook.check_objects

    def check_and_exchange(*arguments: Any) -> None:
        check_objects(*arguments)
        if dist.get_rank() == 0:
            shutil.copy(case["from"], case["to"] + ".new")
            os.replace(case["to"] + ".new", case["to"])
        dist.barrier()

    # a rank that has seen the file before says that it moved
    refused = pytest.raises((UnsafePickleError, PartialLoadError))
    with mock.patch.object(hook, "check_objects", check_and_exchange), refused:
        engine.load_checkpoint(case["folder"], load_module_only=True)
    close(engine)

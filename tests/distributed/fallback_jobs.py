"""Loads that are left to DeepSpeed's own loader, or must not be: ``fallback_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.load import prepare as preparation
from tests.distributed import refusal_jobs
from tests.distributed import truth as oracle
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT
from tests.distributed.model import TinyLM, build_engine, close, setup_from_json, train
from tests.distributed.unchanged_jobs import log_lines

OWN_LOADER = "elastic_ckpt leaves this load to DeepSpeed's own loader: "


def left(arguments: dict[str, Any]) -> None:
    """Each folder is restored exactly by DeepSpeed's own loader, with one line on one rank that says why.

    ``fails``: elastic_ckpt's own planning raises, on the last rank alone.
    """
    elastic_ckpt.install()
    for case in arguments["cases"]:
        where, setup = case["name"], setup_from_json(case["setup"])
        truth = torch.load(os.path.join(case["truth"], "truth.pt"), weights_only=False)
        engine = build_engine(setup, TinyLM(seed=8))
        with log_lines() as lines, planning_that_fails(case.get("fails", False)):
            path, client_state = engine.load_checkpoint(case["folder"])
        assert engine.elastic_report is None, f"{where}: DeepSpeed's own loader did not run"
        assert os.path.isfile(path) and client_state["note"] == "hello", where
        said = [line for line in lines if line.startswith(OWN_LOADER)]
        assert len(said) == (dist.get_rank() == 0), (where, lines)
        assert all(case["says"] in line for line in said), (where, said)
        oracle.assert_equal(engine, truth, where)
        assert train(engine, SAVE_AT, CONTINUE_TO) == truth["losses"], where
        close(engine)


def planning_that_fails(fails: bool) -> Any:
    """As an exception that nobody foresaw, on one rank."""
    last = dist.get_rank() == dist.get_world_size() - 1
    broken = mock.Mock(side_effect=KeyError("what nobody foresaw")) if fails and last else preparation.plan_load
    return mock.patch.object(preparation, "plan_load", broken)


def refused(arguments: dict[str, Any]) -> None:
    """Each folder is refused with the same error on every rank, the engine untouched, and nothing left to DeepSpeed."""
    elastic_ckpt.install()
    with log_lines() as lines:
        refusal_jobs.refuse(arguments)
    assert not [line for line in lines if line.startswith(OWN_LOADER)], lines

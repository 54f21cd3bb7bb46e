"""Engines that keep masters in low precision: ``low_precision_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

from typing import Any

import torch

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, where
from tests.distributed.model import TinyLM, build_engine, close, train


def load(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load each case's checkpoint, and compare with the truth, rounded to the case's dtypes of ``masters`` and ``states``."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = truth_of(case["folder"])
        engine = build_engine(case["setup"], TinyLM(seed=8))
        engine.load_checkpoint(case["folder"])
        keys = sorted({key for _, key in truth["states"]})
        oracle.relink(engine)
        now = oracle.gather(engine, keys)
        for kind in ("masters", "states"):  # DeepSpeed's getters of ZeRO-1 and 2 gather into float32
            dtype = getattr(torch, case[kind])
            truth[kind] = {key: value.to(dtype).to(now[kind][key].dtype) for key, value in truth[kind].items()}
        truth["weights"] = truth["weights"] | now["masters"]
        now["dtypes"] = {str(flat.dtype) for flat in oracle.flats(engine.optimizer)}
        now["state dtypes"] = {str(state[key].dtype) for state in oracle.base_of(engine).state.values() for key in keys}
        truth |= {"dtypes": {f"torch.{case['masters']}"}, "state dtypes": {f"torch.{case['states']}"}}
        compared = (
            "masters",
            "states",
            "weights",
            "steps",
            "groups",
            "counters",
            "scheduler",
            "dtypes",
            "state dtypes",
        )
        differences = oracle.compare(now, {kind: truth[kind] for kind in compared})
        gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap))
        close(engine)
    return facts

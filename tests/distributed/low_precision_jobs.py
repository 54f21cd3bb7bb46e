"""Engines that keep masters in low precision: ``low_precision_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import elastic_ckpt
from elastic_ckpt.errors import MismatchError
from tests.distributed import truth as oracle
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import TinyLM, build_engine, close, setup_from_json, train


def load(arguments: dict[str, Any]) -> None:
    """Load each case's checkpoint and compare masters and states with the truth in the live engine's own dtypes."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        setup = setup_from_json(case["setup"])
        where = f"{case['folder']} -> {setup.name}"
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        engine = build_engine(setup, TinyLM(seed=8))
        engine.load_checkpoint(case["folder"])
        assert engine.elastic_report is not None, f"{where}: DeepSpeed's own path ran"
        notes = [note for note in engine.elastic_report.notes if "rounded" in note]
        assert bool(notes) == case["rounded"], (where, notes)
        keys = sorted({key for _, key in truth["states"]})
        oracle.relink(engine)
        now = oracle.gather(engine, keys)
        for kind, dtype in (("masters", case["masters"]), ("states", case["states"])):
            assert now[kind].keys() == truth[kind].keys(), where
            for key, saved in truth[kind].items():
                found = now[kind][key]  # DeepSpeed's getters of ZeRO-1 and 2 gather into float32
                assert torch.equal(found, saved.to(getattr(torch, dtype)).to(found.dtype)), f"{where}: {kind} {key}"
        for name, weight in now["weights"].items():
            source = now["masters"].get(name, truth["weights"][name])
            assert torch.equal(weight, source.to(weight.dtype)), f"{where}: weight {name}"
        for kind in ("steps", "groups", "counters", "scheduler"):
            assert now[kind] == truth[kind], f"{where}: {kind}"
        masters = [param for group in oracle.base_of(engine).param_groups for param in group["params"]]
        assert {str(master.dtype) for master in masters} <= {f"torch.{case['masters']}"}, where
        live = [state[key] for state in oracle.base_of(engine).state.values() for key in keys]
        assert {str(state.dtype) for state in live} == {f"torch.{case['states']}"}, where
        losses = train(engine, SAVE_AT, SAVE_AT + 3)
        differences = [abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)]
        assert max(differences) <= 2e-2, (where, losses, truth["losses"])  # bf16: 8 bits of mantissa at a loss of 3.6
        close(engine)


def refuse(arguments: dict[str, Any]) -> None:
    """What would lose precision is refused where the user says so, with the engine untouched."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]), TinyLM(seed=8))
    train(engine, 60, 61)
    before = oracle.fingerprint(engine)
    with pytest.raises(MismatchError, match="lose precision") as caught:
        engine.load_checkpoint(arguments["folder"])
    assert arguments["remedy"] in str(caught.value.remedy)
    assert oracle.fingerprint(engine) == before
    oracle.agree((caught.value.parameter, caught.value.expected, caught.value.found))
    close(engine)

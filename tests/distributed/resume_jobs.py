"""Runs that are resumed with one fault each: ``resume_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

import elastic_ckpt
from elastic_ckpt.core.resume_sheet import SHEET
from elastic_ckpt.data import ElasticSampler
from elastic_ckpt.load import resume_sheet
from tests.distributed.facts import log_lines, on_all_ranks
from tests.distributed.jobs import SPOILS, note
from tests.distributed.model import GLOBAL_BATCH, Setup, batch, build_engine, close

SAVED_AT, LAST = 2, 4
LARGER = (("train_batch_size", 2 * GLOBAL_BATCH), ("train_micro_batch_size_per_gpu", GLOBAL_BATCH))


def build(setup: Setup) -> Any:
    """An engine with a sampler, which counts what it trains on."""
    engine = build_engine(setup)
    engine.sampler = ElasticSampler(10_000, seed=3)
    elastic_ckpt.register(engine, sampler=engine.sampler)
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    """Training that depends on torch's generator, which is the same on all ranks; the losses."""
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_world_size(), dist.get_rank())) * (0.5 + torch.rand(()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def save(engine: Any, folder: str, tag: str, losses: list[float]) -> None:
    client = {"losses": losses, "generator": torch.get_rng_state()}
    assert engine.save_checkpoint(folder, tag=tag, client_state=client)


def other_weights(engine: Any) -> None:
    param = engine.module.hidden.weight
    safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) + 0.5)
    engine.optimizer.update_lp_params()


def other_moments(engine: Any) -> None:
    param = engine.module.hidden.weight
    safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, "exp_avg") + 0.5, "exp_avg")


def other_hyperparameter(key: str) -> Callable[[Any], None]:
    def change(engine: Any) -> None:
        engine.optimizer.param_groups[0][key] += 0.1

    return change


def other_version(engine: Any) -> None:
    numpy.__version__ += "+other"
    resume_sheet._versions.cache_clear()


def other_numbers(engine: Any) -> None:
    torch.manual_seed(99)


def other_samples(engine: Any) -> None:
    engine.sampler.load_state_dict({"samples_consumed": 0})


FAULTS: dict[str, tuple[Setup, Callable[[Any], Any]]] = {
    "none": (Setup(1), lambda engine: None),
    "weights": (Setup(1), other_weights),
    "optimizer": (Setup(1), other_moments),
    "lr": (Setup(1), other_hyperparameter("lr")),
    "hyperparameters": (Setup(1), other_hyperparameter("weight_decay")),
    "batch": (Setup(1, config=LARGER), lambda engine: None),
    "precision": (Setup(1, precision="bf16"), lambda engine: None),
    "data order": (Setup(1), other_samples),
    "RNG": (Setup(1), other_numbers),
    "code versions": (Setup(1), other_version),
}


def uninterrupted(case: dict[str, Any]) -> None:
    """Train, and save two steps."""
    elastic_ckpt.install()
    torch.manual_seed(5)
    engine = build(Setup(1))
    losses = train(engine, 0, SAVED_AT)
    save(engine, case["folder"], "first", losses)
    save(engine, case["folder"], "second", losses + train(engine, SAVED_AT, LAST))
    close(engine)


def resumed(case: dict[str, Any]) -> None:
    """Resume the run in ``source`` with a fault, the ``setup``; save at once and later; note what the load's report said."""
    elastic_ckpt.install()
    fault, folder = case["setup"], case["folder"]
    setup, change = FAULTS[fault]
    engine, version = build(setup), numpy.__version__
    if fault == "code versions":
        change(engine)
    _, client = engine.load_checkpoint(case["source"], tag="first")
    report = engine.elastic_report
    torch.set_rng_state(client["generator"])
    change(engine)
    save(engine, folder, "first", client["losses"])
    save(engine, folder, "second", client["losses"] + train(engine, SAVED_AT, LAST))
    of_others = on_all_ranks((report.goes_on, report.differs))[1:]
    found = SimpleNamespace(goes_on=report.goes_on, differs=report.differs, text=str(report), of_others=of_others)
    close(engine)
    numpy.__version__ = version
    resume_sheet._versions.cache_clear()
    if SPOILS:
        found.goes_on = "of another run"
    note(folder, found)


def without(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Sheets that are not wanted, cannot be written, cannot be read, or are of another save: no save or load fails."""
    elastic_ckpt.install()
    found, folder = SimpleNamespace(said={}), case["folder"]
    off = build_engine(Setup(1, config=(("elastic_checkpoint", {"sheet": False}),)))
    train(off, 0, 1)
    save(off, folder, "off", [])
    found.off = os.path.exists(os.path.join(folder, "off", SHEET))
    close(off)
    engine, path = build_engine(Setup(3)), Path(folder, "in", SHEET)
    path.mkdir(parents=True, exist_ok=True)
    train(engine, 0, 1)
    with log_lines() as lines:
        save(engine, folder, "in", [])
    found.unwritten = "of another run" if SPOILS else "".join(lines)
    if dist.get_rank() == 0:
        path.rmdir()
    dist.barrier()
    save(engine, folder, "in", [])
    dist.barrier()
    text = path.read_text()
    for kind, content in {"broken": "{", "stale": text.replace('"step": 1', '"step": 7'), "whole": text}.items():
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_text(content)
        dist.barrier()
        with log_lines() as lines:
            engine.load_checkpoint(folder, tag="in")
        assert engine.global_steps == 1 and engine.elastic_report is not None
        found.said[kind] = (engine.elastic_report.goes_on, engine.elastic_report.differs, "".join(lines))
    engine.load_checkpoint(folder, tag="in", load_optimizer_states=False)
    found.said["weights alone"] = (engine.elastic_report.goes_on, engine.elastic_report.differs, "")
    found.left = sorted(name for name in os.listdir(os.path.join(folder, "in")) if SHEET in name)
    close(engine)
    return [found]

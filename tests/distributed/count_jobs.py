"""Jobs whose optimizer counts other steps than the engine: parameters that train later, and steps beside the engine."""

from __future__ import annotations

import glob
import os
import shutil
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import truth as oracle
from tests.distributed.facts import log_lines
from tests.distributed.jobs import SPOILS, note, take_over
from tests.distributed.model import TinyLM, batch, build_engine, close, train

#: Steps of each phase.
STEPS = 2


def phase(case: dict[str, Any]) -> None:
    """Resume what the phase before has saved, if there is one, train on, save, and note what was found.

    ``setup``; ``trains``: the parameters that train, by the beginnings of their names, one param group for each;
    ``after``: steps of the phases before; ``beside``: whether the optimizer is stepped beside the engine, as Lightning
    Fabric does.
    """
    take_over(case)
    elastic_ckpt.install()
    engine, folder, done = build(case), case["folder"], case["after"]
    found = SimpleNamespace(error=None, differences=[], lines=[])
    if done:
        with log_lines() as found.lines:
            try:
                engine.load_checkpoint(folder)
            except ElasticCkptError as error:
                found.error = str(error)
        truth = torch.load(os.path.join(folder, "truth.pt"))
        found.differences = different(truth, held(engine))
    elastic_ckpt.register(engine, sampler=ElasticSampler(range(1000)))
    for step in range(done, done + STEPS):
        train_beside(engine, step) if case["beside"] else train(engine, step, step + 1)
    with log_lines() as found.lines_of_save:
        engine.save_checkpoint(folder, tag=f"after{done + STEPS}")
    found.steps, truth = engine.global_steps, held(engine)
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(folder, "truth.pt"))
    close(engine)
    note(folder, found)


def build(case: dict[str, Any]) -> Any:
    """An engine of a model some of whose parameters train."""
    model = TinyLM(seed=case["after"])
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(tuple(case["trains"])))
    return build_engine(case["setup"], model)


def held(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Masters of what trains, and states of what has stepped. Collective."""
    found = {}
    if oracle.base_of(engine).state:
        oracle.relink(engine)
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name, "master"] = oracle.safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq") if oracle.base_of(engine).state else ():
                with suppress(KeyError):  # of a group that has not stepped, on all ranks of ZeRO-3
                    found[name, key] = oracle.safe_get_full_optimizer_state(param, key).clone()
    return found


def different(truth: dict[tuple[str, str], torch.Tensor], now: dict[tuple[str, str], torch.Tensor]) -> list[Any]:
    return [key for key, value in truth.items() if key not in now or not torch.equal(value + SPOILS, now[key])]


def train_beside(engine: Any, step: int) -> None:
    loss = engine(batch(step, dist.get_world_size(), dist.get_rank()))
    engine.backward(loss)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def left_standing(case: dict[str, Any]) -> list[SimpleNamespace]:
    """A run of engine steps that another loop goes on with, saved without elastic_ckpt, and loaded with it.

    ``setup``; ``has_schedule``: whether the engine steps one; ``mixed``: one rank's optimizer states are older ones;
    ``beside``: how many steps the other loop takes.
    """
    folder = case["folder"]
    engine = build_engine(case["setup"])
    if not case["has_schedule"]:
        engine.lr_scheduler = None
    train(engine, 0, STEPS)
    engine.save_checkpoint(folder, tag="before")
    for step in range(STEPS, STEPS + case["beside"]):
        train_beside(engine, step)
    engine.save_checkpoint(folder, tag="after")
    truth = held(engine)
    if SPOILS:
        truth["embedding.weight", "master"].view(-1)[-1:] += 1
    close(engine)
    if case["mixed"] and dist.get_rank() == 0:
        for path in glob.glob(os.path.join(folder, "before", "*zero_pp_rank_1_*optim_states.pt")):
            shutil.copy(path, os.path.join(folder, "after"))
    dist.barrier()
    elastic_ckpt.install()
    engine = build_engine(case["setup"])
    if not case["has_schedule"]:
        engine.lr_scheduler = None
    found = SimpleNamespace(case=case, kind="", differences=[], report=None)
    with log_lines() as found.lines:
        try:
            engine.load_checkpoint(folder)
            found.differences, found.report = different(truth, held(engine)), engine.elastic_report
        except ElasticCkptError as error:
            found.kind = type(error).__name__
    close(engine)
    elastic_ckpt.uninstall()
    return [found]

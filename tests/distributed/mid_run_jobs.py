"""Runs that go on with other options, and from folders without ``latest``: jobs of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from torch.optim import lr_scheduler

import elastic_ckpt
from elastic_ckpt.config import flags
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import truth as oracle
from tests.distributed.facts import log_lines
from tests.distributed.model import GLOBAL_BATCH, TinyLM, close, train

STEPS = 3
LIVE = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}
SCHEDULES = {
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, warmup_max_lr=LIVE["lr"], warmup_num_steps=8),
    "OneCycle": lambda optimizer: OneCycle(optimizer, 1e-3, 2e-2, cycle_first_step_size=5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 8)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=1e-4),
    "none": lambda optimizer: None,
}
#: Built otherwise than the schedule that was saved under the name before the dash.
OTHERS = {"CosineAnnealingLR-longer": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-4)}


def build(schedule: str, section: dict[str, Any] | None = None, stage: int = 1, **values: Any) -> Any:
    """An engine whose optimizer has some values of its own."""
    model = TinyLM()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **LIVE | values)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "elastic_checkpoint": section or {},
    }
    scheduler = (SCHEDULES | OTHERS)[schedule](optimizer)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def values_of(engine: Any) -> dict[str, Any]:
    """What the next step is taken with."""
    group = engine.optimizer.param_groups[0]
    return {
        key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in group.items() if key in LIVE
    }


def save(folder: str) -> list[dict[str, Any]]:
    """A run for each schedule; the values of the next step."""
    elastic_ckpt.install()
    found = {}
    for schedule in SCHEDULES:
        engine = build(schedule)
        train(engine, 0, STEPS)
        engine.save_checkpoint(os.path.join(folder, schedule), tag=f"global_step{STEPS}")
        found[schedule] = values_of(engine)
        if schedule == "WarmupLR":
            oracle.relink(engine)
            truth = oracle.gather(engine, oracle.state_keys(engine))
            if dist.get_rank() == 0:
                torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
    return [found]


def look(cases: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load folders that no ``latest`` file is in, each as one asks for it."""
    elastic_ckpt.install()
    found = []
    for case in cases:
        engine = build("WarmupLR", case.get("section"))
        flags.update({"mode": case["flag"]} if case.get("flag") else {})
        engine._config.load_universal_checkpoint = case.get("load_universal", False)
        facts = SimpleNamespace(case=case, error=None, path=None, differences=None, notes=(), lines=[])
        with log_lines() as facts.lines:
            try:
                facts.path, _ = engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
            except ElasticCkptError as error:
                facts.error = (type(error).__name__, str(error))
        flags.clear()
        if facts.path is not None:
            truth = torch.load(case["truth"], weights_only=False)
            if case.get("arguments", {}).get("load_module_only"):
                facts.differences = oracle.compare(
                    {"weights": oracle.low_precision(engine)}, {"weights": truth["weights"]}
                )
            else:
                facts.differences = oracle.differences(engine, truth)
            facts.notes = engine.elastic_report.notes if engine.elastic_report else ()
        found.append(facts)
        close(engine)
    return found


def as_saved(schedule: str) -> dict[str, Any]:
    """The state of a schedule after the steps of the saved run."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **LIVE)
    scheduler = SCHEDULES[schedule](optimizer)
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
    return dict(scheduler.state_dict())


def change(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """Resume with other values, as each case says; those of the first step, and of the second.

    ``outside``: a schedule that the engine does not know, which its framework restores after the load.
    """
    elastic_ckpt.install()
    found = []
    for case in arguments["cases"]:
        engine = build(case["schedule"], case["section"], case.get("stage", 1), **case["values"])
        outside = SCHEDULES[case["outside"]](oracle.base_of(engine)) if "outside" in case else None
        saved = case["schedule"].partition("-")[0]
        engine.load_checkpoint(os.path.join(arguments["folder"], saved), **case.get("arguments", {}))
        first, report = values_of(engine), engine.elastic_report
        if outside is not None:
            outside.load_state_dict(as_saved(case["outside"]))
        train(engine, STEPS, STEPS + 1)
        if outside is not None:
            outside.step()
        second = values_of(engine)
        found.append(SimpleNamespace(case=case, first=first, second=second, report=report, text=str(report)))
        close(engine)
    return found

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
from tests.distributed.jobs import SPOILS, note, noted, truth_of
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


def save(case: dict[str, Any]) -> None:
    """A run of the schedule that is its ``setup``, with its truth; it notes the values of the next step."""
    elastic_ckpt.install()
    engine = build(case["setup"])
    train(engine, 0, STEPS)
    engine.save_checkpoint(case["folder"], tag=f"global_step{STEPS}")
    note(case["folder"], values_of(engine))
    if engine.lr_scheduler is not None:
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
    close(engine)


def look(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load a folder that no ``latest`` file is in, as one asks for it: what it returned, or its error.

    ``below``: where in ``folder``; ``flag``: the mode of the command line; ``load_universal``; ``section``: options.
    """
    elastic_ckpt.install()
    engine = build("WarmupLR", case.get("section"))
    flags.update({"mode": case["flag"]} if case.get("flag") else {})
    engine._config.load_universal_checkpoint = case.get("load_universal", False)
    facts = SimpleNamespace(error=None, path=None, differences=None, notes=(), lines=[])
    facts.folder = os.path.normpath(os.path.join(case["folder"], case.get("below", "")))
    with log_lines() as facts.lines:
        try:
            facts.path, _ = engine.load_checkpoint(facts.folder, **case.get("arguments", {}))
        except ElasticCkptError as error:
            facts.error = (type(error).__name__, str(error))
    if facts.path is not None:
        truth = truth_of(case["folder"])
        if case.get("arguments", {}).get("load_module_only"):
            weights = {name: truth["masters"].get(name, value) for name, value in truth["weights"].items()}
            facts.differences = oracle.compare({"weights": oracle.low_precision(engine)}, {"weights": weights})
        else:
            facts.differences = oracle.differences(engine, truth)
        facts.notes = engine.elastic_report.notes if engine.elastic_report else ()
    close(engine)
    return [facts]


def as_saved(schedule: str) -> dict[str, Any]:
    """The state of a schedule after the steps of the saved run."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **LIVE)
    scheduler = SCHEDULES[schedule](optimizer)
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
    return dict(scheduler.state_dict())


def change(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Resume with other ``values`` under a ``schedule``: those of the first step, and of the second; and those saved.

    ``outside``: a schedule that the engine does not know, which its framework restores after the load.
    """
    elastic_ckpt.install()
    engine = build(case["schedule"], case["section"], case.get("stage", 1), **case["values"])
    outside = SCHEDULES[case["outside"]](oracle.base_of(engine)) if "outside" in case else None
    engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
    first, report = values_of(engine), engine.elastic_report
    if outside is not None:
        outside.load_state_dict(as_saved(case["outside"]))
    train(engine, STEPS, STEPS + 1)
    if outside is not None:
        outside.step()
    second = values_of(engine)
    close(engine)
    if SPOILS:
        first["lr"] += 1
    text = " ".join(str(report).replace("│", " ").split())
    (saved,) = noted(case)
    return [SimpleNamespace(first=first, second=second, saved=saved, report=report, text=text)]

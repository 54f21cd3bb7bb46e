"""Runs that go on with another lr scheduler: jobs of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from torch.optim import lr_scheduler

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import truth as oracle
from tests.distributed.jobs import SPOILS, note, noted
from tests.distributed.model import GLOBAL_BATCH, TinyLM, close, train

STEPS, MORE = 3, 4
#: Of the two param groups of a run that saves; one that resumes has others.
SAVED_RATES, LIVE_RATES = (1e-2, 2e-3), (3e-3, 8e-3)
Make = Callable[[torch.optim.Optimizer], Any]


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    inner = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, inner, [3])


SCHEDULES: dict[str, Make] = {
    "none": lambda optimizer: None,
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, total_iters=8),
    "SequentialLR": _sequential,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, list(LIVE_RATES), total_steps=20),
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, warmup_max_lr=list(LIVE_RATES), warmup_num_steps=8),
    "OneCycle": lambda optimizer: OneCycle(optimizer, 1e-3, 2e-2, cycle_first_step_size=5),
}


def optimizer_of(parameters: list[Any], rates: tuple[float, ...]) -> torch.optim.Optimizer:
    """Two groups, cut in the middle, each with a rate of its own."""
    half = len(parameters) // 2
    parts = parameters[:half], parameters[half:]
    groups = [{"params": part, "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def build(
    schedule: str, rates: tuple[float, ...], section: dict[str, Any], stage: int, outside: bool = False
) -> tuple[Any, Any]:
    """An engine with a schedule of its own, and one ``outside`` of it."""
    model = TinyLM()
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad], rates)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "elastic_checkpoint": section,
    }
    scheduler = SCHEDULES[schedule](optimizer)
    own = None if outside else scheduler
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=own, config=config)[0]
    return engine, scheduler if outside else None


def rates_of(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each group, what the next step is taken with, and what a schedule begins with."""
    return [(group["lr"], tuple(group["betas"]), group.get("initial_lr")) for group in groups]


def fresh_rates(schedule: str) -> list[list[tuple[Any, ...]]]:
    """Before each of several steps, the rates of a schedule that begins on groups of its own, without DeepSpeed's engine."""
    optimizer = optimizer_of([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], LIVE_RATES)
    scheduler, found = SCHEDULES[schedule](optimizer), []
    for _ in range(MORE):
        found.append(rates_of(optimizer.param_groups))
        optimizer.step()
        scheduler.step()
    return found


def save(case: dict[str, Any]) -> None:
    """A run of the schedule that is its ``setup``; it notes the rates of the next steps."""
    elastic_ckpt.install()
    engine, _ = build(case["setup"], SAVED_RATES, {}, stage=2)
    train(engine, 0, STEPS)
    engine.save_checkpoint(case["folder"], tag="step")
    note(case["folder"], _next_rates(engine))
    close(engine)


def resume(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Resume under the schedule ``now``: the error, or the rates of the next steps, and those of the run that saved.

    ``outside``: whether the script steps the schedule, and the engine does not know it.
    """
    elastic_ckpt.install()
    engine, outside = build(case["now"], LIVE_RATES, case.get("section", {}), case["stage"], case.get("outside", False))
    facts = SimpleNamespace(error="", remedy="", changed=False, rates=[], text="")
    (facts.saved,) = noted(case)
    before = _all_of(engine)
    try:
        engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
        facts.text = " ".join(str(engine.elastic_report).replace("│", " ").split())
        facts.rates = _next_rates(engine, outside)
        if SPOILS:
            facts.rates[0] = []
    except ElasticCkptError as error:
        facts.error, facts.remedy = f"{type(error).__name__}: {error}", error.remedy
        facts.changed = _differ(before, _all_of(engine))
    close(engine)
    return [facts]


def _next_rates(engine: Any, outside: Any = None) -> list[list[tuple[Any, ...]]]:
    found = []
    for step in range(STEPS, STEPS + MORE):
        found.append(rates_of(engine.optimizer.param_groups))
        train(engine, step, step + 1)
        if outside is not None:
            outside.step()
    return found


def _all_of(engine: Any) -> tuple[Any, ...]:
    """Weights, rates, and the scheduler's state."""
    scheduler = engine.lr_scheduler
    state = None if scheduler is None else repr(scheduler.state_dict())
    return oracle.low_precision(engine), rates_of(engine.optimizer.param_groups), state, engine.global_steps


def _differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return bool(oracle.compare({"weights": before[0]}, {"weights": after[0]})) or before[1:] != after[1:]

"""Schedules that a script restores itself, before or after its engine loads: jobs of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from torch.optim import lr_scheduler

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed.facts import attempt, log_lines
from tests.distributed.jobs import SPOILS
from tests.distributed.model import GLOBAL_BATCH, TinyLM, close, train
from tests.schedulers import Decay

STEPS, MORE = 3, 4
TAG = "step"
#: Of the parameters' halves: what they train with, and down to what a plateau takes it.
RATES = {"first": 1e-2, "second": 2e-3}
FLOORS = {"first": 6e-3, "second": 4e-4}
#: Of a group with the parameters of both halves.
MERGED = "both"
MERGED_RATE = 5e-3
#: By which a run that resumes may have other rates.
FACTOR = 3.0
#: A plateau reduces with each of them.
KEEP_LIVE = {"param_groups": "keep_live"}
LOSSES = [3.0] * (STEPS + MORE)
#: Of each live group, the half that its parameters are in, and the part of that.
GROUPINGS: Mapping[str, Sequence[tuple[str, slice]]] = {
    "as saved": [("first", slice(None)), ("second", slice(None))],
    "reversed": [("second", slice(None)), ("first", slice(None))],
    "split": [("first", slice(0, 2)), ("second", slice(None)), ("first", slice(2, None))],
    "one fewer": [("second", slice(None))],
}
#: One that no values of the save fit.
ONE_GROUP: Mapping[str, Sequence[tuple[str, slice]]] = {"merged": [(MERGED, slice(None))]}
_RATES_OF_ALL = {**RATES, MERGED: MERGED_RATE}
_FLOORS_OF_ALL = {**FLOORS, MERGED: 1e-3}


class Boosted(lr_scheduler.LambdaLR):
    """A class of a script, which keeps something by param group under a name of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.boosts = [1.0 for _ in optimizer.param_groups]
        super().__init__(optimizer, lambda step: 1 / (1 + step))


class Whole(lr_scheduler.StepLR):
    """A class of a script, whose method calls none of torch's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def by_half(optimizer: torch.optim.Optimizer, halves: Sequence[str]) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [Decay(500 * _RATES_OF_ALL[half]) for half in halves])


def sequence(optimizer: torch.optim.Optimizer, halves: Sequence[str]) -> Any:
    inner = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2), by_half(optimizer, halves)]
    return lr_scheduler.SequentialLR(optimizer, inner, [2])


SCHEDULES: Mapping[str, Callable[[Any, Sequence[str]], Any]] = {
    "LambdaLR": by_half,
    "StepLR": lambda optimizer, _: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "Whole": lambda optimizer, _: Whole(optimizer, 2, 0.5),
    "CosineAnnealingLR": lambda optimizer, _: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "OneCycleLR": lambda optimizer, halves: lr_scheduler.OneCycleLR(
        optimizer, [2 * _RATES_OF_ALL[half] for half in halves], total_steps=20
    ),
    "ReduceLROnPlateau": lambda optimizer, halves: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, min_lr=[_FLOORS_OF_ALL[half] for half in halves]
    ),
    "SequentialLR": sequence,
    "WarmupLR": lambda optimizer, halves: WarmupLR(
        optimizer, warmup_max_lr=[RATES[half] for half in halves], warmup_num_steps=8
    ),
    "OneCycle": lambda optimizer, _: OneCycle(optimizer, 1e-3, 2e-2, cycle_first_step_size=5),
    "Boosted": lambda optimizer, _: Boosted(optimizer),
}


@dataclass
class Run:
    """A live run.

    Attributes:
        engine: its engine.
        scheduler: its schedule.
        is_own: whether the engine steps it.
        names: of each param group, the parameters.
    """

    engine: Any
    scheduler: Any
    is_own: bool
    names: Sequence[Sequence[str]]

    def rates(self) -> dict[str, tuple[Any, ...]]:
        """By parameter, what the next step is taken with."""
        groups = self.engine.optimizer.param_groups
        return {
            name: (float(group["lr"]), tuple(group["betas"]))
            for group, names in zip(groups, self.names, strict=True)
            for name in names
        }

    def train(self, first: int, last: int) -> list[dict[str, tuple[Any, ...]]]:
        """Train some steps; the rates of each."""
        found = []
        for step in range(first, last):
            found.append(self.rates())
            train(self.engine, step, step + 1)
            if not self.is_own:
                self.step(step)
        return found

    def step(self, step: int) -> None:
        """Let a schedule outside of the engine take a step."""
        is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([LOSSES[step]] if is_plateau else []))


def build(
    schedule: str,
    grouping: str,
    is_own: bool,
    stage: int,
    section: Mapping[str, Any] | None = None,
    factor: float = 1.0,
) -> Run:
    """A run whose param groups are those of a grouping, with ``factor`` times their rates.

    Its schedule is the engine's if ``is_own``.
    """
    model = TinyLM()
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    middle = len(trained) // 2
    halves = {"first": trained[:middle], "second": trained[middle:], MERGED: trained}
    grouped = {**GROUPINGS, **ONE_GROUP}[grouping]
    groups, names = [], []
    for half, part in grouped:
        members = halves[half][part]
        groups.append({"params": [param for _, param in members], "lr": factor * _RATES_OF_ALL[half]})
        names.append([name for name, _ in members])
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    scheduler = SCHEDULES[schedule](optimizer, [half for half, _ in grouped])
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "elastic_checkpoint": dict(section or {}),
    }
    own = scheduler if is_own else None
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=own, config=config)[0]
    if is_own and schedule == "ReduceLROnPlateau":  # which the engine steps with what it is given
        engine.step = partial(engine.step, lr_kwargs={"metrics": LOSSES[0]})
    return Run(engine, scheduler, is_own, names)


def save(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """Save a run and, in a file of its own, the state of its schedule; then train on: the truth of its rates."""
    elastic_ckpt.install()
    folder = arguments["folder"]
    run = build(arguments["setup"], "as saved", arguments["is_own"], stage=2)
    run.train(0, STEPS)
    state = copy.deepcopy(run.scheduler.state_dict())
    run.engine.save_checkpoint(folder, tag=TAG)
    truth = run.train(STEPS, STEPS + MORE)
    if dist.get_rank() == 0:
        torch.save(state, os.path.join(folder, "scheduler.pt"))
        torch.save(truth, os.path.join(folder, "rates.pt"))
    close(run.engine)
    return [SimpleNamespace()]


def resume(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Resume, with the schedule restored by hand when the case says so: rates that are not those of the truth."""
    elastic_ckpt.install()
    folder = case["folder"]
    run = build(case["schedule"], case["grouping"], case["is_own"], case["stage"], case.get("section"))
    facts = SimpleNamespace(case=case, lines=[], text="")
    with log_lines() as facts.lines:
        for what in case["order"]:
            if what == "load":
                run.engine.load_checkpoint(folder, **case.get("arguments", {}))
            else:
                run.scheduler.load_state_dict(_state(folder))
    report = run.engine.elastic_report
    facts.text = " ".join(str(report).replace("│", " ").split())
    facts.goes_on, facts.differs = report.goes_on, report.differs
    found = run.train(STEPS, STEPS + MORE)
    facts.differences = _differences(found, folder)
    close(run.engine)
    return [facts]


def _differences(found: Sequence[Mapping[str, Any]], folder: str) -> dict[tuple[int, str], Any]:
    """By step and parameter, the rates that are not those of the truth, and these."""
    truth = torch.load(os.path.join(folder, "rates.pt"), weights_only=False)
    if SPOILS:
        truth = [{name: (2 * lr, betas) for name, (lr, betas) in rates.items()} for rates in truth]
    wrong: dict[tuple[int, str], Any] = {}
    for step, (rates, expected) in enumerate(zip(found, truth, strict=True)):
        differ = {name: (rate, expected[name]) for name, rate in rates.items() if rate != expected[name]}
        wrong |= {(step, name): pair for name, pair in differ.items()}
    return wrong


def refuse(case: dict[str, Any]) -> list[Any]:
    """Load after a schedule was restored: what of the error, the engine and the schedule is left. Then the remedy.

    ``steps_on``: the rank on which the schedule has stepped meanwhile; ``installed``: after it was restored.
    """
    elastic_ckpt.uninstall() if case.get("installed") and not SPOILS else elastic_ckpt.install()
    folder = case["folder"]
    run = build(case["schedule"], case["grouping"], False, stage=1)
    run.scheduler.load_state_dict(_state(folder))
    elastic_ckpt.install()
    if case.get("steps_on") == dist.get_rank() and not SPOILS:
        run.step(STEPS)
    before = repr(run.scheduler.state_dict())
    refused = attempt(case["name"], run.engine, lambda: run.engine.load_checkpoint(folder))
    is_same = repr(run.scheduler.state_dict()) == before
    close(run.engine)
    return [SimpleNamespace(refused=refused, is_same=is_same, followed=_follow(case))]


def _follow(case: dict[str, Any]) -> str:
    """What the error says to do: to restore the schedule after the load."""
    run = build(case["schedule"], case["grouping"], False, stage=1)
    error = ""
    try:
        run.engine.load_checkpoint(case["folder"])
        run.scheduler.load_state_dict(_state(case["folder"]))
        run.train(STEPS, STEPS + 1)
    except ElasticCkptError as raised:
        error = f"{type(raised).__name__}: {raised}"
    close(run.engine)
    return error


def merge(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load into one group of what were two: the error, and what following its remedy leads to.

    With the schedule restored by hand, in the order of the case: the rates of the next steps.
    """
    elastic_ckpt.install()
    folder = case["folder"]
    run = build(case["schedule"], "merged", False, case["stage"])
    refused = attempt(case["name"], run.engine, lambda: run.engine.load_checkpoint(folder, **case["arguments"]))
    close(run.engine)
    (remedy,) = [each for each in refused.remedies if each.config] or [SimpleNamespace(config=KEEP_LIVE)]
    run = build(case["schedule"], "merged", False, case["stage"], remedy.config)
    for what in case["order"]:
        if what == "load":
            run.engine.load_checkpoint(folder, **case["arguments"])
        else:
            run.scheduler.load_state_dict(_state(folder))
    first, *_ = run.names[0]
    spoil = 2 if SPOILS else 1
    rates = [spoil * each[first][0] for each in run.train(STEPS, STEPS + MORE)]
    close(run.engine)
    return [SimpleNamespace(refused=refused, rates=rates)]


def restore_first(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Restore a schedule that torch cannot before the load: the error, what it leaves, and then after the load."""
    elastic_ckpt.install()
    folder = case["folder"]
    run = build(case["schedule"], case["grouping"], False, case["stage"])
    before = repr(run.scheduler.state_dict())
    error = None
    try:
        run.scheduler.load_state_dict(_state(folder))
    except ElasticCkptError as raised:
        error = raised
    is_same = repr(run.scheduler.state_dict()) == before
    run.engine.load_checkpoint(folder)
    run.scheduler.load_state_dict(_state(folder))
    found = run.train(STEPS, STEPS + MORE)
    close(run.engine)
    return [SimpleNamespace(error=error, is_same=is_same, differences=_differences(found, folder))]


def change_lr(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Resume with other rates: those of the first steps by param group, and what is said about them.

    ``restores``: whether a framework restores its own schedule after the load.
    """
    elastic_ckpt.install()
    folder = case["folder"]
    run = build(case["schedule"], "as saved", case["is_own"], 1, case.get("section"), FACTOR)
    run.engine.load_checkpoint(folder, **case.get("arguments", {}))
    groups = run.engine.optimizer.param_groups
    report = run.engine.elastic_report
    facts = SimpleNamespace(initial=[group.get("initial_lr") for group in groups], notes=report.notes)
    facts.text = " ".join(str(report).replace("│", " ").split())
    facts.goes_on = report.goes_on
    if case.get("restores"):
        run.scheduler.load_state_dict(_state(folder))
    spoil = 2 if SPOILS else 1
    facts.rates = [[spoil * rates[names[0]][0] for names in run.names] for rates in run.train(STEPS, STEPS + 2)]
    close(run.engine)
    return [facts]


def _state(folder: str) -> Any:
    return torch.load(os.path.join(folder, "scheduler.pt"), weights_only=False)

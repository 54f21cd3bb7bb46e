"""Param groups named by their members, and schedulers of every class of torch and DeepSpeed on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan, SavedRate

#: Per parameter, all that a run sets by group.
RATES = {"a": 0.1, "b": 0.02, "c": 0.02, "new": 0.3}
FLOORS = {"a": 0.06, "b": 0.004, "c": 0.004, "new": 0.1}
LOSSES = [3.0, 2.0, 2.5, 2.6, 2.7, 1.0, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
Factory = Callable[[torch.optim.Optimizer, list[str]], Any]


class Decay:
    """A callable object, whose attributes torch saves for each group."""

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life

    def __call__(self, step: int) -> float:
        return math.pow(0.5, step / self.half_life)


def by_name(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [Decay(100 * RATES[name]) for name in names])


def cyclic(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    floors = [FLOORS[name] for name in names]
    highest = [2 * RATES[name] for name in names]
    momenta: Any = [RATES[name] for name in names]
    most: Any = [0.9 for _ in names]
    return lr_scheduler.CyclicLR(optimizer, floors, highest, step_size_up=3, base_momentum=momenta, max_momentum=most)


def chained(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    inner = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(inner, optimizer)


def sequential(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    inner = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 20),
        by_name(optimizer, names),
    ]
    return lr_scheduler.SequentialLR(optimizer, inner, [3, 6])


def plateau(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[FLOORS[name] for name in names])


def one_cycle(optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, [2 * RATES[name] for name in names], total_steps=20)


FACTORIES: Mapping[str, Factory] = {
    "LambdaLR": by_name,
    "MultiplicativeLR": lambda opt, names: lr_scheduler.MultiplicativeLR(opt, [lambda _: 0.9 for _ in names]),
    "StepLR": lambda opt, _: lr_scheduler.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt, _: lr_scheduler.MultiStepLR(opt, [2, 6], 0.5),
    "CosineAnnealingLR": lambda opt, _: lr_scheduler.CosineAnnealingLR(opt, 9),
    "CosineAnnealingWarmRestarts": lambda opt, _: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2),
    "PolynomialLR": lambda opt, _: lr_scheduler.PolynomialLR(opt, 10, 2.0),
    "CyclicLR": cyclic,
    "OneCycleLR": one_cycle,
    "ChainedScheduler": chained,
    "SequentialLR": sequential,
    "ReduceLROnPlateau": plateau,
    "WarmupLR": lambda opt, names: WarmupLR(opt, warmup_max_lr=[RATES[name] for name in names], warmup_num_steps=7),
    "WarmupDecayLR": lambda opt, names: WarmupDecayLR(
        opt, 12, warmup_max_lr=[RATES[name] for name in names], warmup_num_steps=5
    ),
    "WarmupCosineLR": lambda opt, names: WarmupCosineLR(opt, 12, warmup_num_steps=5),
    "OneCycle": lambda opt, names: OneCycle(opt, 0.01, 0.2, cycle_first_step_size=4),
}
#: Those and the rest.
ALL_CLASSES: Mapping[str, Factory] = {
    **FACTORIES,
    "ConstantLR": lambda opt, _: lr_scheduler.ConstantLR(opt),
    "LinearLR": lambda opt, _: lr_scheduler.LinearLR(opt),
    "ExponentialLR": lambda opt, _: lr_scheduler.ExponentialLR(opt, 0.9),
    "SWALR": lambda opt, _: SWALR(opt, 0.01),
    "LRRangeTest": lambda opt, _: LRRangeTest(opt),
}
#: What releases of torch have left out of states, or have added.
OTHER_RELEASES: list[Callable[[dict[str, Any]], object]] = [
    lambda state: state.update(verbose=False),
    lambda state: [state.pop(key, None) for key in ("_is_initial", "_last_lr", "default_min_lr", "_scale_fn_custom")],
    lambda state: (state.pop("_anneal_func_type", None), state.update(anneal_func=None)),
    lambda state: state.update(entry_of_a_later_release=1),
]
#: Those that a framework may use outside of the engine.
OF_TORCH = [kind for kind in FACTORIES if not kind.startswith("Warmup") and kind != "OneCycle"]
#: Saved groups, live groups, and for each live group the saved one. Groups are named by their first member.
REBUILT = {
    "another order": (["a", "b"], ["b", "a"], [1, 0]),
    "three in another order": (["a", "b", "new"], ["new", "a", "b"], [2, 0, 1]),
    "merged": (["a", "b", "c"], ["a", "b"], [0, 1]),
    "merged and in another order": (["b", "a", "c"], ["a", "b"], [1, 0]),
    "split": (["a", "b"], ["a", "b", "c"], [0, 1, 1]),
    "one fewer": (["a", "b"], ["b"], [1]),
}


def optimizer_of(names: Sequence[str]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": RATES[name]} for name in names]
    return torch.optim.SGD(groups, momentum=0.9)


def advance(optimizer: torch.optim.Optimizer, scheduler: Any, losses: Sequence[float]) -> list[list[float]]:
    """The rates of all groups after each step."""
    rates = []
    for loss in losses:
        optimizer.step()
        scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def plan_of(sources: Sequence[int | None], saved_groups: int, rates: Sequence[float | None] = ()) -> LoadPlan:
    members = tuple(() if source is None else (source,) for source in sources)
    saved_rates = tuple(
        None if source is None or rate is None else SavedRate(source, rate)
        for source, rate in zip(sources, rates or [None] * len(sources), strict=True)
    )
    reads = ReadPlan((), (), (), ())
    return LoadPlan(reads, saved_groups=saved_groups, member_groups=members, saved_rates=saved_rates)


class Engine:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.global_steps = optimizer, 0
        self.lr_scheduler: Any = None


def engine_of(optimizer: torch.optim.Optimizer) -> Any:
    """The engine of an optimizer, which lives as long."""
    return vars(optimizer).setdefault("engine", Engine(optimizer))


def saved_run(kind: str, names: list[str], steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = optimizer_of(names)
    scheduler = FACTORIES[kind](optimizer, names)
    advance(optimizer, scheduler, LOSSES[:steps])
    return optimizer, copy.deepcopy(scheduler.state_dict())

"""What a restored lr scheduler sets in param groups that keep the hyperparameters of the live run. Local.

A scheduler sets a group's learning rate after each step, for the next one; some cycle the momentum, too. A state dict
says how far a schedule is, so that groups whose hyperparameters are not restored have yet to be told what it is there.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime import lr_schedules as of_deepspeed
from torch.optim import lr_scheduler as of_torch

from elastic_ckpt.core.read_plan import SavedRate, SchedulerPlan
from elastic_ckpt.engines.schedule_states import NESTED

#: ``get_lr`` of these is a function of the live options and the position, as the state dict has it. That of others
#: goes on from the rate that is in the group.
_OF_POSITION = frozenset(
    kind.get_lr
    for kind in (
        of_torch.LambdaLR,
        of_torch.CosineAnnealingWarmRestarts,
        of_torch.CyclicLR,
        of_torch.OneCycleLR,
        of_deepspeed.LRRangeTest,
        of_deepspeed.OneCycle,
        of_deepspeed.WarmupLR,
        of_deepspeed.WarmupCosineLR,
    )
)
#: Lists with one entry per group, in state dicts, of the rates that schedules begin with or go to.
_BASES = ("base_lrs", "max_lrs", "min_lrs", "eta_mins")
#: What cyclic schedules set besides.
_MOMENTA = frozenset({"momentum", "betas"})
#: Entries of param groups that torch's schedulers add.
_KEPT_IN_GROUPS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def keys_set_by(scheduler: Any) -> frozenset[str]:
    """The hyperparameters that a scheduler sets in each param group."""
    cycles = getattr(_active(scheduler), "cycle_momentum", False) is True
    return _MOMENTA | {"lr"} if cycles else frozenset({"lr"})


def sets_first_beta_alone(scheduler: Any) -> bool:
    """Whether a scheduler cycles the momentum in the first of ``betas``, and leaves the second, as torch's do."""
    active = _active(scheduler)
    return getattr(active, "cycle_momentum", False) is True and isinstance(active, of_torch.LRScheduler)


def keys_of_start(scheduler: Any, saved: Any) -> frozenset[str]:
    """The hyperparameters of param groups that begin anew with a scheduler; ``saved``: the state that is not restored.

    Those that either sets, as far as the saved state tells, and that either keeps in each group.
    """
    of_inner = (keys_of_start(inner, None) for inner in getattr(scheduler, NESTED, ()))
    return keys_set_by(scheduler).union(_KEPT_IN_GROUPS, _MOMENTA if _cycled_momenta(saved) else (), *of_inner)


def _cycled_momenta(saved: Any, depth: int = 4) -> bool:
    if not isinstance(saved, Mapping):
        return False
    inner = saved.get(NESTED) if depth else None
    of_inner = inner if isinstance(inner, (list, tuple)) else ()
    return saved.get("cycle_momentum") is True or any(_cycled_momenta(each, depth - 1) for each in of_inner)


def with_others(plan: SchedulerPlan, schedulers: Iterable[Any]) -> SchedulerPlan:
    """The plan with schedulers outside of the engine, which scripts and frameworks restore and step themselves."""
    sets_rates: set[str] = set()
    goes_on: set[str] = set()
    for scheduler in schedulers:
        kind = sets_rates if _sets_rates(scheduler) else goes_on
        kind.add(type(scheduler).__name__)
    return replace(plan, sets_rates=tuple(sorted(sets_rates)), goes_on=tuple(sorted(goes_on)))


def _sets_rates(scheduler: Any) -> bool:
    """Whether the rates of a scheduler, and of all in it, are those of their position, whatever is in the group."""
    inner = getattr(scheduler, NESTED, None)
    if inner is not None:  # a chain multiplies what its schedulers set, and each goes on from that
        return type(scheduler) is of_torch.SequentialLR and all(map(_sets_rates, inner))
    return getattr(type(scheduler), "get_lr", None) in _OF_POSITION


def apply_schedule(
    scheduler: Any,
    groups: Sequence[dict[str, Any]],
    kept: Iterable[int],
    saved: tuple[Any, Any],
    rates: Sequence[SavedRate | None],
) -> list[int]:
    """Set what a scheduler sets at its restored position; the groups are returned for which that is not known.

    Args:
        scheduler: the live one, with the saved state.
        groups: the live param groups.
        kept: numbers of those that keep the live run's hyperparameters.
        saved: the state that was saved, and the live one before it was restored.
        rates: per live group, the saved learning rate of its members.
    """
    unknown = []
    position_rates = _rates_of_position(scheduler)
    closed_form = None if position_rates is not None else _closed_form(scheduler)
    for number in kept:
        rate = rates[number] if number < len(rates) else None
        if position_rates is not None:
            value = position_rates[number]
        elif rate is not None and rate.lr is not None and _same_bases(*saved, rate.group, number):
            value = rate.lr
        elif rate is not None and closed_form is not None:
            value = closed_form[number]
        else:  # also a group of new parameters, if the schedule goes from one rate to the next
            unknown.append(number)
            continue
        _set_rate(scheduler, groups, number, value)
    return unknown


def _set_rate(scheduler: Any, groups: Sequence[dict[str, Any]], number: int, value: Any) -> None:
    group = groups[number]
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"].detach().fill_(value)
    else:
        group["lr"] = float(value)
    last = getattr(scheduler, "_last_lr", None)
    if isinstance(last, list) and number < len(last):
        last[number] = float(value)


def _active(scheduler: Any) -> Any:
    """The scheduler that is at work in a sequence of them, or the scheduler itself."""
    while type(scheduler) is of_torch.SequentialLR:
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    return scheduler


def _rates_of_position(scheduler: Any) -> list[Any] | None:
    """The rates of all groups where they are a function of the position, after momenta were set; else ``None``."""
    scheduler = _active(scheduler)
    if getattr(type(scheduler), "get_lr", None) not in _OF_POSITION:
        return None
    if getattr(scheduler, "last_batch_iteration", 0) < 0:  # before the first step, as DeepSpeed has constructed it
        return [group["lr"] for group in scheduler.optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that get_last_lr is meant, which a state dict may lack
        values = list(scheduler.get_lr())  # torch's cyclic ones set the momentum here
    if isinstance(scheduler, of_deepspeed.OneCycle) and scheduler.cycle_momentum:
        for group, momentum in zip(scheduler.optimizer.param_groups, scheduler.get_mom(), strict=True):
            group["betas"] = momentum
    return values


def _closed_form(scheduler: Any) -> list[Any] | None:
    """The rates of all groups by a formula that torch has beside the step from one rate to the next; or ``None``."""
    formula = getattr(_active(scheduler), "_get_closed_form_lr", None)
    return None if formula is None else list(formula())


def _same_bases(saved: Any, live: Any, source: int, number: int) -> bool:
    """Whether a schedule has the same ends for a saved group and a live one, so that the saved rate is the live one."""
    if not isinstance(saved, Mapping) or not isinstance(live, Mapping):
        return True  # it keeps nothing by group
    for key in _BASES:
        saved_rates = saved.get(key)
        live_rates = live.get(key)
        if not isinstance(saved_rates, (list, tuple)) or not isinstance(live_rates, (list, tuple)):
            continue
        if source >= len(saved_rates) or number >= len(live_rates) or saved_rates[source] != live_rates[number]:
            return False
    inner = zip(saved.get(NESTED) or (), live.get(NESTED) or (), strict=False)
    return all(_same_bases(was, now, source, number) for was, now in inner)

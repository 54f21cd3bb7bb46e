"""The patch of ``load_state_dict`` of torch's lr schedulers, after a load into other param groups than were saved.

Frameworks restore a scheduler that the engine does not have once ``load_checkpoint`` has returned: the Trainer of its
``scheduler.pt``, Accelerate of ``scheduler.bin``, Lightning of the client state. Its state has lists by the position of
the saved groups. The first state that a scheduler of such an engine's optimizer is given gets them in the order of the
live groups; nothing else is replaced.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.read_plan import LoadPlan, SavedRate
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.schedule_states import check_fit, fit_scheduler, fits_as_it_is, schedule_states
from elastic_ckpt.engines.schedules import apply_schedule
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.patches import unwrap, wrap

logger = logger_of(__name__)
_METHOD = "load_state_dict"
_REMEDY = "build the param groups as they were saved, or let the framework begin its scheduler anew"


@dataclass(frozen=True)
class _Regrouped:
    """An optimizer whose param groups are others than those of the checkpoint that was loaded last."""

    optimizer: weakref.ref[Any]
    sources: Sequence[Sequence[int]]  # per live group, the saved ones of its members
    saved_groups: int
    saved_rates: Sequence[SavedRate | None]
    restored: list[weakref.ref[Any]] = field(default_factory=list)  # schedulers that had their state


_REGROUPED: list[_Regrouped] = []
#: Whether a patched method runs, which calls those of its base class and of inner schedulers.
_RUNS: ContextVar[bool] = ContextVar("a scheduler's state is being restored", default=False)


def check_client_schedulers(engine: Any, plan: LoadPlan, client_state: Any) -> None:
    """Raise :class:`MismatchError` if a scheduler's state in the client state cannot be put in the live order. Local.

    Nothing is refused where no live scheduler is, which torch's mark in param groups.
    """
    groups = compat.base_optimizer(engine).param_groups if plan.regroups else ()
    if engine.lr_scheduler is None and not any("initial_lr" in group for group in groups):
        return
    for state in schedule_states(client_state) if plan.regroups else ():
        if not fits_as_it_is(state, len(groups), plan.saved_groups):
            with _own_remedy():
                check_fit(state, plan.member_groups, plan.saved_groups)


def expect_schedulers(engine: Any, plan: LoadPlan, restored: Sequence[Any] = ()) -> None:
    """Watch what schedulers of an engine's optimizer are restored from, if its param groups are others now. Local.

    ``restored``: those that have had their state, in the live order.
    """
    forget_schedulers(engine)
    if not plan.regroups:
        return
    optimizer = weakref.ref(compat.base_optimizer(engine))
    done = [weakref.ref(scheduler) for scheduler in restored if isinstance(scheduler, LRScheduler)]
    _REGROUPED.append(_Regrouped(optimizer, plan.member_groups, plan.saved_groups, plan.saved_rates, done))
    for kind in _with_load_state_dict():
        wrap(kind, _METHOD, _load_state_dict)


def forget_schedulers(engine: Any) -> None:
    """End :func:`expect_schedulers` of an engine, and of all that are gone. Local."""
    base = compat.base_optimizer(engine)
    _REGROUPED[:] = [each for each in _REGROUPED if (of := each.optimizer()) is not None and of is not base]


def unwatch_schedulers() -> None:
    """Undo the patch."""
    _REGROUPED.clear()
    for kind in _with_load_state_dict():
        unwrap(kind, _METHOD)


def _with_load_state_dict() -> list[type]:
    """The classes of schedulers, of torch and of the script, that have this method of their own."""
    kinds: list[type] = [LRScheduler, ReduceLROnPlateau]
    for kind in kinds:
        kinds.extend(set(kind.__subclasses__()).difference(kinds))
    return [kind for kind in kinds if _METHOD in vars(kind)]


def _load_state_dict(original: Callable[..., Any], scheduler: Any, *args: Any, **named: Any) -> Any:
    """Restore a scheduler; its lists by param group are put in the order of the live ones, where these are others."""
    state_dict, *more = (*args, *named.values())
    found = None if _RUNS.get() else _regrouped(scheduler)
    token = _RUNS.set(True)
    try:
        if found is None or fits_as_it_is(state_dict, len(found.sources), found.saved_groups):
            return original(scheduler, *args, **named)
        before = copy.deepcopy(scheduler.state_dict())
        with _own_remedy():
            fitted = fit_scheduler(copy.deepcopy(state_dict), before, found.sources, found.saved_groups)
        result = original(scheduler, fitted, *more)
    finally:
        _RUNS.reset(token)
    found.restored.append(weakref.ref(scheduler))
    _set_new_groups(scheduler, found, (state_dict, before))
    return result


def _regrouped(scheduler: Any) -> _Regrouped | None:
    """What is known of a scheduler's param groups, if its state has not been restored since."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    for each in _REGROUPED:
        optimizer = each.optimizer()
        # wrappers of an optimizer, as Accelerate's, have its groups
        is_its = optimizer is not None and groups is optimizer.param_groups
        if is_its and not any(other() is scheduler for other in each.restored):
            return each
    return None


def _set_new_groups(scheduler: Any, found: _Regrouped, saved: tuple[Any, Any]) -> None:
    """Set the rates of groups of which the checkpoint has nothing to those of the restored position."""
    new = [number for number, sources in enumerate(found.sources) if not sources]
    groups = scheduler.optimizer.param_groups
    unknown = apply_schedule(scheduler, groups, new, saved, found.saved_rates)
    if unknown and distributed.rank() == 0:
        rates = ", ".join(f"{groups[number]['lr']:g}" for number in unknown)
        text = "the lr schedule so far was not applied to param groups %s, which continue from lr %s"
        logger.warning(f"elastic_ckpt: {text}", ", ".join(map(str, unknown)), rates)


@contextmanager
def _own_remedy() -> Iterator[None]:
    """Give a :class:`MismatchError` of the body the remedy of a scheduler that ``load_checkpoint`` does not restore."""
    try:
        yield
    except MismatchError as error:
        error.remedy = _REMEDY
        raise

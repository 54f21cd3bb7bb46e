"""The patch of ``load_state_dict`` of lr schedulers: of those that ``load_checkpoint`` does not restore.

A framework or a script restores them itself. Mostly once ``load_checkpoint`` has returned: the Trainer of its
``scheduler.pt``, Accelerate of ``scheduler.bin``, Lightning of the client state. If the load was into other param
groups than were saved, the first state that a scheduler of such an engine's optimizer is given gets its lists in the
order of the live groups. If the engine's own one was to begin anew, and is restored after all, its groups get the saved
rates. Those that are restored before: :mod:`elastic_ckpt.load.early_schedulers`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.read_plan import NO_PLAN, LoadPlan
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.adapter import set_hyperparameters
from elastic_ckpt.engines.schedule_states import refuse_endless, schedule_states
from elastic_ckpt.load.early_schedulers import (
    early_schedulers,
    forget_all_early,
    forget_early,
    in_live_order,
    is_in_live_order,
    is_of,
    note_early,
    own_state,
    restore_whole,
)
from elastic_ckpt.load.group_mapping import AS_SAVED, GroupMapping
from elastic_ckpt.patches import unwrap, wrap

logger = logger_of(__name__)
_METHOD = "load_state_dict"
#: torch's, of which others are derived.
_ROOTS = (LRScheduler, ReduceLROnPlateau)


@dataclass(frozen=True)
class _Restored:
    """A scheduler that has had its state in the order of the live groups; ``given``: the text of what was saved."""

    reference: weakref.ref[Any]
    given: str


@dataclass(frozen=True)
class _Load:
    """The last load into an engine, whose schedulers may be restored after it.

    Attributes:
        engine: that has loaded.
        steps: its count of steps then.
        mapping: the saved param groups of which the live ones consist.
        start_values: per live group, the saved values of what the engine's schedule has begun anew with.
        restored: schedulers that have had their state. Given the same once more, by a script beside its framework, they
            get it in the order of the live groups again; any other is their own.
        early: those that had it before the load.
    """

    engine: weakref.ref[Any]
    steps: int
    mapping: GroupMapping
    start_values: Sequence[Mapping[str, Any]]
    restored: list[_Restored]
    early: Sequence[weakref.ref[Any]]

    def awaits(self, scheduler: Any, state: Any) -> bool:
        """Whether a state that a scheduler is given belongs to this load."""
        engine = self.engine()
        if engine is None or not is_of(scheduler, engine):
            return False
        given = [each.given for each in self.restored if each.reference() is scheduler]
        if given:
            return self.mapping.is_other and repr(state) in given
        is_waiting = self.mapping.is_other and not _is_among(scheduler, self.early)
        return is_waiting or _steps_of(engine) == self.steps

    def give_start_values(self, scheduler: Any) -> None:
        """Set what param groups were saved with, if the engine's schedule goes on after all."""
        engine = self.engine()
        if engine is None or engine.lr_scheduler is not scheduler or not any(self.start_values):
            return
        set_hyperparameters(compat.base_optimizer(engine).param_groups, self.start_values)
        if distributed.rank() == 0:
            text = "its state was restored after load_checkpoint: param groups have the saved lr again"
            logger.info("elastic_ckpt: the engine's lr scheduler does not restart; %s", text)


_LOADS: list[_Load] = []
_WATCHED: list[type] = []


def check_client_schedulers(engine: Any, plan: LoadPlan, client_state: Any) -> None:
    """Raise :class:`MismatchError` if a scheduler's state in the client state cannot be put in the live order. Local.

    Nothing is refused where no live scheduler is, which torch's mark in param groups.
    """
    groups = compat.base_optimizer(engine).param_groups if plan.regroups else ()
    if engine.lr_scheduler is None and not any("initial_lr" in group for group in groups):
        return
    for state in schedule_states(client_state) if plan.regroups else ():
        GroupMapping.of(plan).check(state)


def watch_schedulers(engine: Any = None) -> None:
    """Watch what schedulers of all classes so far are restored from, and that of an ``engine``. Idempotent; local."""
    own = getattr(engine, "lr_scheduler", None)
    is_other = not isinstance(own, _ROOTS) and hasattr(type(own), _METHOD)
    for kind in _with_load_state_dict([type(own)] if is_other else []):
        wrap(kind, _METHOD, _load_state_dict)
        if kind not in _WATCHED:
            _WATCHED.append(kind)


def expect_schedulers(engine: Any, plan: LoadPlan = NO_PLAN, restored: Sequence[Any] = (), saved: Any = None) -> None:
    """Take the next states of schedulers of an engine's optimizer for those of the load that it has ended. Local.

    ``plan``: of the load, if it was elastic_ckpt's; ``restored``: schedulers that have had the state ``saved``.
    """
    forget_schedulers(engine)
    watch_schedulers(engine)
    early = early_schedulers(engine)
    forget_early(*early)
    load = _Load(
        weakref.ref(engine),
        _steps_of(engine),
        GroupMapping.of(plan),
        plan.start_values,
        _restored(restored, repr(saved)),
        [weakref.ref(scheduler) for scheduler in early if isinstance(scheduler, _ROOTS)],
    )
    _LOADS.append(load)


def end_load(engine: Any, result: Any) -> None:
    """Expect schedulers after a load of DeepSpeed's own loader, too; ``result``: what it has returned. Local."""
    is_expected = any(load.engine() is engine for load in _LOADS)
    if not is_expected and isinstance(result, tuple) and result[0] is not None:
        expect_schedulers(engine)


def forget_schedulers(engine: Any) -> None:
    """End :func:`expect_schedulers` of an engine, and of all that are gone. Local."""
    _LOADS[:] = [load for load in _LOADS if (loaded := load.engine()) is not None and loaded is not engine]


def unwatch_schedulers() -> None:
    """Undo the patch."""
    _LOADS.clear()
    forget_all_early()
    for kind in _WATCHED:
        unwrap(kind, _METHOD)
    _WATCHED.clear()


def _with_load_state_dict(more: Sequence[type]) -> list[type]:
    """The classes of schedulers that have this method of their own, those of a script among them; and ``more``."""
    kinds: list[type] = [*_ROOTS]
    for kind in kinds:
        kinds.extend(set(kind.__subclasses__()).difference(kinds))
    return [*(kind for kind in kinds if _METHOD in vars(kind)), *more]


def _load_state_dict(original: Callable[..., Any], scheduler: Any, *args: Any, **named: Any) -> Any:
    """Restore a scheduler; its lists by param group are put in the order of the live ones, where these are others."""
    restore = functools.partial(original, scheduler, *args, **named)
    if not _WATCHED or is_in_live_order() or not (args or named):
        return restore()  # also where a wrapper around this one keeps it in place
    state_dict, *more = (*args, *named.values())
    refuse_endless(scheduler, state_dict)
    load = next((each for each in _LOADS if each.awaits(scheduler, state_dict)), None)
    given = repr(state_dict)  # which some classes change
    with in_live_order():  # those of its base class and of inner schedulers
        if load is None:
            return note_early(scheduler, restore, state_dict)
        if load.mapping.concerns(state_dict):
            before = own_state(scheduler)
            restore = functools.partial(original, scheduler, load.mapping.fit(state_dict, before), *more)
            result = restore()
            load.mapping.set_new_groups(scheduler, state_dict, before)
            load.mapping.say_what_is_kept()
        else:
            result = restore_whole(scheduler, restore, state_dict, AS_SAVED)
    if load.mapping.concerns(state_dict) or not load.mapping.is_other:
        load.restored.extend(_restored([scheduler], given))
    load.give_start_values(scheduler)
    return result


def _restored(schedulers: Sequence[Any], given: str) -> list[_Restored]:
    return [_Restored(weakref.ref(each), given) for each in schedulers if isinstance(each, _ROOTS)]


def _is_among(scheduler: Any, references: Sequence[weakref.ref[Any]]) -> bool:
    return any(reference() is scheduler for reference in references)


def _steps_of(engine: Any) -> int:
    return int(getattr(engine, "global_steps", 0))

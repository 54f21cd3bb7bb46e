"""Schedulers that a script or a framework restores before ``load_checkpoint``.

The lists of their state go by the position of the saved param groups. Which live groups these are is known in the load
alone, so that their states are kept until then. The load puts them in the order of the live groups, or refuses before
anything is overwritten. It also knows by them that such a schedule goes on, and does not begin anew.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import LoadPlan, SchedulerPlan
from elastic_ckpt.core.text import counted
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.schedule_states import NESTED, group_counts
from elastic_ckpt.engines.schedule_undo import state_and_undo
from elastic_ckpt.engines.schedules import with_others
from elastic_ckpt.errors import MismatchError, Remedy, listed
from elastic_ckpt.load.group_mapping import GroupMapping

#: Attributes of schedulers of torch and of DeepSpeed that say how far they are.
_POSITIONS = ("last_epoch", "last_batch_iteration")
#: torch's, of which others are derived.
_ROOTS = (LRScheduler, ReduceLROnPlateau)
_AFTER_THE_LOAD = "restore the scheduler after load_checkpoint: then its lists are put in the order of the live groups"
#: Whether a scheduler is being restored whose state is known to be in the order of the live groups.
_IN_LIVE_ORDER: ContextVar[bool] = ContextVar("schedulers are restored in the live order", default=False)


@dataclass(frozen=True)
class EarlyScheduler:
    """A scheduler that was restored while its engine had yet to load.

    Attributes:
        reference: the scheduler.
        state: a copy of what it was given.
        before: its own state before that; ``None`` if it cannot say.
        position: how far it was then.
    """

    reference: weakref.ref[Any]
    state: Any
    before: Any
    position: tuple[Any, ...]


_EARLY: list[EarlyScheduler] = []


@contextmanager
def in_live_order() -> Iterator[None]:
    """While the body runs, states that schedulers are given are those of the live groups, and are not looked at."""
    token = _IN_LIVE_ORDER.set(True)
    try:
        yield
    finally:
        _IN_LIVE_ORDER.reset(token)


def is_in_live_order() -> bool:
    """Whether this is called in the body of :func:`in_live_order`."""
    return _IN_LIVE_ORDER.get()


def note_early(scheduler: Any, restore: Callable[[], Any], state: Any) -> Any:
    """Restore a scheduler, and keep what it was given until its engine loads; what ``restore`` returns. Local."""
    known = next((each for each in _EARLY if each.reference() is scheduler), None)
    before = own_state(scheduler) if known is None else known.before
    given = copied(state)
    result = restore_whole(scheduler, restore, state, _AFTER_THE_LOAD)
    forget_early(scheduler)
    _EARLY.append(EarlyScheduler(weakref.ref(scheduler), given, before, _position(scheduler)))
    return result


def restore_whole(scheduler: Any, restore: Callable[[], Any], state: Any, remedy: str) -> Any:
    """Restore a scheduler from a state as it is; what ``restore`` returns. Local.

    Raises :class:`MismatchError`, and leaves the scheduler as it was, if that fails and the state is for another number
    of param groups. What else a class raises is its own.
    """
    before = own_state(scheduler)
    try:
        return restore()
    except Exception as error:
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        saved = group_counts(state)
        live = len(groups)
        if not groups or not saved or saved == {live}:
            raise
        if before is not None:
            scheduler.load_state_dict(before)  # of which torch has replaced a part
        raise MismatchError(
            f"a {type(scheduler).__name__} could not load a state that is for other param groups",
            expected=f"lists for {counted(live, 'param group')}, as the live optimizer has",
            found=f"lists for {listed(map(str, saved))}, and {type(error).__name__}: {error}",
            remedy=remedy,
        ) from error


def forget_early(*schedulers: Any) -> None:
    """End :func:`note_early` of schedulers, and of all that are gone. Local."""
    _EARLY[:] = [
        each
        for each in _EARLY
        if (noted := each.reference()) is not None and not any(noted is scheduler for scheduler in schedulers)
    ]


def forget_all_early() -> None:
    """End :func:`note_early` of all schedulers. Local."""
    _EARLY.clear()


def early_schedulers(engine: Any) -> list[Any]:
    """The schedulers of an engine's optimizer that have been restored since its last load. Local."""
    found = [each.reference() for each in _EARLY]
    early = [scheduler for scheduler in found if scheduler is not None and is_of(scheduler, engine)]
    own = getattr(engine, "lr_scheduler", None)
    is_unseen = not engine.global_steps and not any(own is each for each in early)
    if own is not None and is_unseen and _has_moved(own):
        early.append(own)  # before elastic_ckpt was installed
    return early


def is_of(scheduler: Any, engine: Any) -> bool:
    """Whether a scheduler sets the rates of an engine's optimizer, which may be inside of others, as Accelerate's."""
    if scheduler is engine.lr_scheduler:
        return True
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    optimizer = compat.base_optimizer(engine)
    return groups is not None and groups is getattr(optimizer, "param_groups", None)


def own_state(scheduler: Any) -> Any:
    """A copy of a scheduler's own state; ``None`` if it cannot say."""
    try:
        return copied(scheduler.state_dict())
    except Exception:  # a class of the user's
        return None


def copied(state: Any) -> Any:
    """A copy of a scheduler's state; the state itself if something in it cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception:
        return state


class EarlyStates:
    """The states of early schedulers in the order of the live groups: computed before anything changes.

    Raises :class:`MismatchError` if no order is known. ``restored_by_load``: a scheduler that has its state of the
    checkpoint.
    """

    def __init__(self, engine: Any, plan: LoadPlan, restored_by_load: Any = None) -> None:
        self._mapping = GroupMapping.of(plan)
        self._noted: list[tuple[Any, EarlyScheduler, Any]] = []
        self._undo = ExitStack()
        for noted in _EARLY:
            scheduler = noted.reference()
            if scheduler is None or scheduler is restored_by_load or not is_of(scheduler, engine):
                continue
            if self._mapping.concerns(noted.state):
                fitted = self._mapping.fit(noted.state, noted.before)
                _refuse_stepped(scheduler, noted)
                self._noted.append((scheduler, noted, fitted))
        if self._mapping.is_other:
            _refuse_unseen(engine, self._mapping, restored_by_load)

    def __bool__(self) -> bool:
        return bool(self._noted)

    def load(self) -> None:
        """Restore the schedulers, a user's classes among them, in the order of the live groups. Local."""
        for scheduler, noted, fitted in self._noted:
            _, undo = state_and_undo(scheduler, scheduler.optimizer.param_groups)
            self._undo.callback(undo)
            scheduler.load_state_dict(fitted)
            self._mapping.set_new_groups(scheduler, noted.state, noted.before)

    def undo(self) -> None:
        """Undo :meth:`load`, because the load failed. Local."""
        self._undo.close()


def _refuse_stepped(scheduler: Any, noted: EarlyScheduler) -> None:
    """Raise :class:`MismatchError` if a scheduler has stepped since it was restored, and so is elsewhere."""
    if _position(scheduler) == noted.position:
        return
    raise MismatchError(
        f"a {type(scheduler).__name__} was restored before the load and has stepped since, while param groups "
        "differ from those at the save: its lists by param group mix both orders",
        expected="a scheduler as it was restored",
        found=f"position {_position(scheduler)}, restored to {noted.position}",
        remedy=Remedy("restore the scheduler after load_checkpoint, and step it then"),
    )


def _refuse_unseen(engine: Any, mapping: GroupMapping, restored_by_load: Any) -> None:
    """Raise :class:`MismatchError` if a scheduler of torch is not at its beginning, and how it got there was not seen.

    As where it was restored before elastic_ckpt was installed. In an engine that has trained, it has stepped with it.
    """
    if engine.global_steps:
        return
    seen = [*(noted.reference() for noted in _EARLY), restored_by_load]
    for scheduler in _outermost(engine):
        is_known = any(scheduler is each for each in seen)
        if is_known or not _has_moved(scheduler) or not mapping.concerns(own_state(scheduler)):
            continue
        raise MismatchError(
            f"a {type(scheduler).__name__} is not at its beginning, while param groups differ from those at the save: "
            "it was restored before elastic_ckpt was installed or has stepped, and the order of its lists is not known",
            expected="a scheduler at its beginning, or one that was restored with elastic_ckpt installed",
            found=f"position {_position(scheduler)}",
            remedy=Remedy("restore the scheduler after load_checkpoint"),
        )


def _outermost(engine: Any) -> list[Any]:
    """The schedulers of torch of an engine's optimizer, without those in sequences and chains."""
    # by their classes: of other objects, nothing is asked
    alive = [each for each in gc.get_objects() if issubclass(type(each), _ROOTS) and is_of(each, engine)]
    inner = {id(each) for scheduler in alive for each in _inner_schedulers(scheduler)}
    return [scheduler for scheduler in alive if id(scheduler) not in inner]


def with_other_schedulers(plan: SchedulerPlan, engine: Any, config: ElasticConfig) -> SchedulerPlan:
    """The plan with the schedulers of torch that the engine does not have, if groups keep the live lr. Local."""
    if config.param_groups != "keep_live":
        return plan
    return with_others(plan, [scheduler for scheduler in _outermost(engine) if scheduler is not engine.lr_scheduler])


def _has_moved(scheduler: Any) -> bool:
    """Whether a scheduler of torch or DeepSpeed has been restored or has stepped since it was constructed."""
    if any(map(_has_moved, _inner_schedulers(scheduler))) and not hasattr(scheduler, "last_epoch"):
        return True  # a chain
    counts_steps = getattr(type(scheduler), "step", None) is LRScheduler.step
    if counts_steps and getattr(scheduler, "_step_count", None) == 1:
        return False  # constructed at a later epoch
    return any(isinstance(position, int) and position > 0 for position in _position(scheduler))


def _inner_schedulers(scheduler: Any) -> list[Any]:
    """Those of a sequence or a chain."""
    inner = getattr(scheduler, NESTED, ())
    return list(inner) if isinstance(inner, (list, tuple)) else []


def _position(scheduler: Any) -> tuple[Any, ...]:
    """How far a scheduler is, by those of its attributes that say so."""
    return tuple(getattr(scheduler, name) for name in _POSITIONS if hasattr(scheduler, name))

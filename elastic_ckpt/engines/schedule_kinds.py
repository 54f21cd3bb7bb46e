"""Whether what a checkpoint has for an lr scheduler is of the kind that the live one keeps. Local.

The schedulers of torch make every entry of a state dict an attribute of theirs, whatever its name and value
(``LRScheduler.load_state_dict``): an entry ``step`` would take the place of the method, ``optimizer`` that of the
engine's optimizer, and a text for a number would be an error of the first step after the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core.kinds import LIST, MAPPING, NOTHING, Strange, described, is_plain, kind_of, strange_value
from elastic_ckpt.engines.schedule_states import BEGIN_ANEW, NESTED, OPTIONAL
from elastic_ckpt.errors import MismatchError, Remedy, shortened

#: Packages whose schedulers take a state dict without a look at it.
_TAKE_ANY = ("torch.", "deepspeed.")
#: Entries that are nothing in some runs and something in others.
_MAY_BE_NOTHING = frozenset({"_scale_fn_custom", "_scale_fn_ref", "verbose"})
#: The best measure so far, and what each is better than, which begin with infinity.
_MAY_BE_INFINITE = frozenset({"best", "mode_worse"})
#: The attributes of functions that are objects, for each param group; nothing for one that is a function.
_FUNCTIONS = "lr_lambdas"
#: Of a sequence of schedulers: the steps at which the next one takes over.
_BORDERS = "_milestones"


def refuse_strange_entries(scheduler: Any, live: Any, saved: Any) -> None:
    """Raise :class:`MismatchError` for a saved state with an entry that the live scheduler does not keep so.

    ``live``: the scheduler's own state.
    """
    strange = strange_entry(scheduler, live, saved)
    if strange is None:
        return
    problem = "the checkpoint's lr scheduler state has an entry that the live scheduler cannot take"
    name = f"{strange.name} of lr_scheduler"
    remedy = BEGIN_ANEW, Remedy("build the scheduler that was saved")
    raise MismatchError(problem, None, strange.expected, strange.found, parameter=name, remedy=remedy)


def strange_entry(scheduler: Any, live: Any, saved: Any) -> Strange | None:
    """The first entry of a saved state that the live scheduler does not keep so; ``None`` if there is none.

    What a class of the user's own makes of its states is for that class to say.
    """
    method = getattr(type(scheduler), "load_state_dict", None)
    if not getattr(method, "__module__", "").startswith(_TAKE_ANY) or not isinstance(live, Mapping):
        return None
    if not isinstance(saved, Mapping):
        return Strange("the state", MAPPING, described(saved))
    for name, value in saved.items():
        if not isinstance(name, str):
            return Strange("the state", "names of entries", described(name))
        strange = _strange(scheduler, live, name, value)
        if strange is not None:
            return strange
    return None


def _strange(scheduler: Any, live: Mapping[str, Any], name: str, value: Any) -> Strange | None:
    if name not in live:
        if is_plain(value) and (name in OPTIONAL or not hasattr(scheduler, name)):
            return None
        return Strange(name, f"no such entry: {type(scheduler).__name__} keeps it in no state", described(value))
    if name == NESTED:
        return _strange_inner(scheduler, value)
    if name == _FUNCTIONS and kind_of(value) == LIST:
        return _strange_function(live[name], value)
    if name == _BORDERS and kind_of(value) == LIST and len(value) != len(live[name]):
        return Strange(name, f"{len(live[name])} entries", described(value))
    own = None if value is None and name in _MAY_BE_NOTHING else live[name]
    return strange_value(name, own, value, name in _MAY_BE_INFINITE)


def _strange_inner(scheduler: Any, states: Any) -> Strange | None:
    """The same of the schedulers in a sequence or a chain."""
    inner: Sequence[Any] = scheduler._schedulers
    if not isinstance(states, (list, tuple)) or len(states) != len(inner):
        return Strange(NESTED, f"the states of {len(inner)} schedulers", described(states))
    for each, state in zip(inner, states, strict=True):
        strange = strange_entry(each, each.state_dict(), state)
        if strange is not None:
            return strange
    return None


def _strange_function(live: Sequence[Any], saved: Sequence[Any]) -> Strange | None:
    """The same of the functions of param groups: torch makes each entry an attribute of the live one."""
    for number, attributes in enumerate(saved):
        name = f"{_FUNCTIONS}[{number}]"
        own = live[number] if number < len(live) else None
        if attributes is None:
            continue
        if kind_of(attributes) != MAPPING:
            return Strange(name, f"{MAPPING}, or {NOTHING}", described(attributes))
        known = own.keys() if isinstance(own, Mapping) else attributes.keys()
        others = attributes.keys() - known
        if others:
            return Strange(
                name, f"no entry but {shortened(sorted(map(str, known)))}", shortened(sorted(map(str, others)))
            )
        for key, value in attributes.items():
            like = own[key] if isinstance(own, Mapping) else None
            if (strange := strange_value(f"{name}[{key!r}]", like, value)) is not None:
                return strange
    return None

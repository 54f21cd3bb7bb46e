"""Whether the hyperparameters of a saved group are of the kind that the live group keeps. Pure.

The optimizers of torch take whatever a state dict has (``Optimizer.load_state_dict``), and look at it in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.kinds import LIST, NOTHING, NUMBER, Strange, described, kind_of, number_of, strange_value
from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.values import PerRank
from elastic_ckpt.errors import MismatchError, Remedy

#: What no optimizer that has a number or a list there can do without.
_NEEDED = frozenset({"betas", "eps", "weight_decay", "momentum"})
#: Lists that have as many numbers as the optimizer has averages.
_FIXED = frozenset({"betas", "eps", "etas", "step_sizes"})
#: Hyperparameter -> the state that each step takes for granted if it is true, and one that is kept in any case.
_WITH_STATE = {"amsgrad": ("max_exp_avg_sq", "exp_avg_sq"), "centered": ("grad_avg", "square_avg")}
#: What the constructors of torch's optimizers refuse below 0; decays they refuse from 1 on, too.
_FROM_ZERO = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"})
_DECAYS = frozenset({"betas"})
#: Ways out of an error about a hyperparameter.
_REMEDY = (
    Remedy("keeps the live run's hyperparameters", config={"param_groups": "keep_live"}),
    Remedy("use another tag"),
)


def refuse_strange_hyperparameters(
    metadata: CheckpointMetadata, number: int, group: LiveGroup, taken: Mapping[str, Any]
) -> None:
    """Raise :class:`MismatchError` for a saved hyperparameter that the live optimizer cannot have, which names it.

    ``number``: of the live group; ``taken``: what it would get.
    """
    strange = strange_hyperparameter(group.hyperparameters, taken) or _flag_without_state(metadata, group, taken)
    if strange is not None:
        problem = "the live optimizer cannot take a hyperparameter of the checkpoint"
        which = f"{strange.name} of param group {number}"
        raise metadata.error(MismatchError, problem, which, strange.expected, strange.found, _REMEDY)


def strange_hyperparameter(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Strange | None:
    """The first of a group's saved hyperparameters that an optimizer with the ``live`` ones cannot have."""
    for name, taken in saved.items():
        for value in taken.values if isinstance(taken, PerRank) else [taken]:
            if (strange := _strange(name, live, value)) is not None:
                return strange
    return None


def _flag_without_state(metadata: CheckpointMetadata, group: LiveGroup, taken: Mapping[str, Any]) -> Strange | None:
    """The first flag for which the checkpoint has no state."""
    for name, saved in taken.items():
        for value in saved.values if isinstance(saved, PerRank) else [saved]:
            if (strange := _without_state(metadata, group, name, value)) is not None:
                return strange
    return None


def _strange(name: str, live: Mapping[str, Any], saved: Any) -> Strange | None:
    own = live.get(name)
    if isinstance(own, PerRank):  # of a plan without an engine, whose groups are the saved ones
        own = own.values[0]
    if own is None:
        return Strange(name, "a value", described(saved)) if callable(saved) else None
    if saved is None:
        is_needed = name in _NEEDED or (name == "lr" and "relative_step" not in live)
        return Strange(name, kind_of(own), NOTHING) if is_needed else None
    both_are_lists = kind_of(saved) == kind_of(own) == LIST
    if name in _FIXED and both_are_lists and len(saved) != len(own):
        return Strange(name, f"{len(own)} numbers", described(saved))
    return strange_value(name, own, saved) or _out_of_range(name, own, saved)


def _out_of_range(name: str, live: Any, saved: Any) -> Strange | None:
    """A flag for a number, or a number that no constructor takes; ``None`` where the live run has such itself."""
    if name not in _FROM_ZERO:
        return None
    if kind_of(saved) != LIST:
        return _number_out_of_range(name, name, live, saved)
    places = enumerate(zip(live, saved, strict=False))
    every = (_number_out_of_range(name, f"{name}[{at}]", mine, each) for at, (mine, each) in places)
    return next(filter(None, every), None)


def _number_out_of_range(name: str, place: str, live: Any, saved: Any) -> Strange | None:
    if kind_of(live) != NUMBER or kind_of(saved) != NUMBER:
        return None
    if isinstance(saved, bool) and not isinstance(live, bool):
        return Strange(place, "a number, no flag", described(saved))
    if _is_taken(name, live) and not _is_taken(name, saved):
        expected = "a number from 0 on, and below 1" if name in _DECAYS else "a number from 0 on"
        return Strange(place, expected, described(saved))
    return None


def _is_taken(name: str, value: Any) -> bool:
    number = number_of(value)
    return bool(number >= 0 and (number < 1 or name not in _DECAYS))


def _without_state(metadata: CheckpointMetadata, group: LiveGroup, name: str, saved: Any) -> Strange | None:
    """A flag for which the checkpoint has no state, though it has those that belong to any."""
    needed, usual = _WITH_STATE.get(name, ("", ""))
    if saved is not True or not needed or name not in group.hyperparameters:
        return None
    places = metadata.tensors
    has_states = any((member, usual) in places for member in group.names)
    if not has_states or any((member, needed) in places for member in group.names):
        return None
    return Strange(name, f"false, since no parameter has {needed}", described(saved))

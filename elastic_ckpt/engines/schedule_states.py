"""State dicts of lr schedulers: whether one is of the live scheduler's class, and its lists by param group. Local.

A state dict does not name its class: its keys tell. Those of torch's schedulers are their attributes, and most of them
take any state dict without a look at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import MismatchError, Remedy, shortened

#: Lists with one entry per param group, in state dicts of ``torch.optim.lr_scheduler`` and of DeepSpeed; other lists;
#: and lists of inner schedulers' state dicts.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "eta_mins"}
)
_NOT_PER_GROUP = frozenset({"_milestones", "milestones", "_schedule_phases"})
NESTED = "_schedulers"
#: What DeepSpeed's schedulers save, and nothing else: how far they are.
_DEEPSPEEDS = "last_batch_iteration"
_OF_DEEPSPEED = "a schedule of DeepSpeed"
#: Entries of any scheduler of torch: how far it is, and what some releases of torch keep besides.
_POSITION = frozenset({"last_epoch", "_step_count", "base_lrs", "_last_lr"})
_OF_ANY = _POSITION | {"verbose", "_get_lr_called_within_step", "_is_initial"}
_ALSO = frozenset(
    {"use_beta1", "_scale_fn_custom", "_scale_fn_ref", "_anneal_func_type", "_schedule_phases", "anneal_func"}
    | {"_anneal_strategy", "anneal_strategy", "default_min_lr", "base_momentums", "max_momentums", "eps", "mode"}
)
#: Entries that a state of one release of torch has, and that of another has not.
OPTIONAL = _OF_ANY | _ALSO
#: The entries of torch's classes, by which they are told apart; ``_ALSO`` has those that not every release saves.
_CLASSES: Mapping[frozenset[str], str] = {
    frozenset({"lr_lambdas"}): "LambdaLR or MultiplicativeLR",
    frozenset({"step_size", "gamma"}): "StepLR",
    frozenset({"milestones", "gamma"}): "MultiStepLR",
    frozenset({"factor", "total_iters"}): "ConstantLR",
    frozenset({"start_factor", "end_factor", "total_iters"}): "LinearLR",
    frozenset({"gamma"}): "ExponentialLR",
    frozenset({NESTED, "_milestones"}): "SequentialLR",
    frozenset({NESTED}): "ChainedScheduler",
    frozenset({"total_iters", "power"}): "PolynomialLR",
    frozenset({"T_max", "eta_min"}): "CosineAnnealingLR",
    frozenset({"T_0", "T_i", "T_mult", "T_cur", "eta_min"}): "CosineAnnealingWarmRestarts",
    frozenset(
        {"factor", "min_lrs", "patience", "cooldown", "cooldown_counter", "threshold", "threshold_mode", "best"}
        | {"num_bad_epochs", "mode_worse"}
    ): "ReduceLROnPlateau",
    frozenset({"max_lrs", "total_size", "step_ratio", "scale_mode", "gamma", "cycle_momentum"}): "CyclicLR",
    frozenset({"total_steps", "cycle_momentum"}): "OneCycleLR",
    frozenset({"anneal_epochs"}): "SWALR",
}
_MODULE_OF_TORCH = "torch.optim.lr_scheduler"
#: Values that a state may come to where containers in it are shared, at least, and for each that it has.
_MOST_VALUES = 1 << 20
_MOST_TIMES = 8
_MOST_DEPTH = 128  # as in pickles
_MOST_BITS = 1 << 13  # of integers, as in pickles: Python writes no more than 4,300 digits
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
#: A remedy for a schedule that is not restored.
BEGIN_ANEW = Remedy("restarts the live schedule from the live lr", arguments={"load_lr_scheduler_states": False})


def refuse_other_scheduler(scheduler: Any, live: Any, saved: Any) -> None:
    """Raise :class:`MismatchError` if a saved state is that of another class than the live scheduler.

    ``live``: its state. What a class of the user's own makes of its own former states is for that class to say.
    """
    if not is_of_another_scheduler(scheduler, live, saved):
        return
    raise MismatchError(
        "the checkpoint has the state of an lr scheduler of another class",
        expected=f"the live {type(scheduler).__name__}, whose state has {_described(live)}",
        found=f"{_class_of(saved) or 'another one'}, whose state has {_described(saved)}",
        parameter="lr_scheduler",
        remedy=(BEGIN_ANEW, Remedy("build the scheduler that was saved")),
    )


def refuse_endless(scheduler: Any, state: Any) -> None:
    """Raise :class:`MismatchError` for a state that comes to more than can be looked through or written down.

    ``state``: of a file that others have read. Lists that have each other twice come to more values than can be counted
    within a few hundred bytes.
    """
    values = _each_once(state)
    most = max(_MOST_VALUES, _MOST_TIMES * len(values))
    level = [state]
    left = most
    for _ in range(_MOST_DEPTH):
        level = list(islice(chain.from_iterable(map(_values_in, level)), left + 1))
        left -= len(level)
        if left < 0 or not level:
            break
    if level or any(isinstance(value, int) and value.bit_length() > _MOST_BITS for value in values):
        raise MismatchError(
            f"the state that a {type(scheduler).__name__} is given comes to more than any scheduler keeps",
            expected=f"at most {most} values, nested at most {_MOST_DEPTH} deep, and integers of {_MOST_BITS} bits",
            found="more, or lists in lists that come to more",
            remedy="let the framework restart its scheduler, or resume from another checkpoint",
        )


def _each_once(state: Any) -> list[Any]:
    """The values in the containers of a state, each of which is looked into once."""
    seen = {id(state)}
    waiting = [state]
    found = []
    while waiting:
        for value in _values_in(waiting.pop()):
            found.append(value)
            if id(value) not in seen and isinstance(value, _CONTAINERS):
                seen.add(id(value))
                waiting.append(value)
    return found


def _values_in(value: Any) -> Iterable[Any]:
    """What a container has, keys too; nothing for other values."""
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    return value if isinstance(value, _CONTAINERS) else ()


def is_of_another_scheduler(scheduler: Any, live: Any, saved: Any) -> bool:
    """Whether a saved state is that of another class than the live scheduler, whose own state is ``live``."""
    method = getattr(type(scheduler), "load_state_dict", None)
    takes_any = getattr(method, "__module__", "") == _MODULE_OF_TORCH
    return _is_other(live, saved, takes_any)


def lacking_entries(live: Any, saved: Any) -> str:
    """In words, which entries a saved state lacks or has besides those of the live one; empty if neither."""
    if not isinstance(saved, Mapping) or not isinstance(live, Mapping):
        return ""
    lacking = sorted(map(str, live.keys() - saved.keys() - OPTIONAL))
    others = sorted(map(str, saved.keys() - live.keys() - OPTIONAL))
    texts = [f"the saved state lacks {', '.join(lacking)}"] if lacking else []
    texts += [f"the live scheduler's own state has no {', '.join(others)}"] if others else []
    return "; ".join(texts)


def schedule_states(client_state: Any, depth: int = 4) -> Iterator[Mapping[str, Any]]:
    """The states of schedulers in a client state and what it holds: a framework or a script restores them itself."""
    if isinstance(client_state, Mapping):
        known = client_state.keys() & _POSITION
        if len(known) > 1 or NESTED in client_state or client_state.keys() == {_DEEPSPEEDS}:
            yield client_state
            return
    if depth and isinstance(client_state, (Mapping, list, tuple)):
        for value in client_state.values() if isinstance(client_state, Mapping) else client_state:
            yield from schedule_states(value, depth - 1)


def _is_other(live: Any, saved: Any, takes_any: bool) -> bool:
    """Whether two states are of different classes; ``takes_any``: nothing checks the saved one as it is loaded."""
    if not isinstance(live, Mapping):
        return False
    if not isinstance(saved, Mapping):
        return saved is not None and (takes_any or _class_of(live) is not None)
    mine = _class_of(live)
    other = _class_of(saved)
    if mine and other:
        return mine != other or _are_other_nested(live, saved)
    own = live.keys() - _OF_ANY
    others = saved.keys() - _OF_ANY
    if own & others or not (own or others):
        return False
    return bool(mine or other) or (takes_any and bool(own and others))


def _are_other_nested(live: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether states of sequences or chains have schedulers of other classes in them, or another number."""
    inner = live.get(NESTED, ())
    others = saved.get(NESTED, ())
    if not isinstance(others, (list, tuple)) or len(inner) != len(others):
        return True
    return any(_is_other(*pair, takes_any=True) for pair in zip(inner, others, strict=True))


def _class_of(state: Any) -> str | None:
    """The class of torch that saves such a state, or one of DeepSpeed; ``None``: another one."""
    if not isinstance(state, Mapping):
        return None
    if state.keys() == {_DEEPSPEEDS}:
        return _OF_DEEPSPEED
    own = state.keys() - _OF_ANY
    found = [name for keys, name in _CLASSES.items() if keys <= own <= keys | _ALSO]
    return found[0] if found else None


def _described(state: Any) -> str:
    """The entries of a state by which its class is known."""
    if not isinstance(state, Mapping):
        return f"no entries, and is of type {type(state).__name__}"
    own = sorted(map(str, state.keys() - _OF_ANY)) or sorted(map(str, state))
    inner = state.get(NESTED)
    text = shortened(own)
    if isinstance(inner, (list, tuple)):
        text += f" of {counted(len(inner), 'scheduler')}: {', '.join(_class_of(each) or 'another' for each in inner)}"
    return text


def fit_scheduler(
    saved: Any, live: Any, sources: Sequence[Sequence[int]], saved_groups: int, keeps_live: bool = False
) -> Any:
    """The saved state of a scheduler, with its lists in the order of the live param groups.

    The live state gives the entries of groups without a source, and of merged groups that the saved scheduler treats
    unequally if groups keep their live values (``keeps_live``); ``sources``: per live group, the saved groups that its
    hyperparameters come from; ``saved_groups``: number of param groups in the checkpoint, 0 if it records none. Raises
    :class:`MismatchError` if a list may or may not be per param group, or of merged groups treated unequally.
    """
    count = saved_groups or len(sources)
    in_order = [tuple(source) for source in sources] == [(number,) for number in range(count)]
    if in_order and saved_groups:
        _check_lengths(saved, live, count)
        return saved
    if not isinstance(saved, Mapping):
        return fit_scheduler({"its state": saved}, {}, sources, saved_groups, keeps_live)["its state"]
    live = live if isinstance(live, Mapping) else {}
    fitted: dict[str, Any] = {}
    for key, value in saved.items():
        if key == NESTED:
            inner = zip(value, [*(live.get(key) or ()), *({} for _ in value)], strict=False)
            fitted[key] = [fit_scheduler(state, now, sources, saved_groups, keeps_live) for state, now in inner]
        elif key in _PER_GROUP and isinstance(value, (list, tuple)):
            fitted[key] = _reorder(key, value, live.get(key), sources, count, keeps_live)
        elif not in_order and key not in _NOT_PER_GROUP and _may_go_by_group(value, count):
            raise _unknown(key, value, f"{key!r} without as many entries as there were groups")
        else:
            fitted[key] = value
    return fitted


def fits_as_it_is(state: Any, live_groups: int, saved_groups: int) -> bool:
    """Whether all lists by param group of a state have as many entries as there are live groups, not as were saved."""
    return live_groups != saved_groups and group_counts(state) == {live_groups}


def group_counts(state: Any) -> frozenset[int]:
    """For how many param groups the lists of a state are: one number, unless it contradicts itself."""
    return frozenset(_lengths(state))


def check_fit(saved: Any, sources: Sequence[Sequence[int]], saved_groups: int, keeps_live: bool) -> None:
    """Raise :class:`MismatchError` if :func:`fit_scheduler` will, whatever the live scheduler has for new groups."""
    fit_scheduler(saved, _stand_in(saved, len(sources)), sources, saved_groups, keeps_live)


def _check_lengths(saved: Any, live: Any, count: int) -> None:
    """Raise :class:`MismatchError` for a list with neither ``count`` entries nor as many as the live scheduler's."""
    if not isinstance(saved, Mapping) or not isinstance(live, Mapping):
        return
    for key in sorted(_PER_GROUP & saved.keys() & live.keys()):
        entries = saved[key]
        own = live[key]
        if not isinstance(entries, (list, tuple)) or not isinstance(own, (list, tuple)):
            continue
        if len(entries) not in (count, len(own)):
            problem = "the saved lr scheduler does not have as many entries as there are param groups"
            both = f"{count} entries", f"{len(entries)}"
            remedy = BEGIN_ANEW, Remedy("use another tag")
            raise MismatchError(problem, None, *both, parameter=f"{key} of lr_scheduler", remedy=remedy)
    for inner, own in zip(_inner_states(saved), _inner_states(live), strict=False):
        _check_lengths(inner, own, count)


def _lengths(state: Any) -> Iterator[int]:
    """The lengths of all lists by param group."""
    if isinstance(state, Mapping):
        yield from (len(state[key]) for key in _PER_GROUP & state.keys() if isinstance(state[key], (list, tuple)))
        for inner in _inner_states(state):
            yield from _lengths(inner)


def _stand_in(state: Any, live_groups: int) -> Any:
    """A state with a list for every list by param group, of as many entries as there are live groups."""
    if not isinstance(state, Mapping):
        return state
    lists: dict[str, Any] = {key: [None] * live_groups for key in _PER_GROUP & state.keys()}
    return lists | {NESTED: [_stand_in(inner, live_groups) for inner in _inner_states(state)]}


def _inner_states(state: Mapping[str, Any]) -> Sequence[Any]:
    """Those of the schedulers in a sequence or a chain."""
    inner = state.get(NESTED)
    return inner if isinstance(inner, (list, tuple)) else ()


def _may_go_by_group(value: Any, saved_groups: int) -> bool:
    """Whether anything in a value, at any depth, has as many entries as there were groups."""
    if isinstance(value, Mapping):
        numbered = len(value) == saved_groups and all(isinstance(key, int) for key in value)
        return numbered or any(_may_go_by_group(inner, saved_groups) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) == saved_groups or any(_may_go_by_group(inner, saved_groups) for inner in value)
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))  # of a tensor or an array
    return bool(shape) and shape[0] == saved_groups


def _reorder(
    key: str, saved: Sequence[Any], live: Any, sources: Sequence[Sequence[int]], count: int, keeps_live: bool
) -> list[Any]:
    if len(saved) != count:
        raise _unknown(key, saved, f"{counted(count, 'entry')}, one for each saved group")
    has_own = isinstance(live, (list, tuple)) and len(live) == len(sources)
    found: list[Any] = []
    for number, merged in enumerate(sources):
        entries = [saved[source] for source in merged]
        is_one = all(entry == entries[0] for entry in entries)
        if entries and is_one:
            found.append(entries[0])
        elif entries and not keeps_live:
            raise _unknown(key, entries, f"one value for merged groups {list(merged)}")
        elif has_own:
            found.append(live[number])
        else:
            own = f"the live scheduler has {counted(len(sources), 'entry')}, one for each live group"
            raise _unknown(key, live, own)
    return found


def _unknown(key: str, value: Any, expected: str) -> MismatchError:
    problem = 'param groups were rebuilt since the save, or keep their live values ("keep_live"), '
    problem += "and it is not known how this lr scheduler keeps state by group"
    found = f"{key}: {value!r}"[:200]
    remedy = Remedy("build the groups as they were saved"), BEGIN_ANEW
    return MismatchError(problem, expected=expected, found=found, remedy=remedy)

"""What only the live model settles of a checkpoint: names of numbered states and of ties; buffer or weight. Pure.

A checkpoint without ZeRO numbers the states of its optimizer. They are named by the live param groups or in the order
of the model; shapes must agree. Where parameters were frozen, unfrozen, added or removed since the save, so that a live
group has more or fewer than the saved one, shapes must leave exactly one way to match them. Where there are masters
beside the weights, their values are compared too.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from types import MappingProxyType

from elastic_ckpt.core.adopted_names import adopt_names
from elastic_ckpt.core.fqn import (
    ExpertName,
    ExpertRank,
    Members,
    NamedStates,
    NumberedStates,
    RenameRules,
    expert_name,
    rename,
)
from elastic_ckpt.core.local_state import LiveGroup, LocalState
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.wrappers import wrapped_otherwise
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, MismatchError, Remedy, listed

_OF_LAYER = re.compile(r"\d+\.")
_TIED_MODULE = re.compile(r"tied_modules\.[^.]+\.")
Names = Sequence[Sequence[str]]


def name_states(
    numbered: NumberedStates,
    live: Sequence[LiveGroup] = (),
    ties: Mapping[str, Sequence[str]] = MappingProxyType({}),
    rules: RenameRules = (),
    needed: bool = True,
) -> NamedStates | None:
    """Saved names of every saved group's members, and notes on how they were inferred.

    ``live`` are the live param groups, empty without a live model, whose names are as renamed by ``rules``; ``ties``:
    parameter -> its other names in the live model. If which parameter is which is unknown, raises
    :class:`MismatchError` if states are ``needed``, else returns ``None``: the weights have names. Raises
    :class:`DamagedError` if the saved weight of a live parameter is no tensor.
    """
    _refuse_other_entries(numbered, live, rules)
    if (experts := numbered.experts) is not None:
        live = [replace(group, names=_named_on_rank(group.names, experts)) for group in live]
        pairs = ((name, other) for name, others in ties.items() for other in others)
        equal = {other: name for name, other in pairs if experts.crc32s.get(name, ()) == experts.crc32s.get(other)}
        numbered = replace(numbered, aliases={**numbered.aliases, **equal})
    if (named := named_in_order(numbered, live, rules)) is not None:
        return named
    # not fit if empty parameters are not in the live groups: ZeRO of DeepSpeed since 0.18 leaves them out
    if (full := _without_empty(numbered)) is not None and (named := named_in_order(full, live, rules)) is not None:
        return _with_empty(numbered, named[0]), named[1]
    if needed:
        raise _unnamed(numbered, live, list(_fitting(numbered, live, rules)))
    return None


def _refuse_other_entries(numbered: NumberedStates, live: Sequence[LiveGroup], rules: RenameRules) -> None:
    names = {name for group in live for name in group.names}
    saved = {rename(name, rules): name for name in numbered.others}
    saved |= {new: saved[old] for old, new in wrapped_otherwise(saved, names).items()}
    lost = {saved[name]: numbered.others[saved[name]] for name in saved if name in names}
    if lost:
        problem = "the saved weight of a parameter is no tensor"
        expected = "module / " + listed(lost) + ": what the live model has there"
        found = lost[next(iter(lost))]
        raise DamagedError(problem, numbered.path, expected, found, parameter=list(lost))


def named_in_order(numbered: NumberedStates, live: Sequence[LiveGroup], rules: RenameRules) -> NamedStates | None:
    """Names by the one order that fits, and notes; ``None`` if none does, or if several do and differ."""
    candidates = _fitting(numbered, live, rules)
    distinct = {tuple(map(tuple, members)) for members in candidates.values()}
    if not candidates or (len(distinct) > 1 and not numbered.compared):
        return None
    origin, chosen = next(iter(candidates.items()))
    return chosen, _notes(numbered, chosen, origin)


def _fitting(numbered: NumberedStates, live: Sequence[LiveGroup], rules: RenameRules) -> dict[str, Members]:
    """The members of the saved groups, by the origin of each order of names that fits them."""
    shapes = numbered.weights
    saved = {rename(name, rules): name for name in shapes}
    wrapped = wrapped_otherwise(saved, {name for group in live for name in group.names})
    saved |= {new: saved[old] for old, new in wrapped.items()}
    names = _saved_names_of(live, saved, numbered.aliases)
    unnumbered = {*numbered.buffers, *numbered.aliases}
    in_order = [name for name in shapes if name not in unnumbered]
    of_model = [in_order] if live or len(numbered.shapes) == 1 else _assigned(numbered, in_order)
    orders = {"the live param groups": _in_saved_order(numbered, names, live), "the model": of_model}
    return {origin: fitted for origin, each in orders.items() if (fitted := _fit(numbered, each)) is not None}


def _saved_names_of(live: Sequence[LiveGroup], saved: Mapping[str, str], aliases: Mapping[str, str]) -> Names:
    """The saved names of each live group's members, given those by live name.

    Of names that were tied there was one parameter. It is taken in the place of the name that holds it, if that is
    live too, else in that of the first.
    """
    holders = {saved[name] for group in live for name in group.names if name in saved} - aliases.keys()
    found: list[list[str]] = []
    taken: set[str] = set()
    for group in live:
        found.append([])
        for name in group.names:
            old = saved.get(name, "")
            holder = aliases.get(old, old)
            if name not in saved or holder in taken or (old in aliases and holder in holders):
                continue
            taken.add(holder)
            found[-1].append(holder)
    return found


def _without_empty(numbered: NumberedStates) -> NumberedStates | None:
    """The same without parameters of no elements, which have states of none, or no state at all.

    ``None`` if there are none, or if more have no state, which may be others that never had a gradient.
    """
    weights = {name: shape for name, shape in numbered.weights.items() if 0 not in shape}
    shapes = [[shape for shape in group if not _may_be_empty(shape)] for group in numbered.shapes]
    left_out = sum(map(len, numbered.shapes)) - sum(map(len, shapes))
    others = {*numbered.buffers, *numbered.aliases}
    if numbered.is_flat or not 0 < left_out <= len(numbered.weights.keys() - weights.keys() - others):
        return None
    kept = [index for index, group in enumerate(shapes) if group]  # DeepSpeed leaves out groups without members, too
    groups = [numbered.groups[index] for index in kept]
    return replace(numbered, weights=weights, shapes=[shapes[index] for index in kept], groups=groups)


def _with_empty(numbered: NumberedStates, members: Members) -> Members:
    """Names of all saved members, from those of members that are not empty."""
    names = chain.from_iterable(members)
    return [[None if _may_be_empty(shape) else next(names) for shape in group] for group in numbered.shapes]


def _may_be_empty(shape: Shape | None) -> bool:
    return shape is None or 0 in shape


def _named_on_rank(names: Sequence[str], experts: ExpertRank) -> tuple[str, ...]:
    """The names of a param group on another expert-parallel rank, with so many experts of each layer."""
    found: list[str] = []
    for layer, run in groupby(names, key=lambda name: getattr(expert_name(name), "layer", None)):
        if layer is None or layer not in experts.local:
            stacks = ((name, name.rpartition(".")[0]) for name in run)
            found += dict.fromkeys(stack if stack in experts.stacked else name for name, stack in stacks)
            continue
        parts = [part for part in map(expert_name, run) if part is not None]
        rests = [part.rest for part in parts if part.number == parts[0].number]
        first = experts.rank * experts.local[layer]
        local = experts.local[layer]
        found += [str(ExpertName(layer, n, rest)) for n in range(first, first + local) for rest in rests]
    return tuple(found)


def _assigned(numbered: NumberedStates, names: Sequence[str]) -> Names | None:
    """Names in the order of the model, assigned to several saved groups; ``None`` unless shapes leave a single way."""
    # as of the Trainer, whose second group has biases and norms; what has no member's shape did not train
    if numbered.is_flat:
        return None
    left = [deque(group) for group in numbered.shapes]
    shapes = numbered.weights
    saved = Counter(chain.from_iterable(left))
    named = Counter(shapes[name] for name in names if shapes[name] in saved)
    if saved.total() != len(names) and saved != named:
        return None
    assigned: list[list[str]] = [[] for _ in left]
    next_of: dict[Shape | None, set[int]] = {}  # the groups whose next member has a shape
    for group, rest in enumerate(left):
        if rest:
            next_of.setdefault(rest[0], set()).add(group)
    for name in names:
        fitting = [*next_of.get(None, ()), *next_of.get(shapes[name], ())]
        if len(fitting) > 1 or (not fitting and shapes[name] in saved):
            return None
        for group in fitting:
            next_of[left[group].popleft()].remove(group)
            if left[group]:
                next_of.setdefault(left[group][0], set()).add(group)
            assigned[group].append(name)
    return None if any(left) else assigned


def _in_saved_order(numbered: NumberedStates, names: Names, live: Sequence[LiveGroup]) -> Names | None:
    """The live groups in saved order, by ``name`` if all have one; ``None``: in another order, without names."""
    saved_labels = [group.get("name") for group in numbered.groups]
    live_labels = [group.hyperparameters.get("name") for group in live]
    if None not in saved_labels and set(saved_labels) == set(live_labels) and len(set(live_labels)) == len(names):
        return [names[live_labels.index(label)] for label in saved_labels]
    return None if _are_in_another_order(numbered, live) else names


def _are_in_another_order(numbered: NumberedStates, live: Sequence[LiveGroup]) -> bool:
    constant = ("initial_lr", "weight_decay", "eps", "betas")  # while a group trains
    saved = [repr(list(map(group.get, constant))) for group in numbered.groups]
    now = [repr(list(map(group.hyperparameters.get, constant))) for group in live]
    return saved != now and sorted(saved) == sorted(now)


def _fit(numbered: NumberedStates, names: Names | None) -> Members | None:
    """``names`` as the members of the saved groups; ``None`` if they do not fit."""
    if names is None or len(names) != len(numbered.shapes):
        return None
    if numbered.is_flat:
        numels = [sum(math.prod(numbered.weights[name]) for name in group) for group in names]
        return names if numels == [math.prod(shape or ()) for (shape,) in numbered.shapes] else None
    fitted = [align(saved, group, numbered.weights) for saved, group in zip(numbered.shapes, names, strict=True)]
    members = [group for group in fitted if group is not None]
    if len(members) < len(fitted):
        return None
    # nor do they if a skipped state may belong to a live parameter that is left without one
    placed = set(chain.from_iterable(members))
    without = {numbered.weights[name] for name in chain.from_iterable(names) if name not in placed}
    pairs = zip(chain.from_iterable(numbered.shapes), chain.from_iterable(members), strict=True)
    return None if any(name is None and shape in without for shape, name in pairs) else members


def align(saved: Sequence[Shape | None], names: Sequence[str], shapes: Mapping[str, Shape]) -> list[str | None] | None:
    """Match names to saved tensors by shape, both in their own order; a saved shape of ``None`` fits any.

    In lists of one length each must fit its counterpart; else the shorter must fit the longer in exactly one way.
    Returns the name of each saved tensor, ``None`` for those without; ``None`` if there is no or no single way.
    """
    named: list[Shape | None] = [shapes[name] for name in names]
    short, long = sorted((list(saved), named), key=len)
    # from behind
    first = _earliest(short, long)
    last = _earliest(short[::-1], long[::-1])
    if first is None or last is None or first != [len(long) - 1 - at for at in reversed(last)]:
        return None
    if len(saved) <= len(names):
        return [names[at] for at in first]
    name_of = dict(zip(first, names, strict=True))
    return [name_of.get(at) for at in range(len(long))]


def _earliest(short: Sequence[Shape | None], long: Sequence[Shape | None]) -> list[int] | None:
    """The earliest positions in the longer list that the members of the shorter one can take, in their order."""
    positions = iter(enumerate(long))
    chosen = [next((at for at, shape in positions if None in (shape, one) or shape == one), -1) for one in short]
    return None if -1 in chosen else chosen


def _notes(numbered: NumberedStates, chosen: Members, origin: str) -> tuple[str, ...]:
    proof = "shapes and values agree" if numbered.compared else "shapes agree"
    notes = [f"without ZeRO, DeepSpeed saves optimizer states without names: taken in the order of {origin}; {proof}"]
    weights = numbered.weights
    placed = {name for group in chosen for name in group if name is not None}
    others = weights.keys() - placed - {*numbered.buffers, *numbered.aliases}
    if not numbered.compared and {weights[name] for name in placed} & {weights[name] for name in others}:
        notes.append(
            "some parameters that do not train have the shape of some that do: "
            "the frozen ones must be the same as at the save"
        )
    if dropped := sum(name is None for group in chosen for name in group):
        notes.append(f"optimizer states of {dropped} saved parameters are skipped: they do not train in the live run")
    return tuple(notes)


def _unnamed(numbered: NumberedStates, live: Sequence[LiveGroup], fitting: Sequence[str]) -> MismatchError:
    problem = "without ZeRO, DeepSpeed saves optimizer states without names, and which parameter is which is not known"
    found = f"{[len(members) for members in numbered.shapes]} tensors in the saved groups"
    if not live:
        problem = (
            "without ZeRO, DeepSpeed saves optimizer states without names, and only a load, which knows the live param "
            "groups, can tell which parameter is which"
        )
        expected = "one param group in the order of the model, or several of which shapes tell the members"
        remedy = "leave the optimizer states out; torch.optim with model.named_parameters() saves names"
        return MismatchError(problem, numbered.path, expected, found, remedy=remedy)
    found += f", {[len(group.names) for group in live]} in the live ones"
    if fitting:
        found = f"the orders of {' and of '.join(fitting)} both fit, and differ"
    elif _are_in_another_order(numbered, live):
        found = "live param groups with the saved hyperparameters, in another order, and no name in each group"
    expected = "live param groups with the parameters of the saved ones, in their order"
    rebuild = Remedy("build the param groups as when the checkpoint was saved, frozen parameters included")
    names = [name for group in live for name in group.names]
    return MismatchError(problem, numbered.path, expected, found, parameter=names, remedy=(rebuild, WITHOUT_STATES))


def adopt_wrappers(metadata: CheckpointMetadata, live: LocalState) -> CheckpointMetadata:
    """Rename what the live model has under the same name but for wrappers."""
    extra = {*live.model.extra_states, *live.model.extra_states_elsewhere}
    trained = (flat.members for flat in live.flats)
    wholes = (whole.name for whole in live.wholes)
    others = live.others | extra
    return adopt_names(metadata, live.model.names.union(wholes, others, *trained, *live.model.ties.values()))

"""Names of what is tied: in the checkpoint, in the live model, or in one of both; and buffer or weight. Pure.

A tied parameter is saved under one name, of which the others are aliases. Names that were tied and are parameters of
their own now have the values of that name each. Names that are tied now and were parameters of their own are compared,
since only one can be kept; so are their states.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from elastic_ckpt.core.fqn import with_names
from elastic_ckpt.core.local_state import LocalState, ModelLayout, WholeTensor
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    MASTER,
    CheckpointMetadata,
    DerivedTensors,
    Place,
    TensorMetadata,
)
from elastic_ckpt.errors import UNTIE, WITHOUT_STATES, MismatchError, Remedy, keeps_first, listed

_OF_LAYER = re.compile(r"\d+\.")
_TIED_MODULE = re.compile(r"tied_modules\.[^.]+\.")
#: How many names an error describes.
_SHOWN = 6


def adopt_live_names(
    metadata: CheckpointMetadata, model: ModelLayout, with_states: bool = True, keeps_one: bool = False
) -> CheckpointMetadata:
    """Rename tied parameters to the FQN that the live engine uses, which depends on module registration order.

    Where several of its names were saved, that of a trained parameter counts, else the first. The others are copies of
    it, whose values are compared unless checksums show that they are equal, and whose states are, too, if
    ``with_states``. Raises :class:`MismatchError` for copies that cannot be compared, unless the first is kept in any
    case (``keeps_one``).
    """
    metadata = _under_a_live_name(_with_tied_modules(metadata, model), model)
    saved_names = {*metadata.parameters, *(name for name, _ in metadata.tensors)} if model.ties else set()
    renamed: dict[str, str] = {}
    copies: dict[str, str] = {}
    unknown: dict[str, str] = {}
    replicas = dict(metadata.replicas)
    for name, others in model.ties.items():
        saved = [each for each in (name, *others) if each in saved_names]
        if not saved:
            continue
        kept = next((each for each in saved if each in metadata.parameters), saved[0])
        for each in saved:
            if each == kept or not _is_weight(metadata, kept) or not _is_weight(metadata, each):
                continue
            copies[each] = kept
            if _are_equal(metadata, kept, each, with_states):
                continue
            pairs = list(_pairs(metadata, kept, each, with_states))
            if not pairs:
                unknown[each] = kept
            for place, copy in pairs:
                replicas[place] = (*replicas.get(place, ()), copy)
        if name not in saved_names.difference(copies) and [each for each in saved if each not in copies] == [kept]:
            renamed[kept] = name
    if unknown and not keeps_one:
        raise _not_compared(metadata, unknown)
    if copies:
        metadata = _without(metadata, copies, unknown)
        metadata = replace(metadata, replicas=replicas)
    if not renamed:
        return metadata
    notes = [f"tied: {old} in the checkpoint is {new} here" for old, new in renamed.items()]
    return with_names(metadata, lambda name: renamed.get(name, name), notes)


def _weight(metadata: CheckpointMetadata, name: str) -> Place:
    """Where the weights of a saved parameter are."""
    return name, MASTER if name in metadata.parameters else FROZEN


def _is_weight(metadata: CheckpointMetadata, name: str) -> bool:
    return _weight(metadata, name) in metadata.tensors


def _are_equal(metadata: CheckpointMetadata, kept: str, other: str, with_states: bool) -> bool:
    """Whether the checkpoint shows that a copy is equal, without a look at its values."""
    if 0 in metadata.tensors[_weight(metadata, other)].shape:
        return True
    if other in metadata.parameters:  # checksums are of the weights, and not of the masters
        return False
    return metadata.crc32s.get(other, -1) == metadata.crc32s.get(kept)


def _pairs(
    metadata: CheckpointMetadata, kept: str, other: str, with_states: bool
) -> Iterator[tuple[Place, TensorMetadata]]:
    """What is compared of a copy and of what is kept: weights, and states of one that trained; none if one cannot."""
    places = [(_weight(metadata, kept), _weight(metadata, other))]
    if with_states and other in metadata.parameters:
        if _scalars(metadata, kept) != _scalars(metadata, other):
            return
        keys = metadata.keys_by_name.get(kept, frozenset())
        if keys != metadata.keys_by_name.get(other, frozenset()):
            return
        places += [((kept, key), (other, key)) for key in sorted(keys)]
    tensors = [(metadata.tensors[place], metadata.tensors[at]) for place, at in places]
    for first, copy in tensors:
        if first.has_own_shape or (copy.dtype, copy.shard_shapes) != (first.dtype, first.shard_shapes):
            return
    for (place, _), (_, copy) in zip(places, tensors, strict=True):
        yield place, replace(copy, name=metadata.saved_names.get(other, other))


def _scalars(metadata: CheckpointMetadata, name: str) -> str:
    """The scalar and replicated states of a parameter, as text: NaN is no number's equal."""
    saved = metadata.parameters[name]
    replicated = [(each.key, each.dtype, each.shape, each.crc32) for each in saved.replicated]
    return repr((saved.scalars, saved.own_step, replicated))


def _not_compared(metadata: CheckpointMetadata, unknown: Mapping[str, str]) -> MismatchError:
    """The error for copies which differ by their shape, dtype or states, so that their values are not compared."""
    problem = "weights that are one in the live model were saved under several names, and cannot be compared"
    names = {*unknown, *unknown.values()}
    expected = "the same shape, dtype and states under each name of a tied weight"
    saved = [f"{name}: {_described(metadata, name)}" for name in sorted(names)]
    found = "; ".join(saved[:_SHOWN]) + (f"; and {len(saved) - _SHOWN} more" if saved[_SHOWN:] else "")
    ways = [UNTIE, keeps_first(unknown.values())]
    return metadata.error(MismatchError, problem, names, expected, found, ways)


def _described(metadata: CheckpointMetadata, name: str) -> str:
    tensor = metadata.tensors[_weight(metadata, name)]
    states = [*sorted(metadata.keys_by_name.get(name, ()))]
    if name in metadata.parameters:
        states += [f"{key} {value}" for key, value in metadata.parameters[name].scalars]
    return f"{tensor.dtype} of shape {tensor.shape} with {', '.join(states) or 'no states'}"


def _without(metadata: CheckpointMetadata, copies: Mapping[str, str], unknown: Mapping[str, str]) -> CheckpointMetadata:
    """The metadata in which copies are other names of what is kept."""
    trained = sorted(name for name in copies if name in metadata.parameters)
    gone = {at for at in metadata.tensors if at[0] in copies and (at[0] in trained or at[1] == FROZEN)}
    notes = list(metadata.notes)
    if trained:
        united = listed(f"{each} = {copies[each]}" for each in trained)
        notes.append(f"tied here, not in the checkpoint, and equal there unless another note says so: {united}")
    if unknown:
        left_out = listed(f"{each} ({_described(metadata, each)})" for each in unknown)
        notes.append(f"tied here, not in the checkpoint: those of another name are taken, and left out are {left_out}")
    return replace(
        metadata,
        aliases={**metadata.aliases, **copies},
        parameters={name: saved for name, saved in metadata.parameters.items() if name not in copies},
        tensors=_at(metadata, {at: at for at in metadata.tensors if at not in gone}),
        notes=tuple(notes),
    )


def _under_a_live_name(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """Tied parameters under a name that the live model has, if it lacks that which holds the values."""
    live = model.names.union(*model.ties.values()) if metadata.aliases else frozenset[str]()
    saved = {*metadata.parameters, *(name for name, _ in metadata.tensors)} if metadata.aliases else set()
    renamed: dict[str, str] = {}
    for alias, holder in metadata.aliases.items():
        if alias in live and alias not in saved and holder in saved and holder not in live:
            renamed.setdefault(holder, alias)
    if not renamed:
        return metadata
    notes = [f"tied: {old} in the checkpoint is {new} here" for old, new in renamed.items()]
    found = with_names(metadata, lambda name: renamed.get(name, name), notes)
    return replace(found, aliases={name: holder for name, holder in found.aliases.items() if name != holder})


def with_untied(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """The metadata in which names that were tied at the save, and are parameters of their own now, have weights each.

    Optimizer states stay with the name that holds them: of two parameters that were one, each has states of its own.
    """
    tensors: dict[Place, TensorMetadata] = {}
    holders: dict[str, str] = {}
    for alias, holder in metadata.aliases.items():
        saved = metadata.tensors.get((holder, MASTER)) or metadata.tensors.get((holder, FROZEN))
        is_known = alias in metadata.parameters or (alias, FROZEN) in metadata.tensors
        if alias in model.names and saved is not None and not is_known:
            tensors[alias, FROZEN] = replace(saved, name=alias, key=FROZEN)
            holders[alias] = holder
    if not tensors:
        return metadata
    untied = listed(f"{name} (of {holder})" for name, holder in holders.items())
    note = f"tied in the checkpoint, not here: {untied} have the values of the other name"
    more = {**metadata.tensors, **tensors}
    return replace(metadata, tensors=more, notes=(*metadata.notes, note))


def untied_parameters(metadata: CheckpointMetadata, names: Iterable[str]) -> dict[str, str]:
    """Of some names, those that were tied at the save, not now -> the name under which their values were saved."""
    places = ((name, metadata.aliases.get(name, name)) for name in names if name not in metadata.parameters)
    return {name: holder for name, holder in places if holder != name and (name, FROZEN) in metadata.tensors}


def refuse_untied(metadata: CheckpointMetadata, local_state: LocalState) -> None:
    """Refuse to begin states of what trains at zero, unless it is asked for, where they were another's at the save."""
    untied = untied_parameters(metadata, (name for flat in local_state.flats for name in flat.members))
    untied = {name: holder for name, holder in untied.items() if holder in metadata.keys_by_name}
    if not untied:
        return
    problem = "names that were one parameter at the save are parameters of their own now"
    expected = "optimizer states of each: " + listed({*untied, *untied.values()})
    found = "states of one, tied at the save: " + listed(f"{name} = {holder}" for name, holder in untied.items())
    text = f"gives {listed(untied)} the weights, too, and begins their states at zero"
    ways = [Remedy(text, arguments={"load_module_strict": False}), WITHOUT_STATES, Remedy("tie them again")]
    raise metadata.error(MismatchError, problem, untied, expected, found, ways)


def _with_tied_modules(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """Weights of a tied pipeline module that no optimizer owned, which files call by the number of a layer."""
    tied = [name for name in model.names.union(metadata.parameters) if _TIED_MODULE.match(name)]
    inside = {name: _TIED_MODULE.sub("", name) for name in tied}
    counts = Counter(inside.values())
    missing = {key: name for name, key in inside.items() if counts[key] == 1 and name not in metadata.parameters}
    renamed: dict[str, list[str]] = {}
    for name in metadata.names(FROZEN) if missing else ():
        number = _OF_LAYER.match(name)
        if number is not None and name not in model.names and (new := missing.get(name[number.end() :])):
            renamed.setdefault(new, []).append(name)
    names = {old[0]: new for new, old in renamed.items() if len(old) == 1 and (new, FROZEN) not in metadata.tensors}
    if not names:
        return metadata
    found = with_names(metadata, lambda name: names.get(name, name))
    return replace(found, saved_names={**found.saved_names, **{new: new for new in names.values()}})


def adopt_live_kinds(metadata: CheckpointMetadata, wholes: Iterable[WholeTensor]) -> CheckpointMetadata:
    """Take what no optimizer owned as the live model has it, as a buffer or a frozen parameter.

    It may have changed from one to the other; and DeepSpeed does not list the buffers of a submodule's second name,
    which may be parameters under another name.
    """
    kinds: dict[Place, Place] = {}
    for whole in wholes:
        if (whole.name, whole.key) in metadata.tensors or whole.name in metadata.parameters:
            continue
        tied = metadata.aliases.get(whole.name, "")
        same = ((whole.name, BUFFER), (whole.name, FROZEN), (tied, FROZEN), (tied, MASTER))
        saved = next((at for at in same if at in metadata.tensors), None)
        if saved is not None and (whole.key == BUFFER or saved[0] == whole.name):
            kinds[whole.name, whole.key] = saved
    if not kinds:
        return metadata
    moved = {(name, FROZEN if key == BUFFER else BUFFER): (name, key) for name, key in kinds}
    tensors = _at(metadata, {at: at for at in metadata.tensors if at not in moved} | kinds)
    replicas = {moved.get(at, at): copies for at, copies in metadata.replicas.items()}
    return replace(metadata, tensors=tensors, replicas=replicas)


def _at(metadata: CheckpointMetadata, places: Mapping[Place, Place]) -> DerivedTensors:
    """The tensors by new places, from those where the checkpoint has them."""
    return DerivedTensors(places, lambda new, old: replace(metadata.tensors[old], name=new[0], key=new[1]))

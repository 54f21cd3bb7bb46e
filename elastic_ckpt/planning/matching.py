"""Matches saved parameters, buffers and frozen weights with live ones, and accounts for the rest. Pure.

What only the live model settles comes first: names of tied parameters, and what is a buffer or a weight.

Param groups get the hyperparameters of saved ones by membership, not by position.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from elastic_ckpt.core.fqn import with_names
from elastic_ckpt.core.local_state import LocalState, ModelLayout, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, DerivedTensors, Place
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, MismatchError, UnsupportedError, listed

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = "saved without frozen parameters (exclude_frozen_parameters=True): the model's own values stay"
_NOT_CONVERTED = "DeepSpeed's converter drops the buffers of pipeline layers: the model's own values stay"
_NO_PLACE = "the live model has no such entry"


_OF_LAYER, _TIED_MODULE = re.compile(r"\d+\."), re.compile(r"tied_modules\.[^.]+\.")


def adopt_live_names(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """Rename tied parameters to the FQN that the live engine uses, which depends on module registration order.

    Where several of its names were saved, that of a trained parameter counts, else the first. What no optimizer owned
    under the others are copies of it, whose values are compared unless checksums show that they are equal.
    """
    metadata = _with_tied_modules(metadata, model)
    saved_names = {*metadata.parameters, *(name for name, _ in metadata.tensors)} if model.ties else set()
    renamed: dict[str, str] = {}
    copies: dict[str, str] = {}
    replicas = dict(metadata.replicas)
    for name, others in model.ties.items():
        saved = [each for each in (name, *others) if each in saved_names]
        kept = next((each for each in saved if each in metadata.parameters), saved[0] if saved else name)
        place = kept, MASTER if kept in metadata.parameters else FROZEN
        first = metadata.tensors.get(place)
        for each in saved:
            copy = metadata.tensors.get((each, FROZEN))
            if each == kept or each in metadata.parameters or copy is None or first is None:
                continue
            is_equal = 0 in copy.shape or metadata.crc32s.get(each, -1) == metadata.crc32s.get(kept)
            if not is_equal and (copy.dtype, copy.shard_shapes) == (first.dtype, first.shard_shapes):
                own = replace(copy, name=metadata.saved_names.get(each, each))
                replicas[place] = (*replicas.get(place, ()), own)
                is_equal = True
            if is_equal:
                copies[each] = kept
        if name not in saved_names.difference(copies) and [each for each in saved if each not in copies] == [kept]:
            renamed[kept] = name
    if copies:
        places: dict[Place, Place] = {at: at for at in metadata.tensors if at != (at[0], FROZEN) or at[0] not in copies}
        metadata = replace(
            metadata, aliases={**metadata.aliases, **copies}, replicas=replicas, tensors=_at(metadata, places)
        )
    if not renamed:
        return metadata
    notes = [f"tied: {old} in the checkpoint is {new} here" for old, new in renamed.items()]
    return with_names(metadata, lambda name: renamed.get(name, name), notes)


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
    return replace(
        metadata,
        tensors=_at(metadata, {at: at for at in metadata.tensors if at not in moved} | kinds),
        replicas={moved.get(at, at): copies for at, copies in metadata.replicas.items()},
    )


def _at(metadata: CheckpointMetadata, places: Mapping[Place, Place]) -> DerivedTensors:
    """The tensors by new places, from those where the checkpoint has them."""
    return DerivedTensors(places, lambda new, old: replace(metadata.tensors[old], name=new[0], key=new[1]))


@dataclass(frozen=True)
class Matching:
    """The parameters to restore, the buffers and frozen parameters (name, key), and what is not restored and why."""

    restored: frozenset[str]
    wholes: frozenset[tuple[str, str]]
    outcomes: tuple[Outcome, ...]

    @property
    def names(self) -> frozenset[str]:
        """All that is restored."""
        return self.restored.union(name for name, _ in self.wholes)


def match_parameters(metadata: CheckpointMetadata, local_state: LocalState, strict: bool) -> Matching:
    """Match live and saved parameters, buffers and frozen weights by FQN.

    A parameter that was frozen may train now, or the other way round: its weights are restored.

    Raises:
        MismatchError: a name is on one side only and ``strict`` is set, frozen parameters excluded from the save apart.
    """
    live = {name for flat in local_state.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in local_state.wholes}
    trained, frozen, buffers = metadata.parameters, set(metadata.names(FROZEN)), set(metadata.names(BUFFER))

    def is_saved(name: str, key: str) -> bool:
        return name in buffers if key == BUFFER else name in trained or name in frozen

    restored = frozenset(name for name in live if is_saved(name, MASTER))
    found = frozenset((name, key) for name, key in wholes if is_saved(name, key))
    missing = {MASTER: live - restored}
    lacking = [each for each in local_state.wholes if (each.name, each.key) not in found and 0 not in each.shape]
    missing |= {kind: {each.name for each in lacking if each.key == kind} for kind in (BUFFER, FROZEN)}
    unsaved = set() if metadata.source.buffers_recorded else missing.pop(BUFFER)
    excluded = set()
    # ZeRO-2 and 3 list frozen parameters, even if there are none, unless they are excluded. At lower stages a save
    # without them looks like a model without any; of tied ones it keeps the second name
    if not metadata.source.frozen_recorded and local_state.model.ties.keys() >= frozen:
        excluded = missing[FROZEN] & {w.name for w in local_state.wholes if w.key == FROZEN and not w.trains}
        missing[FROZEN] -= excluded
    here, elsewhere = live.union(name for name, _ in wholes), local_state.model.elsewhere
    unexpected = {n for n in chain(trained, frozen, buffers) if n not in elsewhere and n not in here}  # often thousands
    lost = set().union(*missing.values())
    names = unexpected & local_state.others
    if names and (strict or lost):  # which may be the lost ones, renamed by a hook
        problem = "the module's state dict has entries that are neither parameters nor buffers"
        remedy = "load_checkpoint(..., load_module_strict=False), if they hold nothing that training needs; or "
        if lost:
            remedy = f'"elastic_checkpoint": {{"rename": ...}}, if they are {listed(lost)} of the model; or '
        both = "parameters and buffers under their own names", "entries that a hook of the module adds or renames"
        raise metadata.error(UnsupportedError, problem, names, *both, remedy + AT_ITS_TOPOLOGY)
    if strict and (lost or unexpected):
        tied = listed(f"{name} = {metadata.aliases[name]}" for name in lost if name in metadata.aliases)
        hint = f"; tied at save time, not now: {tied}" if tied != "none" else ""
        remedy = "load_checkpoint(..., load_module_strict=False) restores what matches and reports the rest; renamed "
        remedy += 'ones: "elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
        problem = "model and checkpoint do not have the same parameters and buffers"
        expected = f"in the model but not in the checkpoint: {listed(lost)}"
        found_names = f"in the checkpoint but not in the model: {listed(unexpected)}{hint}"
        raise metadata.error(MismatchError, problem, lost or unexpected, expected, found_names, remedy)
    outcomes = [
        *((role, "fresh", names, _NOT_SAVED) for role, names in missing.items()),
        (FROZEN, "fresh", excluded, _EXCLUDED),
        (BUFFER, "fresh", unsaved, _NOT_CONVERTED),
        (MASTER, "ignored", unexpected & trained.keys(), _NO_PLACE),
        (FROZEN, "ignored", unexpected & frozen - trained.keys(), _NO_PLACE),
        (BUFFER, "ignored", unexpected & buffers, _NO_PLACE),
    ]
    told = (Outcome(role, what, tuple(sorted(names)), why) for role, what, names, why in outcomes if names)
    return Matching(restored, found, tuple(told))

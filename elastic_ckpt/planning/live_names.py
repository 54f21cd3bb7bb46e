"""What only the live model settles of a checkpoint: names of tied parameters, what is a buffer or a weight. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic_ckpt.core.fqn import with_names
from elastic_ckpt.core.local_state import ModelLayout, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, DerivedTensors, Place

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

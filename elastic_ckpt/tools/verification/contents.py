"""Whether a checkpoint's metadata covers every element once, and has every state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER
from elastic_ckpt.planning.read_items import check_tiling
from elastic_ckpt.planning.state_matching import keys_by_name
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, of_error
from elastic_ckpt.tools.verification.findings import (
    DAMAGED,
    INCOMPLETE,
    NO_STATE,
    READER,
    UNCHECKED,
    UNREADABLE,
)


def check_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """What is wrong with the logical tensors of a checkpoint."""
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        try:
            check_tiling(metadata, tensor)
        except DamagedError as error:
            yield of_error(error, INCOMPLETE)
        for chunk in tensor.chunks:
            end, source = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype], metadata.files[chunk.file]
            if end > source.nbytes:
                text = f"{tensor.key} ends at byte {end} of a file of {source.nbytes}"
                yield Finding(ERROR, UNREADABLE, text, tensor.name, source.path)
    is_universal, folder = metadata.source.format == "universal", metadata.source.folder
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            file = os.path.join(folder, UNIVERSAL_FOLDER) if is_universal else folder
            text = f"no fp32 master of this parameter: no {name}/{MASTER}.pt"
            yield Finding(ERROR, INCOMPLETE, text, name, file)
    yield from _state_findings(metadata)
    for key, why in metadata.states.damaged.items():
        yield Finding(ERROR, DAMAGED, f"this state lacks the scales that its codes need: {why}", key)
    for key, why in metadata.states.opaque.items():
        text = f"an optimizer state of a layout that is not known, whose values are not looked at: {why}"
        yield Finding(NOTE, UNCHECKED, text, key)
    for note in dict.fromkeys((*metadata.notes, *metadata.warnings)):
        yield Finding(NOTE, READER, note)


def _state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Members of one param group have the same states; without ZeRO, those that got no gradient have none."""
    keys = keys_by_name(metadata)
    whole = metadata.source.zero_stage == 0 and metadata.source.format == "native"
    stateless: list[str] = []
    for group in range(len(metadata.groups)):
        members = {name: saved for name, saved in metadata.parameters.items() if saved.group == group}
        states = {
            name: {*keys.get(name, ()), *dict(saved.scalars)}
            for name, saved in members.items()
            if (name, MASTER) in metadata.tensors  # the others are found already
        }
        every = set().union(*states.values())
        if states and not every and keys:
            yield Finding(NOTE, NO_STATE, f"param group {group} has no optimizer states: {listed(states)}")
        for name, present in states.items():
            if whole and every and not present:
                stateless.append(name)
            elif lost := every - present:
                text = f"no {', '.join(sorted(lost))} of this parameter, but of others in its param group"
                yield Finding(ERROR, NO_STATE, text, name, metadata.source.folder)
    if stateless:
        text = f"no optimizer states, as of parameters that got no gradient: {listed(stateless)}"
        yield Finding(NOTE, NO_STATE, text)

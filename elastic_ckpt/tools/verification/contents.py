"""Does a metadata hold everything, once? Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER
from elastic_ckpt.planning.saved_state_checks import keys_by_name
from elastic_ckpt.planning.strips import check_tiling
from elastic_ckpt.tools.verification.findings import (
    DAMAGED,
    INCOMPLETE,
    NO_STATE,
    READER,
    UNCHECKED,
    UNREADABLE,
    Finding,
    of_error,
)


def check_catalog(metadata: CheckpointMetadata) -> tuple[list[Finding], list[Finding]]:
    """Findings and notes about the logical tensors of a checkpoint."""
    findings: list[Finding] = []
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        try:
            check_tiling(metadata, tensor)
        except DamagedError as error:
            findings.append(of_error(error, INCOMPLETE))
        findings += _outside(metadata, tensor)
    findings += _without_master(metadata)
    states, notes = _states(metadata)
    findings += states
    for key, why in metadata.damaged_states.items():
        findings.append(Finding(DAMAGED, f"this state lacks the scales that its codes need: {why}", None, key))
    for key, why in metadata.opaque_states.items():
        message = f"an optimizer state of a layout that is not known, whose values are not looked at: {why}"
        notes.append(Finding(UNCHECKED, message, None, key))
    notes += [Finding(READER, note) for note in dict.fromkeys((*metadata.notes, *metadata.warnings))]
    return findings, notes


def _outside(metadata: CheckpointMetadata, tensor: TensorMetadata) -> Iterator[Finding]:
    for chunk in tensor.chunks:
        end, source = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype], metadata.files[chunk.file]
        if end > source.nbytes:
            message = f"{tensor.key} ends at byte {end} of a file of {source.nbytes}"
            yield Finding(UNREADABLE, message, source.path, tensor.name)


def _without_master(metadata: CheckpointMetadata) -> Iterator[Finding]:
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            is_universal = metadata.source.format == "universal"
            file = os.path.join(metadata.source.folder, UNIVERSAL_FOLDER) if is_universal else metadata.source.folder
            yield Finding(INCOMPLETE, f"no fp32 master of this parameter: no {name}/{MASTER}.pt", file, name)


def _states(metadata: CheckpointMetadata) -> tuple[list[Finding], list[Finding]]:
    """Members of one param group have the same states; without ZeRO, those that got no gradient have none."""
    findings, notes = [], []
    keys = keys_by_name(metadata)
    without: dict[int, list[str]] = {}
    for group in range(len(metadata.groups)):
        members = [name for name, saved in metadata.parameters.items() if saved.group == group]
        members = [name for name in members if (name, MASTER) in metadata.tensors]  # the others are found already
        held = {name: keys.get(name, frozenset()) | _scalars(metadata, name) for name in members}
        every = frozenset().union(*held.values())
        if members and not every and keys:
            notes.append(Finding(NO_STATE, f"param group {group} has no optimizer states: {listed(members)}"))
        lacking = {name: every - have for name, have in held.items() if every - have}
        if metadata.source.zero_stage == 0 and metadata.source.format == "native":
            without[group] = [name for name, lost in lacking.items() if lost == every]
            lacking = {name: lost for name, lost in lacking.items() if lost != every}
        for name, lost in lacking.items():
            message = f"no {', '.join(sorted(lost))} of this parameter, but of others in its param group"
            findings.append(Finding(NO_STATE, message, metadata.source.folder, name))
    stateless = [name for names in without.values() for name in names]
    if stateless:
        message = f"no optimizer states, as of parameters that got no gradient: {listed(stateless)}"
        notes.append(Finding(NO_STATE, message))
    return findings, notes


def _scalars(metadata: CheckpointMetadata, name: str) -> frozenset[str]:
    return frozenset(key for key, _ in metadata.parameters[name].scalars)

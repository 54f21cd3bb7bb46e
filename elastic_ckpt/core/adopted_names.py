"""Gives a checkpoint the names of another side where wrappers alone tell them apart (``core/wrappers.py``)."""

from __future__ import annotations

from collections.abc import Collection

from elastic_ckpt.core.fqn import with_names
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.wrappers import wrapped_otherwise


def all_names(metadata: CheckpointMetadata) -> frozenset[str]:
    """Every FQN of a checkpoint, those of ties and extra states too."""
    tensors = (name for name, _ in metadata.tensors)
    return frozenset({*metadata.parameters, *tensors, *metadata.aliases, *metadata.extra_states})


def adopt_names(metadata: CheckpointMetadata, names: Collection[str], other_side: str = "here") -> CheckpointMetadata:
    """Rename what another side has under the same name but for wrappers; a note says what.

    Args:
        names: all FQNs of the other side, those of ties, buffers and extra states too.
        other_side: what the note calls it.
    """
    renamed = wrapped_otherwise(all_names(metadata), names)
    if not renamed:
        return metadata
    old, new = min(renamed.items())
    wrapped = f"wrapped otherwise: {counted(len(renamed), 'name')} of the checkpoint"
    note = f"{wrapped}, as {old}, which is {new} {other_side}"
    return with_names(metadata, lambda name: renamed.get(name, name), [note])

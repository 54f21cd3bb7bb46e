"""Whether the optimizer states of a checkpoint are understood and all there, whatever the live engine is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import DamagedError, UnsupportedError, listed


def refuse_opaque(metadata: CheckpointMetadata) -> None:
    """Refuse states that are damaged, or of a layout that cannot be cut.

    Raises:
        DamagedError, UnsupportedError: naming the first one.
    """
    for key, description in metadata.states.damaged.items():
        raise DamagedError(
            f"optimizer state {key!r} does not have the scales that its 8-bit codes need",
            parameter=key,
            file=metadata.source.folder,
            expected="one scale for each block of 256 or 2048 elements",
            found=description,
            remedy="restore the files from their original, take another tag, or load with load_optimizer_states=False",
        )
    for key, description in metadata.states.opaque.items():
        raise UnsupportedError(
            f"optimizer state {key!r} has a layout that cannot be cut for another topology",
            parameter=key,
            file=metadata.source.folder,
            expected="one value per element of the partition, one per tensor, or a tensor that all ranks share",
            found=description,
            remedy=(
                f'if you know what it is: "elastic_checkpoint": {{"state_schema": {{"{key}": "elementwise" (or '
                '"replicated", "fresh")}}; else load at the topology it was saved with, or with '
                "load_optimizer_states=False"
            ),
        )


def keys_by_name(metadata: CheckpointMetadata) -> dict[str, frozenset[str]]:
    """Tensor states by parameter, for those that have any state."""
    keys: dict[str, set[str]] = {name: set() for name, saved in metadata.parameters.items() if saved.scalars}
    state_keys = set(metadata.state_keys)
    for name, key in metadata.tensors:
        if key in state_keys:
            keys.setdefault(name, set()).add(key)
    return {name: frozenset(found) for name, found in keys.items()}


def refuse_partial(metadata: CheckpointMetadata, stateful: Mapping[str, frozenset[str]]) -> None:
    """A partitioned optimizer keeps states for all members of a group or for none: anything else is a loss."""
    if metadata.source.zero_stage == 0:
        return
    with_state = {metadata.parameters[name].group for name in stateful if name in metadata.parameters}
    for name, saved in metadata.parameters.items():
        if saved.group in with_state and name not in stateful:
            raise DamagedError(
                "the checkpoint holds no optimizer state of this parameter, but of others in its param group",
                parameter=name,
                file=metadata.source.folder,
                expected=f"{listed(metadata.state_keys)} and step",
                found="none",
                remedy="restore the missing files, or load with load_optimizer_states=False",
            )

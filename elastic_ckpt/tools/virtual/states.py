"""The optimizer states that a job would keep which resumes with the optimizer that saved a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.core.metadata import CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.state_kinds import BLOCK_NUMELS, NON_SHARD_KEYS, REPLICATED, WHOLE, BlockFormat, LiveState
from elastic_ckpt.planning.saved_state_checks import keys_by_name


class SavedStates:
    """The states of a checkpoint, as those of live flat partitions.

    Args:
        metadata: what the checkpoint holds.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._catalog = metadata
        self._keys = keys_by_name(metadata)

    def of(self, members: Sequence[str], is_partitioned: bool) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat partition; ``None``: a state that no partition can have, which is refused.

        Tables that bitsandbytes makes by itself are left out.

        Args:
            members: its parameters.
            is_partitioned: whether ZeRO cuts it.
        """
        found: dict[str, LiveState] = {}
        for name in members:
            for key in sorted(self._keys.get(name, ())):
                tensor = self._catalog.tensors[name, key]
                if tensor.is_whole and (is_partitioned or len(members) > 1):
                    return None
                live = self._live(name, key, tensor)
                # of small partitions bitsandbytes keeps plain states
                if key not in found or (live.blocks is not None and found[key].blocks is None):
                    found[key] = live
            for state in self._catalog.parameters[name].replicated if name in self._catalog.parameters else ():
                if state.key not in NON_SHARD_KEYS:
                    found[state.key] = LiveState(state.key, state.dtype, REPLICATED, shape=state.shape)
        return tuple(found[key] for key in sorted(found))

    def _live(self, name: str, key: str, tensor: TensorMetadata) -> LiveState:
        if tensor.is_whole:
            return LiveState(key, tensor.dtype, WHOLE, shape=tensor.shape)
        rows = 1 if len(tensor.shape) == len(self._catalog.parameters[name].shape) else tensor.shape[0]
        saved = next((chunk.code.format for chunk in tensor.chunks if chunk.code is not None), None)
        # whatever the version that saved it, today's cuts blocks of the smaller size
        blocks = None if saved is None else BlockFormat(min(BLOCK_NUMELS), saved.scales, saved.codebook)
        return LiveState(key, tensor.dtype, rows=rows, blocks=blocks)

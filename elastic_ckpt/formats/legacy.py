"""Shards saved with the legacy ``zero_optimization.elastic_checkpoint``: refused, naming the elements that are lost.

``DeepSpeedZeroOptimizer._get_state_without_padding`` (stage_1_and_2.py) cuts as many elements off every state tensor as
the partition has padding, quantization maps and scales included, and leaves out all hyperparameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.pickled import PickledFile, TensorRef


@dataclass(frozen=True)
class LegacyShard:
    """One such file, and the tensors in it that have lost elements, in words."""

    path: str
    lost: tuple[str, ...]


def is_legacy_with_step(file: PickledFile) -> bool:
    """Whether an optimizer-states file is such a shard, of an optimizer that keeps its step in the param groups.

    DeepSpeed's own loader restores no others (``_restore_step_from_elastic_checkpoint`` asserts that entry).
    """
    state = file.tree.get("optimizer_state_dict") if isinstance(file.tree, Mapping) else None
    if not isinstance(state, Mapping):
        return False
    return isinstance(state.get("base_optimizer_state"), list) and "base_optimizer_state_step" in state


def index_legacy(file: PickledFile, base: Sequence[Mapping[str, Any]]) -> LegacyShard:
    """See what one file has lost; ``base`` is its optimizer state, by param group."""
    masters = file.section("optimizer_state_dict", "single_partition_of_fp32_groups")
    paddings = file.section("optimizer_state_dict", "group_paddings")
    lost = [
        f"{key} of param group {group}: {padding} of {ref.numel + padding} elements"
        for group, (states, master, padding) in enumerate(zip(base, masters, paddings, strict=False))
        for key, ref in states.items()
        # a state as long as the masters, which have no padding either, has lost its padding alone
        if padding and isinstance(ref, TensorRef) and ref.shape and ref.numel != master.numel
    ]
    return LegacyShard(file.path, tuple(lost))


def refuse_legacy(shards: Sequence[LegacyShard], with_states: bool) -> None:
    """Refuse the files of a checkpoint, naming the one that has lost something, if any.

    Args:
        shards: those of its files that are legacy ones.
        with_states: whether optimizer states are to be restored.

    Raises:
        DamagedError: states are to be restored, and elements of them are lost; DeepSpeed itself fills in zeros.
        UnsupportedError: there is such a file.
    """
    for shard in sorted(shards, key=lambda shard: not shard.lost):
        error = DamagedError if shard.lost and with_states else UnsupportedError
        raise error(
            "this checkpoint was saved with the legacy zero_optimization.elastic_checkpoint, which loses states",
            file=shard.path,
            expected='"zero_optimization": {"elastic_checkpoint": false} at save time',
            found=f"lost: {'; '.join(shard.lost) or 'the hyperparameters of all param groups'}",
            remedy="load_optimizer_states=False; or resume it where it was saved and save again without that option",
        )

"""Native ZeRO-1 and ZeRO-2 optimizer shards.

Source: ``DeepSpeedZeroOptimizer.state_dict`` (stage_1_and_2.py). Every param group is one flat buffer in equal
partitions. Its order is that of ``param_shapes`` in the model-states file, which DeepSpeed writes from
``round_robin_bit16_groups``: the true order, even with ``round_robin_gradients``, where ``param_slice_mappings`` is
wrong and so never used.

``BF16_Optimizer`` (ZeRO-1 with fp32 gradient accumulation) writes the same entries (bf16_optimizer.py), without
``zero_stage``, and its masters with the padding of the last partition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.chunks import PartitionRule, group_rules
from elastic_ckpt.core.flat_ranges import group_offsets
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import sort_states
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, build_shard, flat_ref, other_save_than_model
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef


def index_zero12(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard | LegacyShard:
    """Read one ZeRO-1/2 optimizer-states file.

    Raises:
        DamagedError: entries are missing or of another kind.
        UnsupportedError: it is of DeepSpeed before 0.6.2.
    """
    state = file.section("optimizer_state_dict")
    _refuse_old(file, "local_sub_partitions_of_fp32_groups" in state, "param_shapes" in file.tree)
    base = file.section("optimizer_state_dict", "base_optimizer_state")
    if not isinstance(base, Mapping):
        return index_legacy(file, base)
    masters = file.section("optimizer_state_dict", "single_partition_of_fp32_groups")
    # BF16_Optimizer saves its partitions with the padding, and called the entry "groups_padding" until 0.7.0
    in_masters = "zero_stage" not in state
    paddings = [0] * len(masters) if in_masters else file.section("optimizer_state_dict", "group_paddings")
    alignments = state.get("param_alignment_paddings") or [None] * len(masters)
    flats = []
    for index, master in enumerate(masters):
        ref = flat_ref(file, f"fp32 partition of param group {index}", master)
        states = sort_states(file, base["state"].get(index, {}), options)
        alignment = None if alignments[index] is None else tuple(alignments[index])
        flats.append(FlatShard(ref, ref.numel + int(paddings[index]), states, alignment))
    stage = int(state.get("zero_stage", 1))
    return build_shard(file, dp_rank, stage, flats, base["param_groups"], list(range(len(masters))))


def _refuse_old(file: PickledFile, in_sub_partitions: bool, has_shapes: bool) -> None:
    """ZeRO of DeepSpeed before 0.6.2: parameters without groups or paddings, and in 0.3 in another order."""
    if in_sub_partitions or has_shapes:
        version = "0.3 (and gpt-neox's DeeperSpeed 0.3.15)" if in_sub_partitions else "before 0.6.2"
        signs = ["local_sub_partitions_of_fp32_groups"] * in_sub_partitions + ["param_shapes"] * has_shapes
        raise UnsupportedError(
            f"optimizer states of DeepSpeed {version} are not supported: where each parameter lies is not said in them",
            file=file.path,
            expected="files of DeepSpeed 0.6.2 or later",
            found=", ".join(signs),
            remedy="resume it once with the code that wrote it, on a DeepSpeed of 0.6.2 or later, and save it there",
        )


def rules_zero12(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a param group's parameters are partitioned; :class:`DamagedError` if they do not fit.

    ``shards`` are of all ranks, with partitions of one size.
    """
    numels = [math.prod(shape) for _, shape in model.param_shapes[flat]]
    partition_numel, paddings = shards[0].flats[flat].partition_numel, shards[0].flats[flat].alignment_paddings
    if paddings is not None and len(paddings) != len(numels):
        problem = f"param_alignment_paddings of param group {flat} does not have one entry a parameter"
        expected = f"{len(numels)} entries, as many as parameters in {model.path}"
        raise other_save_than_model(shards[0], problem, expected, len(paddings))
    offsets = group_offsets(numels, paddings)
    needed = offsets[-1] + numels[-1] if numels else 0
    if needed > partition_numel * len(shards):
        problem = f"the partitions of param group {flat} are too small for its parameters"
        expected = f"at least {needed} elements over {len(shards)} partitions, from {model.path}"
        raise other_save_than_model(shards[0], problem, expected, f"{len(shards)} x {partition_numel}")
    for rank, shard in enumerate(shards):
        least, found = min(needed - rank * partition_numel, partition_numel), shard.flats[flat].master.numel
        if found < least:
            problem = f"the fp32 partition of param group {flat} is too small for its parameters"
            raise other_save_than_model(shard, problem, f"at least {least} elements, from {model.path}", found)
    return group_rules(numels, offsets, partition_numel)


@dataclass(frozen=True)
class LegacyShard:
    """A file saved with the legacy ``zero_optimization.elastic_checkpoint``, and what its tensors have lost, in words.

    ``_get_state_without_padding`` (stage_1_and_2.py) removes as many elements from every state tensor as the partition
    has padding, quantization maps and scales included, and leaves out all hyperparameters.
    """

    path: str
    lost: tuple[str, ...]


def is_legacy_with_step(file: PickledFile) -> bool:
    """Whether an optimizer-states file is a legacy shard of an optimizer that keeps its step in the param groups.

    DeepSpeed's own loader restores no others (``_restore_step_from_elastic_checkpoint`` asserts that entry).
    """
    state = file.tree.get("optimizer_state_dict") if isinstance(file.tree, Mapping) else None
    if not isinstance(state, Mapping):
        return False
    return isinstance(state.get("base_optimizer_state"), list) and "base_optimizer_state_step" in state


def index_legacy(file: PickledFile, base: Sequence[Mapping[str, Any]]) -> LegacyShard:
    """What one file has lost; ``base`` is its optimizer state, by param group."""
    masters = file.section("optimizer_state_dict", "single_partition_of_fp32_groups")
    paddings = file.section("optimizer_state_dict", "group_paddings")
    lost = [
        f"{key} of param group {group}: {padding} of {ref.numel + padding} elements"
        for group, (states, master, padding) in enumerate(zip(base, masters, paddings, strict=False))
        for key, ref in states.items()
        # a state as long as the masters, which have no padding either, has lost only padding
        if padding and isinstance(ref, TensorRef) and ref.shape and ref.numel != master.numel
    ]
    return LegacyShard(file.path, tuple(lost))


def refuse_legacy(shards: Sequence[LegacyShard], with_states: bool) -> None:
    """Refuse a checkpoint with such files, naming one that has lost something, if any.

    Raises:
        DamagedError: states are to be restored, and elements of them are lost; DeepSpeed itself fills in zeros.
        UnsupportedError: no elements are lost, or states are not to be restored.
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

"""Native ZeRO-1 and ZeRO-2 optimizer shards.

Source of the layout: ``DeepSpeedZeroOptimizer.state_dict`` (stage_1_and_2.py). Every param group is one flat
buffer, cut into equal partitions. Its order is that of ``param_shapes`` in the model-states file, which DeepSpeed
writes from ``round_robin_bit16_groups``: the true order, with ``round_robin_gradients`` too, where
``param_slice_mappings`` is wrong. So those mappings are never used.

``BF16_Optimizer`` (ZeRO-1 with fp32 gradient accumulation) writes the same entries (bf16_optimizer.py), without
``zero_stage``, and its masters with the padding of the last partition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastic_ckpt.core.flat_ranges import Placement, contiguous_partition, group_offsets
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.legacy import LegacyShard, index_legacy
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import sort_states
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, build_shard, flat_ref, other_save_than_model


def index_zero12(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard | LegacyShard:
    """Sort out one ZeRO-1/2 optimizer-states file.

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


def place_zero12(model: ModelShard, shard: OptimizerShard, flat: int, dp: int) -> Sequence[Placement]:
    """Where the parameters of one flat partition are in it, in flat order.

    Raises:
        DamagedError: the partitions cannot hold the parameters that the model-states file lists.
    """
    numels = [math.prod(shape) for _, shape in model.param_shapes[flat]]
    partition_numel, paddings = shard.flats[flat].partition_numel, shard.flats[flat].alignment_paddings
    if paddings is not None and len(paddings) != len(numels):
        problem = f"param_alignment_paddings of param group {flat} does not have one entry a parameter"
        expected = f"{len(numels)} entries, as many as parameters in {model.path}"
        raise other_save_than_model(shard, problem, expected, len(paddings))
    offsets = group_offsets(numels, paddings)
    needed = offsets[-1] + numels[-1] if numels else 0
    if needed > partition_numel * dp:
        problem = f"the partitions of param group {flat} are too small for its parameters"
        expected = f"at least {needed} elements over {dp} partitions, from {model.path}"
        raise other_save_than_model(shard, problem, expected, f"{dp} x {partition_numel}")
    return list(contiguous_partition(numels, offsets, partition_numel, shard.dp_rank))

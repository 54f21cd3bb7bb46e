"""Native ZeRO-3 optimizer shards.

Source: ``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (stage3.py). Every parameter is partitioned on its own into
``ceil(numel / world)`` elements per rank; a sub-group's flat tensor has the partitions of its parameters one after the
other. ``param_shapes`` in the model-states file lists the parameters of each sub-group. On NVMe, a sub-group's data is
in files of its own (:mod:`elastic_ckpt.formats.swapped`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_ckpt.core.chunks import PartitionRule, parameter_rules
from elastic_ckpt.core.flat_ranges import per_parameter_numel
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import sort_states
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, build_shard, flat_ref, other_save_than_model
from elastic_ckpt.formats.swapped import check_swap_file, refuse_unnamed_swap_files, swap_files

#: Sequence-parallel degrees to try if the saved config states none (``mesh_param`` leaves no trace).
_OTHER_DEGREES = range(2, 65)


def index_zero3(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard:
    """Read one ZeRO-3 optimizer-states file.

    Raises:
        UnsupportedError: partitioned over groups smaller than the data-parallel one (mixture of experts).
        DamagedError: entries are missing or of another kind.
    """
    state = file.section("optimizer_state_dict")
    if state.get("ds_zero_partition_groups"):
        raise UnsupportedError(
            "this checkpoint's parameters are partitioned over several process groups (AutoEP)",
            file=file.path,
            remedy="resume it at the topology it was saved with",
        )
    masters = file.section("optimizer_state_dict", "fp32_flat_groups")
    base = file.section("optimizer_state_dict", "optimizer_state_dict")
    flat_groups = [-1] * len(masters)
    for number, group in enumerate(base["param_groups"]):
        for index in group["params"]:
            flat_groups[index] = number
    flats = []
    for index, master in enumerate(masters):
        ref = flat_ref(file, f"fp32 partition of sub-group {index}", master)
        state = base["state"].get(index, {})
        swapped = swap_files(file, dp_rank, ref, state)
        kept = {key: value for key, value in state.items() if key not in swapped}
        states = sort_states(file, kept, options)
        flats.append(FlatShard(ref, -1 if swapped else ref.numel, states, swapped=swapped))
    if not any(flat.swapped for flat in flats):
        refuse_unnamed_swap_files(file, dp_rank)
    return build_shard(file, dp_rank, 3, flats, base["param_groups"], flat_groups)


def rules_zero3(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a sub-group's parameters are partitioned; :class:`DamagedError` on other sizes.

    ``shards`` are of all ranks, with partitions of one size.
    """
    numels, dp = [math.prod(shape) for _, shape in model.param_shapes[flat]], len(shards)
    first, part = shards[0], shards[0].flats[flat]
    # a run may have "align_partitions" in its config without having installed elastic_ckpt
    candidates = [[per_parameter_numel(n, dp, multiple) for n in numels] for multiple in {model.alignment: 0, 1: 0}]
    steps = candidates[0] if part.swapped else next((c for c in candidates if sum(c) == part.partition_numel), None)
    for shard in shards:
        for source in shard.flats[flat].swapped.values():
            check_swap_file(source, sum(candidates[0]))
    if steps is None:
        partitions = _partitions_of_mesh(model, part.partition_numel, numels, dp)
        if partitions is not None:
            raise DamagedError(
                f"DeepSpeed saved {dp} of {partitions} ZeRO-3 partitions: with a device mesh for sequence parallelism "
                "it cuts the model over data- and sequence-parallel ranks and names files by the data-parallel rank "
                "alone, so that ranks of one sequence-parallel group overwrite each other's. The rest is nowhere, and "
                "nothing can bring it back; DeepSpeed's own loader takes it without a word and puts wrong values into "
                "the model",
                file=first.path,
                expected=f"{partitions} optimizer-states files, one for each partition, by the sizes in {model.path}",
                found=dp,
                remedy=(
                    "take a checkpoint of another run. Saves are complete with "
                    "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead of a mesh"
                ),
            )
        problem = f"sub-group {flat} does not have the size that its parameters need"
        expected = f"{sum(candidates[0])} elements for {len(numels)} parameters over {dp} ranks, from {model.path}"
        raise other_save_than_model(first, problem, expected, part.partition_numel)
    return parameter_rules(numels, steps)


def _partitions_of_mesh(model: ModelShard, partition_numel: int, numels: Sequence[int], dp: int) -> int | None:
    """How many partitions there were, if each sequence-parallel rank had its own and ``dp`` files were written."""
    stated = [model.stated.sequence] if model.stated.sequence is not None else list(_OTHER_DEGREES)
    for count in (degree * dp for degree in stated if degree > 1):
        if sum(per_parameter_numel(numel, count, model.alignment) for numel in numels) == partition_numel:
            return count
    return None

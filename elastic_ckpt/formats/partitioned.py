"""Native checkpoints of ZeRO-1, 2 and 3: where each parameter is in the partitions of all ranks.

ZeRO-1 and 2 (``DeepSpeedZeroOptimizer.state_dict``, stage_1_and_2.py): every param group is one flat buffer in equal
partitions, in the order of ``param_shapes`` in the model-states file: the true one, even with
``round_robin_gradients``, where ``param_slice_mappings`` is wrong and never used. ``BF16_Optimizer`` (ZeRO-1 with fp32
gradient accumulation) writes the same entries without ``zero_stage``, and its masters with the padding at the end.

ZeRO-3 (``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict``, stage3.py): every parameter is partitioned on its own into
``ceil(numel / world)`` elements per rank; a sub-group's flat tensor has the partitions of its parameters one after the
other. On NVMe, a sub-group's data is in files of its own (:mod:`elastic_ckpt.formats.shards`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from elastic_ckpt.core.chunks import PartitionRule, group_rules, parameter_rules
from elastic_ckpt.core.flat_ranges import group_offsets, per_parameter_numel
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.experts import divisions
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, module_tensors
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_states import RankStates, merged_groups
from elastic_ckpt.formats.shards import (
    OptimizerShard,
    check_swap_file,
    other_save_than_model,
)

#: Sequence-parallel degrees to try if the saved config states none (``mesh_param`` leaves no trace).
_OTHER_DEGREES = range(2, 65)


def partitioned_metadata(
    found: CheckpointInfo,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    own: int | None,
    options: StateOptions,
    numbers: Iterable[int],
) -> CheckpointMetadata:
    """The metadata of one model-parallel rank whose optimizer states are partitioned; files are in rank order.

    ``own`` is this rank's model-states file if each takes buffers from its own; ``numbers`` the flat tensors to add.
    """
    first, before = optimizers[0], len(models)
    states = ((shard.path, flat.states) for shard in optimizers for flat in shard.flats)
    builder = MetadataBuilder(found, [*models, *optimizers], options, states)
    for number in numbers:  # a param group of ZeRO-1/2, or a sub-group of ZeRO-3
        for division in divisions(models[0], optimizers, number):
            ranks = division.ranks
            shards = [optimizers[rank] for rank in ranks]
            flats = [shard.flats[number] for shard in shards]
            rules = (rules_zero3 if first.zero_stage == 3 else rules_zero12)(models[0], shards, number)
            saved = [
                RankStates(shard.path, flat.partition_numel, touched, flat.states.tensors, flat.states.digests)
                for shard, flat, touched in zip(shards, flats, _touched_numels(rules, len(shards)), strict=True)
            ]
            kinds = builder.classify(saved, [flat.states for flat in flats])
            group, files = shards[0].flat_groups[number], range(before + ranks.start, before + ranks.stop, ranks.step)
            hyperparameters = shards[0].groups[group] if shards[0].groups else {}
            builder.add_flat(division.shapes, rules, group, hyperparameters, flats, files, kinds, division.stacked)
    of_module, notes = module_tensors(models, own or 0, builder.parameters)
    builder.tensors.add(of_module)
    builder.notes += notes
    recorded = models[own or 0].frozen_recorded
    groups = merged_groups((range(at, at + 1), each.groups) for at, each in enumerate(optimizers, start=before))
    metadata = builder.build(models[0], first.zero_stage, groups, frozen_recorded=recorded)
    return replace(metadata, buffers_of_this_rank=own is not None)


def _touched_numels(rules: Sequence[PartitionRule], ranks: int) -> Iterator[int]:
    """Per rank, the elements of all parameters of which it has some, with those that other ranks have."""
    changes = [0] * (ranks + 1)
    for rule in rules:
        if rule.numel:
            changes[rule.ranks.start] += rule.numel
            changes[rule.ranks.stop] -= rule.numel
    return accumulate(changes[:ranks])


def rules_zero12(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a param group's parameters are partitioned; :class:`DamagedError` if they do not fit.

    ``shards`` are of all ranks, with partitions of one size.
    """
    numels = [math.prod(shape) for _, shape in model.param_shapes[flat]]
    partition_numel, paddings = shards[0].flats[flat].partition_numel, shards[0].flats[flat].alignment_paddings
    if paddings is not None and len(paddings) != len(numels):
        problem = f"param_alignment_paddings of param group {flat} does not have one entry a parameter"
        raise other_save_than_model(shards[0], problem, f"{len(numels)}, from {model.path}", len(paddings))
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


def rules_zero3(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a sub-group's parameters are partitioned; :class:`DamagedError` on other sizes.

    ``shards`` are of all ranks, with partitions of one size.
    """
    numels, dp = [math.prod(shape) for _, shape in model.param_shapes[flat]], len(shards)
    first, part = shards[0], shards[0].flats[flat]
    # the padding that a checkpoint declares, or none: a run may state an option without having installed elastic_ckpt
    candidates = [[per_parameter_numel(n, dp, multiple) for n in numels] for multiple in {model.alignment: 0, 1: 0}]
    steps = candidates[0] if part.swapped else next((c for c in candidates if sum(c) == part.partition_numel), None)
    for shard in shards:
        for source in shard.flats[flat].swapped.values():
            check_swap_file(source, sum(candidates[0]))
    if steps is None:
        # whether each sequence-parallel rank had its own partition, and only these files were written
        degrees = [model.stated.sequence] if model.stated.sequence is not None else _OTHER_DEGREES
        for count in (degree * dp for degree in degrees if degree > 1):
            if sum(per_parameter_numel(numel, count, model.alignment) for numel in numels) == part.partition_numel:
                raise DamagedError(
                    f"DeepSpeed saved {dp} of {count} ZeRO-3 partitions: with a device mesh, ranks of one sequence-"
                    "parallel group overwrite each other's files. The rest is lost, and DeepSpeed loads it silently",
                    first.path,
                    f"{count} optimizer-states files, one for each partition, by the sizes in {model.path}",
                    dp,
                    remedy="take a checkpoint of another run; with mpu=deepspeed.runtime.sequence_parallel."
                    "parallel_state_sp instead of a mesh, saves are complete",
                )
        problem = f"sub-group {flat} does not have the size that its parameters need"
        expected = f"{sum(candidates[0])} elements for {len(numels)} parameters over {dp} ranks, from {model.path}"
        raise other_save_than_model(first, problem, expected, part.partition_numel)
    return parameter_rules(numels, steps)

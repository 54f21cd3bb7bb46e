"""Native checkpoints of ZeRO-1, 2 and 3: where each parameter is in the partitions of all ranks.

At ZeRO-1 and 2, masters and states of experts are in the files of the ranks that hold them, by the names in their
module.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from elastic_ckpt.core.chunks import PartitionRule, group_rules, parameter_rules
from elastic_ckpt.core.counts import MOST_DIGITS, first_apart
from elastic_ckpt.core.flat_ranges import group_offsets, per_parameter_numel
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, LayoutError, MissingFilesError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.classification import RankStates, compare_lengths
from elastic_ckpt.formats.merging import ExpertShard, with_module_files
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Shapes, module_tensors
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_states import merged_groups
from elastic_ckpt.formats.shards import OptimizerShard, check_swap_file, other_save_than_model

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
    first = optimizers[0]
    before = len(models)
    flats = ((shard.path, flat) for shard in optimizers for flat in shard.flats)
    partitions = [RankStates(path, (flat.partition_numel,), -1, flat.states) for path, flat in flats]
    states = ((each.path, each.states) for each in partitions)
    builder = MetadataBuilder(found, [*models, *optimizers], options, states, compare_lengths(partitions))
    for number in numbers:  # a param group of ZeRO-1/2, or a sub-group of ZeRO-3
        for divided in partition_groups(models[0], optimizers, number):
            ranks = divided.ranks
            shards = [optimizers[rank] for rank in ranks]
            of_ranks = [shard.flats[number] for shard in shards]
            rules = (_rules_zero3 if first.zero_stage == 3 else _rules_zero12)(models[0], shards, number)
            group = shards[0].flat_groups[number]
            files = range(before + ranks.start, before + ranks.stop, ranks.step)
            hyperparameters = shards[0].groups[group] if shards[0].groups else {}
            builder.add_flat(divided.shapes, rules, group, hyperparameters, of_ranks, files, divided.stacked)
    of_module, notes = module_tensors(models, own, builder.parameters)
    builder.tensors.add(of_module)
    builder.notes += notes
    recorded = models[own or 0].frozen_recorded
    groups = merged_groups((range(at, at + 1), each.groups) for at, each in enumerate(optimizers, start=before))
    metadata = builder.build(models[0], first.zero_stage, groups, frozen_recorded=recorded)
    return replace(metadata, buffers_of_this_rank=own is not None)


def _rules_zero12(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a param group's parameters are partitioned; ``shards`` are of all ranks, with partitions of one size."""
    numels = [math.prod(shape) for _, shape in model.param_shapes[flat]]
    partition_numel = shards[0].flats[flat].partition_numel
    paddings = shards[0].flats[flat].alignment_paddings
    if paddings is not None and len(paddings) != len(numels):
        problem = f"param_alignment_paddings of param group {flat} does not have one entry a parameter"
        raise other_save_than_model(shards[0], problem, f"{len(numels)}, from {model.path}", len(paddings))
    offsets = group_offsets(numels, paddings)
    needed = offsets[-1] + numels[-1] if numels else 0
    if needed > partition_numel * len(shards):
        problem = f"the partitions of param group {flat} are too small for its parameters"
        expected = f"at least {needed} elements over {counted(len(shards), 'partition')}, from {model.path}"
        raise other_save_than_model(shards[0], problem, expected, f"{len(shards)} x {partition_numel}")
    for rank, shard in enumerate(shards):
        least = min(needed - rank * partition_numel, partition_numel)
        found = shard.flats[flat].master.numel
        if found < least:
            problem = f"the fp32 partition of param group {flat} is too small for its parameters"
            raise other_save_than_model(shard, problem, f"at least {least} elements, from {model.path}", found)
    return group_rules(numels, offsets, partition_numel)


def _rules_zero3(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> list[PartitionRule]:
    """How a sub-group's parameters are partitioned; ``shards`` are of all ranks, with partitions of one size."""
    numels = [math.prod(shape) for _, shape in model.param_shapes[flat]]
    degree = len(shards)
    first = shards[0]
    part = shards[0].flats[flat]
    # the padding that a checkpoint declares, or none: a run may state an option without having installed elastic_ckpt
    candidates = [[per_parameter_numel(n, degree, multiple) for n in numels] for multiple in {model.alignment: 0, 1: 0}]
    steps = candidates[0] if part.swapped else next((c for c in candidates if sum(c) == part.partition_numel), None)
    for shard in shards:
        for source in shard.flats[flat].swapped.values():
            check_swap_file(source, sum(candidates[0]))
    if steps is None:
        # whether each sequence-parallel rank had its own partition, and only these files were written
        degrees = [model.stated.sequence] if model.stated.sequence is not None else _OTHER_DEGREES
        for count in (sequence * degree for sequence in degrees if sequence > 1):
            if sum(per_parameter_numel(numel, count, model.alignment) for numel in numels) == part.partition_numel:
                problem = f"DeepSpeed saved {degree} of {count} ZeRO-3 partitions: with a device mesh, ranks of one "
                problem += "sequence-parallel group overwrite each other's files. The rest is lost, and DeepSpeed "
                expected = (
                    f"{counted(count, 'optimizer-states file')}, one for each partition, by the sizes in {model.path}"
                )
                remedy = "take a checkpoint of another run; with mpu=deepspeed.runtime.sequence_parallel."
                remedy += "parallel_state_sp instead of a mesh, saves are complete"
                raise DamagedError(f"{problem}loads it silently", first.path, expected, degree, remedy=remedy)
        problem = f"sub-group {flat} does not have the size that its parameters need"
        over = f"{counted(len(numels), 'parameter')} over {counted(degree, 'rank')}"
        expected = f"{sum(candidates[0])} elements for {over}, from {model.path}"
        raise other_save_than_model(first, problem, expected, part.partition_numel)
    return parameter_rules(numels, steps)


class PartitionGroup(NamedTuple):
    """FQNs and shapes of parameters of a flat tensor, in flat order, and the data-parallel ranks that divide it."""

    shapes: Shapes
    ranks: range
    stacked: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # stacked parameters -> the experts on these ranks


def is_across(model: ModelShard, shards: Sequence[OptimizerShard], flat: int, tp: int) -> bool:
    """Whether a flat tensor's experts are on all ``tp`` tensor-parallel ranks, unsliced, as AutoEP's always are."""
    if tp == 1 or any(name in model.stacked for name, _ in model.param_shapes[flat]):
        return tp > 1
    groups = shards[0].groups
    number = shards[0].flat_groups[flat]
    ep = degree_in_name(groups[number]) if number < len(groups) else 0
    return ep * partitions_of(shards, flat) == len(shards) * tp


def degree_in_name(group: Mapping[str, object]) -> int:
    """The expert-parallel degree in the name of a param group of experts, ``ep_size_2``; 0 for any other group."""
    number = str(group.get("name")).removeprefix("ep_size_") if group.get("moe") else ""
    return int(number) if number.isdecimal() and len(number) <= MOST_DIGITS else 0


def partition_groups(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> Iterator[PartitionGroup]:
    """How ranks divide a flat tensor: all a dense one, those of one expert-parallel rank one of its experts.

    The model-states file, which rank 0 wrote, has the names of expert-parallel rank 0.
    """
    shapes = model.param_shapes[flat]
    partition_degree = len(shards)
    ep = degree_of(shards, flat)
    if ep == 1 and not any(name in model.stacked for name, _ in shapes):
        yield PartitionGroup(shapes, range(partition_degree))
        return
    local = _experts_of_a_rank(model.param_shapes)
    parts = [(expert_name(name), name, shape) for name, shape in shapes]
    for ep_rank in range(ep):
        ranks = range(ep_rank, partition_degree, ep)
        if shards[0].data_before_experts:
            ranks = range(partition_degree)[ep_rank * (partition_degree // ep) :][: partition_degree // ep]
        named = [(name if e is None else str(e.on(ep_rank, local[e.layer])), shape) for e, name, shape in parts]
        stacked = {name: model.stacked[name][ep_rank] for name, _ in shapes if name in model.stacked}
        yield PartitionGroup(named, ranks, stacked)


def parameters_on(rank: int, model: ModelShard, shard: OptimizerShard) -> Iterator[str]:
    """The dense parameters of which a data-parallel rank has elements, by the sizes in the file of another one."""
    for flat, shapes in zip(shard.flats, model.param_shapes, strict=False):  # which may be of two saves
        offsets = group_offsets([math.prod(shape) for _, shape in shapes], flat.alignment_paddings)
        for (name, shape), offset in zip(shapes, offsets, strict=True):
            rule = PartitionRule(math.prod(shape), flat.partition_numel or 1, offset)
            if expert_name(name) is None and (shard.zero_stage == 3 or rank in rule.ranks):
                yield name


def partitions_of(shards: Sequence[OptimizerShard], flat: int) -> int:
    """How many ranks divide a flat tensor among them."""
    counts = shards[0].partition_count
    return counts[flat] if flat < len(counts) else len(shards)


def degree_of(shards: Sequence[OptimizerShard], flat: int) -> int:
    """The expert-parallel degree of a flat tensor's parameters; 1 for dense ones."""
    return len(shards) // max(partitions_of(shards, flat), 1) or 1


@lru_cache(maxsize=1)  # asked for every flat tensor of a model
def _experts_of_a_rank(param_shapes: tuple[Shapes, ...]) -> dict[str, int]:
    """Path of each ``MoE`` layer -> the number of its experts on one expert-parallel rank."""
    numbers: dict[str, int] = {}
    for each in filter(None, (expert_name(name) for name, _ in chain.from_iterable(param_shapes))):
        numbers[each.layer] = max(numbers.get(each.layer, 0), each.number + 1)
    return numbers


def check_experts(
    found: CheckpointInfo,
    model: ModelShard,
    shards: Sequence[OptimizerShard],
    experts: Sequence[ExpertShard],
    mp: str = "00",
) -> None:
    """Raise :class:`LayoutError` unless each expert has one file, and one place in the optimizer's files."""
    counts = model.features.experts
    without_files = model.stacked and shards and shards[0].zero_stage == 3  # AutoEP has them in the shards alone
    present: dict[int, set[int]] = {}
    for each in experts:
        present.setdefault(each.layer, set()).add(each.expert)
    for layer in sorted({*range(len(counts)), *present}):
        count = counts[layer] if 0 <= layer < len(counts) and not without_files else 0
        expert = first_apart(count, present.get(layer, set()))
        if expert is not None:
            name = f"layer_{layer}_expert_{expert}_mp_rank_{mp}_model_states.pt"
            problem = f"the file of an expert is {'missing' if expert < count else 'one too many'}"
            wanted = f"experts of {counted(len(counts), 'layer')}, {list(counts)} of them, according to {model.path}"
            error = MissingFilesError if expert < count else LayoutError
            raise error(problem, found.path(name), wanted, f"{counted(len(experts), 'file')} of experts")
    names: dict[int, str] = {}
    for each in experts:
        if names.setdefault(each.layer, each.path_of_layer) != each.path_of_layer:
            problem = "files of one layer's experts name different layers: files of two saves are mixed"
            wanted = f"experts of {names[each.layer]}"
            parameter = next(iter(each.weights))
            raise LayoutError(problem, each.path, wanted, each.path_of_layer, parameter=parameter)
    if not shards:  # whose sizes alone tell
        return
    degrees: dict[str, int] = {}
    for flat, shapes in enumerate(model.param_shapes):
        ep = degree_of(shards, flat)
        for name, _ in shapes:
            parts = expert_name(name)
            placed = model.stacked.get(name)
            if parts is not None:
                degrees[parts.layer] = ep
            if placed is not None and len(placed) != ep:
                raise placed_otherwise(model, name, ep)
    local = _experts_of_a_rank(model.param_shapes)
    for number, path in names.items():
        if path in local and local[path] * degrees[path] != counts[number]:
            problem = "experts in the optimizer's files are not as many as the model's"
            have = f"{counted(local[path], 'expert')} on each of {counted(degrees[path], 'expert-parallel rank')}"
            raise LayoutError(problem, model.path, f"{counted(counts[number], 'expert')}", have, parameter=f"{path}*")


def placed_otherwise(model: ModelShard, name: str, ep: int) -> LayoutError:
    """The error for stacked experts that a model-states file places on another number of ranks than have states."""
    problem = "experts of AutoEP are not placed as their optimizer states are divided"
    wanted = f"{counted(ep, 'expert-parallel rank')}, from the optimizer-states files"
    found = f"experts on {counted(len(model.stacked[name]), 'rank')}"
    return LayoutError(problem, model.path, wanted, found, parameter=name)


def with_experts(metadata: CheckpointMetadata, experts: Sequence[ExpertShard], model: ModelShard) -> CheckpointMetadata:
    """``metadata`` extended by what the files of experts hold: buffers, and parameters that no optimizer owned."""
    buffers = {(e.layer, e.rest) for e in filter(None, map(expert_name, model.buffer_names))}
    parts = {name: expert_name(name) for each in experts for name in each.weights}
    of_buffers = {name for name, e in parts.items() if e is not None and (e.layer, e.rest) in buffers}
    return with_module_files(metadata, [(each, 0, each.weights) for each in experts], of_buffers.__contains__)

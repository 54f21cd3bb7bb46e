"""Metadata of ZeRO-1, 2 and 3: where each parameter is in the partitions of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from elastic_ckpt.core.chunks import PartitionRule
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.classify import RankStates
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, module_tensors
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.zero3 import rules_zero3
from elastic_ckpt.formats.zero12 import rules_zero12


def partitioned_metadata(
    found: Found,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    own: int | None,
    options: StateOptions,
) -> CheckpointMetadata:
    """The metadata of one model-parallel rank whose optimizer states are partitioned; files are in rank order.

    ``own`` is this rank's model-states file if each rank takes buffers from its own, ``None`` if all take the first's.
    """
    first = optimizers[0]
    files = [*models, *optimizers]
    states = ((shard.path, flat.states) for shard in optimizers for flat in shard.flats)
    builder = MetadataBuilder(found, files, options, states)
    for number in range(len(models[0].param_shapes)):
        _add_flat(builder, models[0], optimizers, number, first_file=len(models))
    of_module, notes = module_tensors(models, own or 0, builder.parameters)
    builder.tensors |= of_module
    builder.notes += notes
    recorded = models[own or 0].frozen_recorded
    metadata = builder.build(models[0], first.zero_stage, first.groups, frozen_recorded=recorded)
    return replace(metadata, buffers_of_this_rank=own is not None)


def _add_flat(
    builder: MetadataBuilder, model: ModelShard, shards: Sequence[OptimizerShard], number: int, first_file: int
) -> None:
    """Add one flat partition of all ranks: a param group of ZeRO-1/2, a sub-group of ZeRO-3."""
    shapes, first, flats = model.param_shapes[number], shards[0], [shard.flats[number] for shard in shards]
    rules = (rules_zero3 if first.zero_stage == 3 else rules_zero12)(model, shards, number)
    saved = [
        RankStates(shard.path, flat.partition_numel, touched, flat.states.tensors, flat.states.digests)
        for shard, flat, touched in zip(shards, flats, _touched_numels(rules, len(shards)), strict=True)
    ]
    kinds = builder.classify(saved, [flat.states for flat in flats])
    group = first.flat_groups[number]
    builder.add_flat(shapes, rules, group, first.groups[group] if first.groups else {}, flats, first_file, kinds)


def _touched_numels(rules: Sequence[PartitionRule], ranks: int) -> Iterator[int]:
    """Per rank, the elements of all parameters of which it has some, with those that other ranks have."""
    changes = [0] * (ranks + 1)
    for rule in rules:
        if rule.numel:
            changes[rule.ranks.start] += rule.numel
            changes[rule.ranks.stop] -= rule.numel
    return accumulate(changes[:ranks])

"""Metadata of ZeRO-1, 2 and 3: where each parameter is in the partitions of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.classify import RankStates
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, module_tensors
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.zero3 import place_zero3
from elastic_ckpt.formats.zero12 import place_zero12


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
    builder.tensors, notes = module_tensors(models, own or 0, builder.parameters)
    builder.notes += notes
    recorded = models[own or 0].frozen_recorded
    metadata = builder.build(models[0], first.zero_stage, first.groups, frozen_recorded=recorded)
    return replace(metadata, buffers_of_this_rank=own is not None)


def _add_flat(
    builder: MetadataBuilder, model: ModelShard, shards: Sequence[OptimizerShard], number: int, first_file: int
) -> None:
    """Add one flat partition of all ranks: a param group of ZeRO-1/2, a sub-group of ZeRO-3."""
    shapes, first, flats = model.param_shapes[number], shards[0], [shard.flats[number] for shard in shards]
    placed_by = place_zero3 if first.zero_stage == 3 else place_zero12
    placements = [placed_by(model, shard, number, len(shards)) for shard in shards]
    saved = []
    for shard, flat, placed in zip(shards, flats, placements, strict=True):
        touched = sum(math.prod(shapes[index][1]) for index in {placement.index for placement in placed})
        saved.append(RankStates(shard.path, flat.partition_numel, touched, flat.states.tensors, flat.states.digests))
    kinds = builder.classify(saved, [flat.states for flat in flats])
    group = first.flat_groups[number]
    files = (first_file + shard.dp_rank for shard in shards)
    ranks = list(zip(files, flats, placements, strict=True))
    builder.add_flat(shapes, group, first.groups[group] if first.groups else {}, ranks, kinds)

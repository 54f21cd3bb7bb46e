"""Buffers and frozen parameters: tensors that no optimizer owned, from model-states files -> logical tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from elastic_ckpt.core.flat_ranges import FlatRange, per_parameter_numel, per_parameter_partition
from elastic_ckpt.core.metadata import BUFFER, FROZEN, StorageChunk, TensorMetadata
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.pickled import TensorRef

Tensors = dict[tuple[str, str], TensorMetadata]


def module_tensors(models: Sequence[ModelShard], own: int, trained: frozenset[str]) -> tuple[Tensors, tuple[str, ...]]:
    """Logical tensors of buffers and frozen parameters.

    Args:
        models: all model-states files, in rank order, which is the order of the metadata's first files.
        own: the file to take buffers from: this rank's own where the topology is unchanged, else 0.
        trained: names that an optimizer owned.

    Returns:
        Tensors by (name, key), and notes for the report.
    """
    tensors: Tensors = {}
    notes = []
    source = models[own]
    for name in source.buffers:
        tensors[name, BUFFER] = _whole(source, name, BUFFER, source.weights[name], file=own)
    if own == 0 and len({shard.buffers_crc32 for shard in models}) > 1:
        notes.append("buffers differed between ranks when saved; after a change of topology all ranks get rank 0's")
    partitioned = dict(source.frozen_shapes) if len(models) > 1 or _is_zero3(source) else {}
    for name, shape in partitioned.items():
        if all(name in shard.frozen_fragments for shard in models):
            tensors[name, FROZEN] = _partitioned(models, name, shape)
    skipped = trained | set(source.buffers) | set(partitioned) | set(source.shared)
    if not _is_zero3(source):
        for name, ref in source.weights.items():
            if name not in skipped:
                tensors[name, FROZEN] = _whole(source, name, FROZEN, ref, file=0)
        for name, ref in _left_by_alias(source, skipped).items():
            tensors[name, FROZEN] = _whole(source, name, FROZEN, ref, file=0)
    return tensors, tuple(notes)


def _left_by_alias(shard: ModelShard, skipped: Set[str]) -> dict[str, TensorRef]:
    """Frozen weights of which a file has only a tied name: ``exclude_frozen_parameters`` removes the first alone."""
    return {
        target: shard.weights[alias]
        for alias, target in shard.shared.items()
        if alias in shard.weights and target not in shard.weights and target not in skipped
    }


def _is_zero3(shard: ModelShard) -> bool:
    return "zero_pp_rank_" in shard.path.rsplit("/", 1)[-1]


def _whole(shard: ModelShard, name: str, key: str, ref: TensorRef, file: int) -> TensorMetadata:
    if not ref.is_contiguous:
        raise UnsupportedError(
            f"this {key} was saved as a view that is not contiguous, which is not supported yet",
            parameter=name,
            file=shard.path,
            expected="a contiguous tensor",
            found=f"shape {ref.shape}, strides {ref.stride}",
            remedy="load at the topology it was saved with, or make it contiguous before saving",
        )
    chunks = (StorageChunk(FlatRange(0, ref.numel), file, ref.byte_offset),) if ref.numel else ()
    return TensorMetadata(name, key, ref.shape, ref.dtype, chunks)


def _partitioned(models: Sequence[ModelShard], name: str, shape: tuple[int, ...]) -> TensorMetadata:
    """ZeRO-3: each rank's file holds its padded slice of a frozen parameter."""
    numel = math.prod(shape)
    chunks = []
    dtype = models[0].frozen_fragments[name].dtype
    step = models[0].frozen_fragments[name].numel  # "align_partitions" may have made it longer than need be
    for rank, shard in enumerate(models):
        ref = shard.frozen_fragments[name]
        for placement in per_parameter_partition([numel], [max(step, per_parameter_numel(numel, len(models)))], rank):
            if placement.range.numel > ref.numel or ref.numel != step or ref.dtype != dtype:
                raise DamagedError(
                    "a rank's part of this frozen parameter has the wrong size or dtype",
                    parameter=name,
                    file=shard.path,
                    expected=f"{placement.range.numel} elements of {dtype}",
                    found=f"{ref.numel} of {ref.dtype}",
                    remedy="restore the folder from its original",
                )
            chunks.append(StorageChunk(placement.range, rank, ref.byte_offset))
    return TensorMetadata(name, FROZEN, shape, dtype, tuple(chunks))

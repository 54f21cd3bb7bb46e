"""Metadata of model-parallel ranks -> the metadata of all: shards side by side, pipeline stages one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata, ReplicatedState, SavedParameter, TensorMetadata
from elastic_ckpt.core.tp_rules import CannotSplit
from elastic_ckpt.errors import DamagedError, UnsupportedError


def merge_shards(all_metadata: Sequence[CheckpointMetadata]) -> CheckpointMetadata:
    """One pipeline stage: tensor-parallel ranks with the same names, each with its own shard of every tensor.

    Raises:
        DamagedError: they do not belong together.
    """
    if len(all_metadata) == 1:
        return all_metadata[0]
    all_metadata = _with_empty_shards(all_metadata)
    first = all_metadata[0]
    offsets = _offsets(all_metadata)
    for metadata in all_metadata[1:]:
        _check_alike(first, metadata)
    tensors = {
        place: shard_by_shard(
            [moved(metadata.tensors[place], at) for metadata, at in zip(all_metadata, offsets, strict=True)]
        )
        for place in first.tensors
    }
    parameters = {
        name: _one_parameter([metadata.parameters[name] for metadata in all_metadata]) for name in first.parameters
    }
    merged = _together(all_metadata, tensors, parameters)
    return replace(merged, source=replace(first.source, tp=len(all_metadata)))


def merge_stages(all_metadata: Sequence[CheckpointMetadata]) -> CheckpointMetadata:
    """All pipeline stages: of a tied parameter, the first stage's copy counts, and the others are kept to be compared.

    Raises:
        UnsupportedError: their param groups have other hyperparameters.
    """
    first = all_metadata[0]
    if len(all_metadata) == 1:
        return first
    offsets = _offsets(all_metadata)
    tensors: dict[tuple[str, str], TensorMetadata] = {}
    replicas: dict[tuple[str, str], tuple[TensorMetadata, ...]] = {}
    parameters: dict[str, SavedParameter] = {}
    stages: dict[str, tuple[int, ...]] = {}
    for stage, (metadata, at) in enumerate(zip(all_metadata, offsets, strict=True)):
        for name in dict.fromkeys([*metadata.parameters, *(name for name, _ in metadata.tensors)]):
            stages[name] = (*stages.get(name, ()), stage)
        if list(metadata.groups) != list(first.groups):
            raise UnsupportedError(
                "the pipeline stages were saved with different param groups, which is not supported yet",
                file=first.source.folder,
                expected=f"{list(first.groups)}",
                found=f"{list(metadata.groups)}",
            )
        for place, tensor in metadata.tensors.items():
            if place in tensors:
                replicas[place] = (*replicas.get(place, ()), moved(tensor, at))
            else:
                tensors[place] = moved(tensor, at)
        for name, saved in metadata.parameters.items():
            parameters.setdefault(name, _parameter_moved(saved, at))
    merged = _together(all_metadata, tensors, parameters)
    return replace(merged, source=replace(first.source, pp=len(all_metadata)), replicas=replicas, stages=stages)


def _with_empty_shards(all_metadata: Sequence[CheckpointMetadata]) -> list[CheckpointMetadata]:
    """AutoTP may leave a rank without an element of a parameter, which its files then do not list."""
    every = {name: metadata for metadata in reversed(all_metadata) for name in metadata.parameters}
    completed = []
    for rank, metadata in enumerate(all_metadata):
        parameters, tensors = dict(metadata.parameters), dict(metadata.tensors)
        for name in every.keys() - metadata.parameters.keys():
            shape = _recorded_shape(metadata.declared, name, rank)
            if shape is not None and math.prod(shape) == 0:
                parameters[name] = replace(every[name].parameters[name], shape=shape, replicated=())
                tensors.pop((name, FROZEN), None)
                for place, tensor in every[name].tensors.items():
                    if place[0] == name:
                        rows = tensor.shape[: len(tensor.shape) - len(shape)]
                        tensors[place] = replace(tensor, shape=(*rows, *shape), chunks=())
        completed.append(replace(metadata, parameters=parameters, tensors=tensors))
    return completed


def _recorded_shape(declared: Declared, name: str, rank: int) -> tuple[int, ...] | None:
    try:
        split = declared.recorded(name)
    except CannotSplit:
        return None
    return None if split is None or rank >= split.degree else split.shard_shape(rank)


def _offsets(all_metadata: Iterable[CheckpointMetadata]) -> list[int]:
    """Where the files of each begin in the list of all."""
    offsets, position = [], 0
    for metadata in all_metadata:
        offsets.append(position)
        position += len(metadata.files)
    return offsets


def moved(tensor: TensorMetadata, files: int) -> TensorMetadata:
    """A tensor whose files come ``files`` places later in the list of all."""
    return (
        replace(tensor, chunks=tuple(replace(chunk, file=chunk.file + files) for chunk in tensor.chunks))
        if files
        else tensor
    )


def shard_by_shard(shards: Sequence[TensorMetadata]) -> TensorMetadata:
    """The tensor whose shards, in tensor-parallel order, these are."""
    if len(shards) == 1:
        return shards[0]
    chunks = [replace(chunk, shard=rank) for rank, tensor in enumerate(shards) for chunk in tensor.chunks]
    return replace(shards[0], chunks=tuple(chunks), shards=tuple(tensor.shape for tensor in shards))


def _one_parameter(shards: Sequence[SavedParameter]) -> SavedParameter:
    """States of whole partitions are the first rank's, and must be the same on all."""
    replicated = []
    for number, state in enumerate(shards[0].replicated):
        others = [shard.replicated[number] for shard in shards if number < len(shard.replicated)]
        same = len(others) == len(shards) and len({other.crc32 for other in others}) == 1
        replicated.append(replace(state, differs=state.differs or not same))
    return replace(shards[0], replicated=tuple(replicated), shards=tuple(shard.shape for shard in shards))


def _parameter_moved(saved: SavedParameter, files: int) -> SavedParameter:
    moved: tuple[ReplicatedState, ...] = tuple(replace(s, file=s.file + files) for s in saved.replicated)
    return replace(saved, replicated=moved)


def _check_alike(first: CheckpointMetadata, other: CheckpointMetadata) -> None:
    compared: list[tuple[str, Any, Any]] = [
        ("parameters", sorted(first.parameters), sorted(other.parameters)),
        ("tensors", sorted(first.tensors), sorted(other.tensors)),
        ("hyperparameters of the param groups", list(first.groups), list(other.groups)),
        ("scalar optimizer states", _scalars(first), _scalars(other)),
        ("dtypes", _dtypes(first, other), _dtypes(other, first)),
    ]
    for what, expected, found in compared:
        if expected != found:
            raise DamagedError(
                f"tensor-parallel ranks of one pipeline stage were saved with different {what}",
                file=other.files[0].path,
                expected=str([item for item in expected if item not in found])[:300],
                found=str([item for item in found if item not in expected])[:300],
                remedy="files of two saves are mixed: restore the folder from its original, or take another tag",
            )


def _scalars(metadata: CheckpointMetadata) -> list[Any]:
    return [(name, saved.group, saved.scalars) for name, saved in sorted(metadata.parameters.items())]


def _dtypes(metadata: CheckpointMetadata, other: CheckpointMetadata) -> list[Any]:
    """Of what both hold an element of: the dtype, and whether it is quantized, or has a shape of its own."""
    kinds = []
    for place, tensor in sorted(metadata.tensors.items()):
        if tensor.chunks and place in other.tensors and other.tensors[place].chunks:
            kinds.append((place, tensor.dtype, tensor.is_whole, any(chunk.code for chunk in tensor.chunks)))
    return kinds


def _together(
    all_metadata: Sequence[CheckpointMetadata],
    tensors: Mapping[tuple[str, str], TensorMetadata],
    parameters: Mapping[str, SavedParameter],
) -> CheckpointMetadata:
    """What is said of several metadata, united."""
    declared = Declared()
    for metadata in all_metadata:
        declared = declared | metadata.declared
    return replace(
        all_metadata[0],
        files=tuple(file for metadata in all_metadata for file in metadata.files),
        parameters=parameters,
        tensors=tensors,
        aliases=_united(metadata.aliases for metadata in all_metadata),
        opaque_states=_united(metadata.opaque_states for metadata in all_metadata),
        damaged_states=_united(metadata.damaged_states for metadata in all_metadata),
        fresh_states=frozenset().union(*(metadata.fresh_states for metadata in all_metadata)),
        scalar_forms=_united(metadata.scalar_forms for metadata in all_metadata),
        frozen_recorded=all(metadata.frozen_recorded for metadata in all_metadata),
        declared=declared,
        notes=tuple(dict.fromkeys(note for metadata in all_metadata for note in metadata.notes)),
        warnings=tuple(dict.fromkeys(warning for metadata in all_metadata for warning in metadata.warnings)),
    )


def _united(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    united: dict[str, str] = {}
    for part in parts:
        united = {**part, **united}
    return united

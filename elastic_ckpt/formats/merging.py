"""Catalogs of model-parallel ranks -> the catalog of all: shards side by side, pipeline stages one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.metadata import FROZEN, Catalog, LogicalTensor, ReplicatedState, SavedParameter
from elastic_ckpt.core.tp_rules import CannotSplit
from elastic_ckpt.errors import DamagedError, UnsupportedError


def merge_shards(catalogs: Sequence[Catalog]) -> Catalog:
    """One pipeline stage: tensor-parallel ranks with the same names, each with its own shard of every tensor.

    Raises:
        DamagedError: they do not belong together.
    """
    if len(catalogs) == 1:
        return catalogs[0]
    catalogs = _with_empty_shards(catalogs)
    first = catalogs[0]
    offsets = _offsets(catalogs)
    for catalog in catalogs[1:]:
        _check_alike(first, catalog)
    tensors = {
        place: shard_by_shard(
            [moved(catalog.tensors[place], at) for catalog, at in zip(catalogs, offsets, strict=True)]
        )
        for place in first.tensors
    }
    parameters = {name: _one_parameter([catalog.parameters[name] for catalog in catalogs]) for name in first.parameters}
    merged = _together(catalogs, tensors, parameters)
    return replace(merged, source=replace(first.source, tp=len(catalogs)))


def merge_stages(catalogs: Sequence[Catalog]) -> Catalog:
    """All pipeline stages: of a tied parameter, the first stage's copy counts, and the others are kept to be compared.

    Raises:
        UnsupportedError: their param groups have other hyperparameters.
    """
    first = catalogs[0]
    if len(catalogs) == 1:
        return first
    offsets = _offsets(catalogs)
    tensors: dict[tuple[str, str], LogicalTensor] = {}
    twins: dict[tuple[str, str], tuple[LogicalTensor, ...]] = {}
    parameters: dict[str, SavedParameter] = {}
    stages: dict[str, tuple[int, ...]] = {}
    for stage, (catalog, at) in enumerate(zip(catalogs, offsets, strict=True)):
        for name in dict.fromkeys([*catalog.parameters, *(name for name, _ in catalog.tensors)]):
            stages[name] = (*stages.get(name, ()), stage)
        if list(catalog.groups) != list(first.groups):
            raise UnsupportedError(
                "the pipeline stages were saved with different param groups, which is not supported yet",
                file=first.source.folder,
                expected=f"{list(first.groups)}",
                found=f"{list(catalog.groups)}",
            )
        for place, tensor in catalog.tensors.items():
            if place in tensors:
                twins[place] = (*twins.get(place, ()), moved(tensor, at))
            else:
                tensors[place] = moved(tensor, at)
        for name, saved in catalog.parameters.items():
            parameters.setdefault(name, _parameter_moved(saved, at))
    merged = _together(catalogs, tensors, parameters)
    return replace(merged, source=replace(first.source, pp=len(catalogs)), twins=twins, stages=stages)


def _with_empty_shards(catalogs: Sequence[Catalog]) -> list[Catalog]:
    """AutoTP may leave a rank without an element of a parameter, which its files then do not list."""
    every = {name: catalog for catalog in reversed(catalogs) for name in catalog.parameters}
    completed = []
    for rank, catalog in enumerate(catalogs):
        parameters, tensors = dict(catalog.parameters), dict(catalog.tensors)
        for name in every.keys() - catalog.parameters.keys():
            shape = _recorded_shape(catalog.declared, name, rank)
            if shape is not None and math.prod(shape) == 0:
                parameters[name] = replace(every[name].parameters[name], shape=shape, replicated=())
                tensors.pop((name, FROZEN), None)
                for place, tensor in every[name].tensors.items():
                    if place[0] == name:
                        rows = tensor.shape[: len(tensor.shape) - len(shape)]
                        tensors[place] = replace(tensor, shape=(*rows, *shape), extents=())
        completed.append(replace(catalog, parameters=parameters, tensors=tensors))
    return completed


def _recorded_shape(declared: Declared, name: str, rank: int) -> tuple[int, ...] | None:
    try:
        split = declared.recorded(name)
    except CannotSplit:
        return None
    return None if split is None or rank >= split.degree else split.shard_shape(rank)


def _offsets(catalogs: Iterable[Catalog]) -> list[int]:
    """Where the files of each begin in the list of all."""
    offsets, position = [], 0
    for catalog in catalogs:
        offsets.append(position)
        position += len(catalog.files)
    return offsets


def moved(tensor: LogicalTensor, files: int) -> LogicalTensor:
    """A tensor whose files come ``files`` places later in the list of all."""
    return (
        replace(tensor, extents=tuple(replace(extent, file=extent.file + files) for extent in tensor.extents))
        if files
        else tensor
    )


def shard_by_shard(shards: Sequence[LogicalTensor]) -> LogicalTensor:
    """The tensor whose shards, in tensor-parallel order, these are."""
    if len(shards) == 1:
        return shards[0]
    extents = [replace(extent, shard=rank) for rank, tensor in enumerate(shards) for extent in tensor.extents]
    return replace(shards[0], extents=tuple(extents), shards=tuple(tensor.shape for tensor in shards))


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


def _check_alike(first: Catalog, other: Catalog) -> None:
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


def _scalars(catalog: Catalog) -> list[Any]:
    return [(name, saved.group, saved.scalars) for name, saved in sorted(catalog.parameters.items())]


def _dtypes(catalog: Catalog, other: Catalog) -> list[Any]:
    """Of what both hold an element of: the dtype, and whether it is quantized, or has a shape of its own."""
    kinds = []
    for place, tensor in sorted(catalog.tensors.items()):
        if tensor.extents and place in other.tensors and other.tensors[place].extents:
            kinds.append((place, tensor.dtype, tensor.is_whole, any(extent.code for extent in tensor.extents)))
    return kinds


def _together(
    catalogs: Sequence[Catalog],
    tensors: Mapping[tuple[str, str], LogicalTensor],
    parameters: Mapping[str, SavedParameter],
) -> Catalog:
    """What is said of several catalogs, united."""
    declared = Declared()
    for catalog in catalogs:
        declared = declared | catalog.declared
    return replace(
        catalogs[0],
        files=tuple(file for catalog in catalogs for file in catalog.files),
        parameters=parameters,
        tensors=tensors,
        aliases=_united(catalog.aliases for catalog in catalogs),
        opaque_states=_united(catalog.opaque_states for catalog in catalogs),
        damaged_states=_united(catalog.damaged_states for catalog in catalogs),
        fresh_states=frozenset().union(*(catalog.fresh_states for catalog in catalogs)),
        scalar_forms=_united(catalog.scalar_forms for catalog in catalogs),
        frozen_recorded=all(catalog.frozen_recorded for catalog in catalogs),
        declared=declared,
        notes=tuple(dict.fromkeys(note for catalog in catalogs for note in catalog.notes)),
        warnings=tuple(dict.fromkeys(warning for catalog in catalogs for warning in catalog.warnings)),
    )


def _united(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    united: dict[str, str] = {}
    for part in parts:
        united = {**part, **united}
    return united

"""CheckpointMetadata -> parameters, optimizer states and param groups, counted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.formats.zero0_index import UnpartitionedState
from elastic_ckpt.tools.inspection.facts import (
    BUFFER_ROLE,
    FROZEN_ROLE,
    TRAINED,
    WEIGHT,
    GroupSummary,
    ParameterEntry,
    Shape,
    StateSummary,
    Totals,
)
from elastic_ckpt.tools.inspection.layouts import Layout

ELEMENTWISE, BLOCKS, WHOLE, REPLICATED, SCALAR, UNNAMED = (
    "elementwise",
    "blocks",
    "whole",
    "replicated",
    "scalar",
    "unnamed",
)


def stored_numel(tensor: TensorMetadata) -> int:
    """Elements of all shards together."""
    return sum(map(math.prod, tensor.shard_shapes))


def stored_nbytes(tensor: TensorMetadata) -> int:
    """Bytes of all shards together; of a quantized state, of its codes."""
    return stored_numel(tensor) * ITEMSIZE[tensor.dtype]


def totals(metadata: CheckpointMetadata, key: str) -> Totals:
    """All tensors of one key; copies that other pipeline stages keep are not counted."""
    mine = [tensor for (_, tensor_key), tensor in metadata.tensors.items() if tensor_key == key]
    return Totals(
        tensors=len(mine),
        numel=sum(map(stored_numel, mine)),
        nbytes=sum(map(stored_nbytes, mine)),
        dtypes=tuple(sorted({tensor.dtype for tensor in mine})),
    )


@dataclass
class _Tally:
    parameters: int = 0
    numel: int = 0
    nbytes: int = 0
    values: set[float] = field(default_factory=set)

    def add(self, numel: int = 0, nbytes: int = 0, parameters: int = 1) -> None:
        self.parameters += parameters
        self.numel += numel
        self.nbytes += nbytes


def states_of(metadata: CheckpointMetadata) -> tuple[StateSummary, ...]:
    """The optimizer states, by key and kind."""
    tallies: dict[tuple[str, str, str, int, int], _Tally] = {}
    state_keys = set(metadata.state_keys)
    for (name, key), tensor in metadata.tensors.items():
        if key in state_keys:
            kind, rows, block_numel = kind_of(tensor, _parameter_shape(metadata, name))
            found = tallies.setdefault((key, kind, tensor.dtype, rows, block_numel), _Tally())
            found.add(stored_numel(tensor), stored_nbytes(tensor))
    for saved in metadata.parameters.values():
        for state in saved.replicated:
            numel = math.prod(state.shape)
            found = tallies.setdefault((state.key, REPLICATED, state.dtype, 1, 0), _Tally())
            found.parameters += 1
            found.numel, found.nbytes = numel, numel * ITEMSIZE.get(state.dtype, 0)
        for key, value in saved.scalars:
            found = tallies.setdefault((key, SCALAR, metadata.scalar_forms.get(key, ""), 1, 0), _Tally())
            found.add()
            found.values.add(value)
    summaries = [
        StateSummary(key, kind, dtype, tally.parameters, rows, block, tally.numel, tally.nbytes, _ends(tally.values))
        for (key, kind, dtype, rows, block), tally in tallies.items()
    ]
    return (*sorted(summaries, key=lambda state: (state.kind == SCALAR, state.key, state.kind)), *_not_cut(metadata))


def _not_cut(metadata: CheckpointMetadata) -> Iterable[StateSummary]:
    for kind, states in (("damaged", metadata.damaged_states), ("opaque", metadata.opaque_states)):
        for key, why in sorted(states.items()):
            yield StateSummary(key, kind, "", 0, why=why)
    for key in sorted(metadata.fresh_states):
        yield StateSummary(key, "fresh", "", 0, why='"state_schema" says so')


def kind_of(tensor: TensorMetadata, shape: Shape) -> tuple[str, int, int]:
    """Kind, rows, and elements in a block, of a state of a parameter of some shape."""
    if tensor.is_whole:
        return WHOLE, 1, 0
    rows = tensor.shape[0] if len(tensor.shape) == len(shape) + 1 and tensor.shape[1:] == shape else 1
    code = next((chunk.code for chunk in tensor.chunks if chunk.code is not None), None)
    return (ELEMENTWISE, rows, 0) if code is None else (BLOCKS, rows, code.format.numel)


def _parameter_shape(metadata: CheckpointMetadata, name: str) -> Shape:
    saved = metadata.parameters.get(name)
    return () if saved is None else saved.shape


def _ends(values: set[float]) -> tuple[float, ...]:
    return tuple(dict.fromkeys((min(values), max(values)))) if values else ()


def groups_of(metadata: CheckpointMetadata) -> tuple[GroupSummary, ...]:
    """The param groups, in saved order."""
    members: dict[int, list[str]] = {}
    for name, saved in metadata.parameters.items():
        members.setdefault(saved.group, []).append(name)
    summaries = []
    for number, hyperparameters in enumerate(metadata.groups):
        names = members.get(number, [])
        numel = sum(math.prod(shape) for name in names for shape in _shards(metadata, name))
        summaries.append(GroupSummary(number, len(names), numel, hyperparameters))
    return tuple(summaries)


def _shards(metadata: CheckpointMetadata, name: str) -> Sequence[Shape]:
    saved = metadata.parameters[name]
    return saved.shards or (saved.shape,)


def unnamed_states(parts: Mapping[int, UnpartitionedState], tp: int | None) -> tuple[StateSummary, ...]:
    """States that are numbered, of nobody knows which parameters.

    Args:
        parts: by model-parallel rank.
        tp: tensor-parallel degree: so many neighbours hold shards of the same parameters.
    """
    tallies: dict[tuple[str, str], _Tally] = {}
    for mp, part in parts.items():
        counts = int(mp % (tp or 1) == 0)
        for states in part.states.values():
            for key, ref in states.tensors.items():
                found = tallies.setdefault((key, ref.dtype), _Tally())
                found.add(ref.numel, ref.numel * ITEMSIZE[ref.dtype], counts)
            for key, value in states.scalars:
                found = tallies.setdefault((key, states.scalar_forms.get(key, "")), _Tally())
                found.add(parameters=counts)
                found.values.add(value)
    return tuple(
        StateSummary(key, UNNAMED, dtype, t.parameters, numel=t.numel, nbytes=t.nbytes, values=_ends(t.values))
        for (key, dtype), t in sorted(tallies.items())
    )


def unnamed_groups(parts: Mapping[int, UnpartitionedState], tp: int | None) -> tuple[GroupSummary, ...]:
    """Param groups whose members are numbered; arguments as for :func:`unnamed_states`."""
    members: dict[int, int] = {}
    hyperparameters: dict[int, Mapping[str, Any]] = {}
    for mp, part in parts.items():
        for number, (inside, values) in enumerate(zip(part.members, part.groups, strict=True)):
            members[number] = members.get(number, 0) + len(inside) * (mp % (tp or 1) == 0)
            hyperparameters.setdefault(number, values)
    return tuple(GroupSummary(number, members[number], None, hyperparameters[number]) for number in sorted(members))


def parameters_of(
    metadata: CheckpointMetadata, layouts: Mapping[str, Layout], weights_only: bool
) -> tuple[ParameterEntry, ...]:
    """Every parameter and buffer, trained ones first, in the order of the checkpoint.

    Args:
        metadata: what the checkpoint holds.
        layouts: how the shards of each were cut, by name.
        weights_only: whether nothing says which of them trained.
    """
    keys: dict[str, list[str]] = {name: [] for name in metadata.parameters}
    for name, key in metadata.tensors:
        keys.setdefault(name, []).append(key)
    names_of: dict[str, list[str]] = {}
    for name, holder in metadata.aliases.items():
        names_of.setdefault(holder, []).append(name)
    entries = [
        _entry(metadata, name, keys[name], layouts[name], tuple(names_of.get(name, ())), weights_only) for name in keys
    ]
    order = {TRAINED: 0, WEIGHT: 1, FROZEN_ROLE: 2, BUFFER_ROLE: 3}
    return tuple(sorted(entries, key=lambda entry: order[entry.role]))


def _entry(
    metadata: CheckpointMetadata,
    name: str,
    keys: Sequence[str],
    layout: Layout,
    tied: tuple[str, ...],
    weights_only: bool,
) -> ParameterEntry:
    saved = metadata.parameters.get(name)
    role = TRAINED if saved is not None else BUFFER_ROLE if BUFFER in keys else WEIGHT if weights_only else FROZEN_ROLE
    own = next((metadata.tensors[name, key] for key in (MASTER, FROZEN, BUFFER) if key in keys), None)
    stored = [metadata.tensors[name, key] for key in keys]
    replicas = [replica for key in keys for replica in metadata.replicas.get((name, key), ())]
    shards = layout.shards
    states = sorted(set(keys) - {MASTER, FROZEN, BUFFER})
    if saved is not None:
        states += [state.key for state in saved.replicated] + [key for key, _ in saved.scalars]
    return ParameterEntry(
        name=name,
        role=role,
        shape=layout.whole,
        shards=shards,
        dtype="" if own is None else own.dtype,
        group=None if saved is None else saved.group,
        states=tuple(states),
        numel=sum(map(math.prod, shards)),
        nbytes=sum(map(stored_nbytes, (*stored, *replicas))),
        tied=tied,
        copies=1 + (0 if own is None else len(metadata.replicas.get((name, own.key), ()))),
        rule=layout.rule,
        rule_from=layout.origin,
    )

"""What a checkpoint's metadata says, as plain data. :func:`inspect_folder` reads the files; the rest is pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.values import PerRank, TensorValue, TrainingState, numbers
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError, listed
from elastic_ckpt.planning.param_groups import saved_optimizer
from elastic_ckpt.report import saved_topology, source_dict
from elastic_ckpt.sharding.rules import ShardingRules, tensor_of
from elastic_ckpt.sharding.specs import virtual_layouts
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, check_metadata, of_error
from elastic_ckpt.tools.opened import locate, open_checkpoint

#: Roles of a parameter; buffers and frozen weights have their key. ``WEIGHT``: it is unknown whether it was trained.
TRAINED, WEIGHT = "trained", "weight"
SCALAR = "scalar"
Shape = tuple[int, ...]


def inspect_folder(folder: str, tag: str | None, config: ElasticConfig) -> dict[str, Any]:
    """Inspect the latest checkpoint of a folder, its ``tag``, or the one whose folder it is.

    Optimizer states that only a live model could name are left out, with a finding. Raises
    :class:`ElasticCkptError` if there is no such checkpoint, or its metadata cannot be read.
    """
    rules = ShardingRules.of(config)
    found = locate(folder, tag, config.trust_pickle)
    refused: list[Finding] = []
    try:
        checkpoint = open_checkpoint(found, config).checkpoint
    except (MismatchError, UnsupportedError) as error:
        checkpoint = open_checkpoint(found, config, with_states=False).checkpoint
        refused = [of_error(error, "states", NOTE if isinstance(error, MismatchError) else ERROR)]
    return inspected(checkpoint.metadata, checkpoint.training_state, rules, refused)


def inspected(
    metadata: CheckpointMetadata, state: TrainingState, rules: ShardingRules, refused: list[Finding]
) -> dict[str, Any]:
    """The inspection of a checkpoint; ``refused``: why its optimizer states are not in the metadata."""
    scale, unknown = state.loss_scale, dict[str, ElasticCkptError]()
    keys: dict[str, list[str]] = {name: [] for name in metadata.parameters}
    for name, key in metadata.tensors:
        keys.setdefault(name, []).append(key)
    with_data = [name for name in keys if tensor_of(metadata, name) is not None]
    layouts = virtual_layouts(metadata, with_data, 1, rules, unknown)
    tied: dict[str, list[str]] = defaultdict(list)
    for alias, holder in metadata.aliases.items():
        tied[holder].append(alias)
    shapes = {name: layout.shapes[0] for name, layout in layouts.items()}
    parameters = [
        _entry(metadata, name, mine, bool(refused)) | {"shape": shapes.get(name), "tied": tied[name]}
        for name, mine in keys.items()
    ]
    by_problem: dict[str, list[str]] = defaultdict(list)  # at the saved degree, a load needs no layout
    for name, error in unknown.items():
        by_problem[error.problem].append(name)
    layout_notes = (
        replace(of_error(unknown[names[0]], "layout", NOTE), parameter=listed(names)) for names in by_problem.values()
    )
    findings = dict.fromkeys([*refused, *check_metadata(metadata), *layout_notes])
    experts = {(each.layer, each.number) for name in keys if (each := expert_name(name)) is not None}
    return {
        "ok": not any(finding.level == ERROR for finding in findings),
        "source": source_dict(metadata.source),
        "topology": saved_topology(metadata.source),
        "run": {
            **state.counters,
            **asdict(state.batch),
            "optimizer": saved_optimizer(metadata) if metadata.parameters else None,
            "lr_scheduler": state.lr_scheduler,
            "loss_scale": None if scale is None else {"kind": scale.kind, **scale.values},
            "overflow": state.overflow,
            "arguments": metadata.run,
        },
        "experts": dict(Counter(layer for layer, _ in sorted(experts))),
        "contents": list(_contents(metadata)),
        "groups": _groups(metadata),
        "parameters": parameters,
        "aliases": metadata.aliases,
        "files": [{"path": file.path, "nbytes": file.nbytes} for file in metadata.files],
        "findings": sorted(findings, key=lambda finding: finding.level != ERROR),
    }


def _numel(tensor: TensorMetadata) -> int:
    return sum(map(math.prod, tensor.shard_shapes))


def _nbytes(tensor: TensorMetadata) -> int:
    """Bytes of all shards, without the scales of a quantized state."""
    return _numel(tensor) * ITEMSIZE[tensor.dtype]


def _contents(metadata: CheckpointMetadata) -> Iterator[dict[str, Any]]:
    """Weights, states and scalars by kind: number, elements, bytes, and least and greatest value of a scalar."""
    rows: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    values: dict[tuple[str, str, str], set[float]] = defaultdict(set)
    for (name, key), tensor in metadata.tensors.items():
        rows[key, _kind_of(metadata, name, tensor), tensor.dtype].append((_numel(tensor), _nbytes(tensor)))
    every = chain.from_iterable(saved.replicated for saved in metadata.parameters.values())
    for state in {(each.file, each.byte_offset): each for each in every}.values():
        numel = math.prod(state.shape)
        rows[state.key, "replicated", state.dtype].append((numel, numel * ITEMSIZE.get(state.dtype, 0)))
    for key, value in chain.from_iterable(saved.scalars for saved in metadata.parameters.values()):
        rows[key, SCALAR, _form(value)].append((0, 0))
        values[key, SCALAR, _form(value)].update(numbers(value))
    first = {MASTER: 0, FROZEN: 1, BUFFER: 2}
    for kind in sorted(rows, key=lambda kind: (first.get(kind[0], 3), kind[1] == SCALAR, kind)):
        numel, nbytes = map(sum, zip(*rows[kind], strict=True))
        yield {
            **dict(zip(("key", "kind", "dtype"), kind, strict=True)),
            "tensors": len(rows[kind]),
            "numel": numel,
            "nbytes": nbytes,
            "values": sorted({min(values[kind]), max(values[kind])}) if values[kind] else [],
        }


def _kind_of(metadata: CheckpointMetadata, name: str, tensor: TensorMetadata) -> str:
    saved = metadata.parameters.get(name)
    if tensor.key in WEIGHTS or saved is None:
        return "weights"
    if tensor.has_own_shape:
        return "whole"
    if tensor.blocks is not None:
        return f"blocks of {tensor.blocks.numel}"
    return "elementwise" if len(tensor.shape) == len(saved.shape) else f"{tensor.shape[0]} values per element"


def _form(value: Any) -> str:
    """How a scalar state was saved."""
    if isinstance(value, PerRank):
        return ", ".join(sorted({_form(each) for each in value.values}))
    return value.dtype if isinstance(value, TensorValue) else type(value).__name__


def _groups(metadata: CheckpointMetadata) -> list[dict[str, Any]]:
    """Members of each param group, elements of their masters (of all shards), and hyperparameters."""
    numels: list[list[int]] = [[] for _ in metadata.groups]
    for saved in metadata.parameters.values():
        numels[saved.group].append(sum(map(math.prod, saved.shards or (saved.shape,))))
    return [
        {"members": len(mine), "numel": sum(mine), "hyperparameters": values}
        for mine, values in zip(numels, metadata.groups, strict=True)
    ]


def _entry(metadata: CheckpointMetadata, name: str, keys: list[str], weights_only: bool) -> dict[str, Any]:
    """A parameter or buffer, but for its logical shape (``None`` if the layout of its shards is unknown) and ties."""
    saved, own = metadata.parameters.get(name), tensor_of(metadata, name)
    replicas = [replica for key in keys for replica in metadata.replicas.get((name, key), ())]
    states = sorted(set(keys) - WEIGHTS)
    shards: tuple[Shape, ...] = () if own is None else own.shard_shapes
    if saved is not None:
        states += [state.key for state in saved.replicated] + [key for key, _ in saved.scalars]
        shards = shards or saved.shards or (saved.shape,)
    return {
        "name": name,
        "role": TRAINED if saved is not None else WEIGHT if weights_only and FROZEN in keys else keys[0],
        "shards": shards,
        "dtype": "" if own is None else own.dtype,
        "group": None if saved is None else saved.group,
        "states": states,
        "numel": sum(map(math.prod, shards)),
        "nbytes": sum(map(_nbytes, [*(metadata.tensors[name, key] for key in keys), *replicas])),
        "copies": 1 + sum(own is not None and replica.key == own.key for replica in replicas),
    }

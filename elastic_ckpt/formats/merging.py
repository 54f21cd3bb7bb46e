"""Merges the metadata of model-parallel ranks: tensor-parallel shards of a stage, pipeline stages, files of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, chain
from operator import or_
from typing import Any, ClassVar

from elastic_ckpt.core.chunks import listed
from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata, SavedParameter, SourceFile, TensorMetadata
from elastic_ckpt.core.tp_rules import CannotSplit
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.metadata_builder import dense_tensor
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

_RESTORE = "files of two saves are mixed: restore the folder from its original, or take another tag"
_TIED = re.compile(r"^tied_modules\.[^.]+\.")
Ranks = Sequence[CheckpointMetadata]


def merge_shards(ranks: Ranks) -> CheckpointMetadata:
    """Merge the tensor-parallel ranks of one pipeline stage; :class:`DamagedError` if they do not belong together."""
    if len(ranks) == 1:
        return ranks[0]
    ranks = _with_empty_shards(ranks)
    first, offsets = ranks[0], _offsets(ranks)
    for other in ranks[1:]:
        _check_same_stage(first, other)
    tensors = {
        key: shard_by_shard([_moved(rank.tensors[key], at) for rank, at in zip(ranks, offsets, strict=True)])
        for key in first.tensors
    }
    parameters = {name: _one_parameter([rank.parameters[name] for rank in ranks]) for name in first.parameters}
    return _united(ranks, tensors, parameters, tp=len(ranks))


def merge_stages(stages: Ranks) -> CheckpointMetadata:
    """Merge all pipeline stages: the first stage's copy of a tied parameter counts, the others are its replicas.

    Raises :class:`UnsupportedError` if their param groups have different hyperparameters.
    """
    first = stages[0]
    if len(stages) == 1:
        return first
    tensors: dict[tuple[str, str], TensorMetadata] = {}
    replicas: dict[tuple[str, str], tuple[TensorMetadata, ...]] = {}
    parameters: dict[str, SavedParameter] = {}
    stages_of: dict[str, tuple[int, ...]] = {}
    for number, (stage, at) in enumerate(zip(stages, _offsets(stages), strict=True)):
        for name in dict.fromkeys([*stage.parameters, *(name for name, _ in stage.tensors)]):
            stages_of[name] = (*stages_of.get(name, ()), number)
        if list(stage.groups) != list(first.groups):
            raise UnsupportedError(
                "the pipeline stages were saved with different param groups, which is not supported yet",
                file=first.source.folder,
                expected=f"{list(first.groups)}",
                found=f"{list(stage.groups)}",
            )
        for key, tensor in stage.tensors.items():
            moved = _moved(tensor, at)
            if tensors.setdefault(key, moved) is not moved:
                replicas[key] = (*replicas.get(key, ()), moved)
        for name, saved in stage.parameters.items():
            states = tuple(replace(state, file=state.file + at) for state in saved.replicated)
            parameters.setdefault(name, replace(saved, replicated=states))
    return replace(_united(stages, tensors, parameters, pp=len(stages)), replicas=replicas, stages=stages_of)


def with_more(metadata: CheckpointMetadata, more: CheckpointMetadata) -> CheckpointMetadata:
    """``metadata`` extended by the parameters and tensors that only ``more`` has, whose files come last."""
    at = len(metadata.files)
    parameters = {
        name: replace(saved, replicated=tuple(replace(state, file=state.file + at) for state in saved.replicated))
        for name, saved in more.parameters.items()
    }
    known = metadata.parameters.keys() | {name for name, _ in metadata.tensors}
    tensors = {key: _moved(tensor, at) for key, tensor in more.tensors.items() if key[0] not in known}
    ep = max(metadata.source.ep, more.source.ep)
    return _united([metadata, more], {**metadata.tensors, **tensors}, {**metadata.parameters, **parameters}, ep=ep)


def _with_empty_shards(ranks: Ranks) -> Ranks:
    """Add empty shards: AutoTP may leave a rank without elements of a parameter, which its files then do not list."""
    holders = {name: rank for rank in reversed(ranks) for name in rank.parameters}
    completed = []
    for number, rank in enumerate(ranks):
        parameters, tensors = dict(rank.parameters), dict(rank.tensors)
        for name in holders.keys() - rank.parameters.keys():
            shape = _recorded_shape(rank.declared, name, number)
            if shape is not None and math.prod(shape) == 0:
                parameters[name] = replace(holders[name].parameters[name], shape=shape, replicated=())
                tensors.pop((name, FROZEN), None)
                for key, tensor in holders[name].tensors.items():
                    if key[0] == name:
                        rows = tensor.shape[: len(tensor.shape) - len(shape)]
                        tensors[key] = replace(tensor, shape=(*rows, *shape), sources=listed())
        completed.append(replace(rank, parameters=parameters, tensors=tensors))
    return completed


def _recorded_shape(declared: Declared, name: str, rank: int) -> tuple[int, ...] | None:
    try:
        layout = declared.recorded(name)
    except CannotSplit:
        return None
    return None if layout is None or rank >= layout.degree else layout.shard_shape(rank)


def _offsets(ranks: Ranks) -> list[int]:
    return list(accumulate((len(rank.files) for rank in ranks[:-1]), initial=0))


def _moved(tensor: TensorMetadata, files: int) -> TensorMetadata:
    return replace(tensor, sources=tuple(source.moved(files) for source in tensor.sources)) if files else tensor


def shard_by_shard(shards: Sequence[TensorMetadata]) -> TensorMetadata:
    """The tensor with these shards, in tensor-parallel order; a :class:`DamagedError` if their dtypes differ."""
    first = shards[0]
    if len(shards) == 1:
        return first
    dtypes = [shard.dtype for shard in shards if not shard.is_empty]
    if len(set(dtypes)) > 1:
        raise DamagedError(
            f"tensor-parallel ranks saved {first.key} of this parameter in different dtypes",
            parameter=first.name,
            expected=dtypes[0],
            found=", ".join(dtypes),
            remedy=_RESTORE,
        )
    sources = tuple(chain.from_iterable(tensor.sources for tensor in shards))
    shapes = tuple(tensor.shape for tensor in shards)
    return replace(first, dtype=(dtypes or [first.dtype])[0], sources=sources, shards=shapes)


def _one_parameter(shards: Sequence[SavedParameter]) -> SavedParameter:
    """The parameter with these shards: states of whole partitions are the first rank's, and must agree on all."""
    replicated = []
    for number, state in enumerate(shards[0].replicated):
        checksums = {shard.replicated[number].crc32 if number < len(shard.replicated) else None for shard in shards}
        replicated.append(replace(state, differs=state.differs or len(checksums) > 1))
    return replace(shards[0], replicated=tuple(replicated), shards=tuple(shard.shape for shard in shards))


def _check_same_stage(first: CheckpointMetadata, other: CheckpointMetadata) -> None:
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
                remedy=_RESTORE,
            )


def _scalars(rank: CheckpointMetadata) -> list[Any]:
    return [(name, saved.group, saved.scalars) for name, saved in sorted(rank.parameters.items())]


def _dtypes(rank: CheckpointMetadata, other: CheckpointMetadata) -> list[Any]:
    """Of each tensor with elements on both: dtype, whether it is quantized, and whether it has its own shape."""
    return [
        (key, tensor.dtype, tensor.is_whole, tensor.is_quantized)
        for key, tensor in sorted(rank.tensors.items())
        if not tensor.is_empty and key in other.tensors and not other.tensors[key].is_empty
    ]


def _united(
    ranks: Ranks,
    tensors: Mapping[tuple[str, str], TensorMetadata],
    parameters: Mapping[str, SavedParameter],
    **degree: Any,
) -> CheckpointMetadata:
    """The union of several; where two disagree, the first counts."""
    aliases: Mapping[str, str] = reduce(lambda known, rank: {**rank.aliases, **known}, ranks, {})
    return replace(
        ranks[0],
        source=replace(ranks[0].source, frozen_recorded=all(rank.source.frozen_recorded for rank in ranks), **degree),
        files=tuple(file for rank in ranks for file in rank.files),
        parameters=parameters,
        tensors=tensors,
        aliases=aliases,
        states=reduce(or_, (rank.states for rank in ranks)),
        declared=reduce(or_, (rank.declared for rank in ranks)),
        notes=tuple(dict.fromkeys(note for rank in ranks for note in rank.notes)),
        warnings=tuple(dict.fromkeys(warning for rank in ranks for warning in rank.warnings)),
    )


@dataclass(frozen=True)
class LayerShard(SourceFile):
    """``layer_NN-model_MM-model_states.pt``: a pipeline layer's weights and buffers, of one tensor-parallel rank.

    Source: ``PipelineModule.save_state_dict`` (pipe/module.py): each layer's state dict, without the layer's number,
    which counts through the whole model, whatever the stage. Of a tied layer only the first occurrence has a file,
    under that layer's number, while its parameters are named ``tied_modules.<key>.*``.
    """

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "layer", "tp_rank")

    layer: int
    tp_rank: int
    weights: Mapping[str, TensorRef]

    def named(self, known: frozenset[str]) -> dict[str, TensorRef]:
        """Its tensors by FQN, some of which are ``known``; of a tied layer, by the tied module's name."""
        tied: dict[str, str] = {}
        for name in sorted(known):
            if _TIED.match(name):
                inner = _TIED.sub("", name)
                tied[inner] = "" if inner in tied else name  # ambiguous where two end in the same name
        found = {}
        for key, ref in self.weights.items():
            name = f"{self.layer}.{key}"
            found[name if name in known else tied.get(key) or name] = ref
        return found


def index_layer(file: PickledFile, layer: int, tp_rank: int) -> LayerShard:
    weights = {str(name): ref for name, ref in file.tree.items() if isinstance(ref, TensorRef)}
    return LayerShard(file.path, file.nbytes, layer, tp_rank, weights, records=file.records)


def with_layers(
    metadata: CheckpointMetadata,
    layers: Sequence[LayerShard],
    buffers: frozenset[str],
    tp: int,
    live_names: frozenset[str] = frozenset(),
) -> CheckpointMetadata:
    """``metadata`` extended by the layers' files: buffers, and parameters that no optimizer owned.

    ``layers`` are of all ``tp`` tensor-parallel ranks, ``buffers`` the names of the module's buffers, ``live_names``
    those of the live model, for tied modules of which no optimizer owned anything.
    """
    known = frozenset(metadata.parameters) | buffers | live_names
    shards: dict[str, list[tuple[int, int, TensorRef]]] = {}
    for number, layer in enumerate(layers):
        for name, ref in layer.named(known).items():
            if name not in metadata.parameters and ref.is_contiguous:
                shards.setdefault(name, []).append((layer.tp_rank, len(metadata.files) + number, ref))
    tensors = dict(metadata.tensors)
    for name, ranks in shards.items():
        ranks.sort(key=lambda item: item[0])
        if [rank for rank, _, _ in ranks] == list(range(tp)):
            key = BUFFER if name in buffers else FROZEN
            tensors[name, key] = shard_by_shard([dense_tensor(name, key, ref, file) for _, file, ref in ranks])
    files = (*metadata.files, *(SourceFile(layer.path, layer.nbytes, records=layer.records) for layer in layers))
    return replace(metadata, tensors=tensors, files=files)

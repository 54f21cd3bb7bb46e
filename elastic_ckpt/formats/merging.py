"""Merges the metadata of model-parallel ranks: tensor-parallel shards, pipeline stages, files of layers and of experts.

Each expert of a mixture has a file with its weights, ``layer_L_expert_E_mp_rank_00_model_states.pt``, L counting
``MoE`` layers. Source: ``DeepSpeedEngine._save_moe_checkpoint`` (engine.py).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import accumulate, chain
from operator import or_
from typing import Any, ClassVar

from elastic_ckpt.core.chunks import ChunkSource, chunks_of
from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    CheckpointMetadata,
    DerivedTensors,
    SavedParameter,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import CannotSplit
from elastic_ckpt.core.values import PerRank, merged, moved
from elastic_ckpt.errors import DamagedError, LayoutError, UnsupportedError, listed
from elastic_ckpt.formats.extra_states import digests, extra_states_in
from elastic_ckpt.formats.metadata_builder import dense_tensor, refuse_view
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.own_entries import checked_tree, not_tensors, text_of
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import Scalars, merged_groups, settings
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

_TIED = re.compile(r"^tied_modules\.[^.]+\.")
Ranks = Sequence[CheckpointMetadata]


def merge_shards(ranks: Ranks) -> CheckpointMetadata:
    """Merge the tensor-parallel ranks of one pipeline stage; :class:`DamagedError` if they do not belong together."""
    if len(ranks) == 1:
        return ranks[0]
    ranks = _with_empty_shards(ranks)
    first = ranks[0]
    offsets = _offsets(ranks)
    for other in ranks[1:]:
        _check_same_stage(first, other)
    places = {place: place for place in first.tensors}
    tensors = DerivedTensors(places, lambda at, _: shard_by_shard([rank.tensors[at] for rank in ranks], offsets))
    files = [range(at, at + len(rank.files)) for at, rank in zip(offsets, ranks, strict=True)]
    known: dict[tuple[int, ...], Scalars] = {}  # parameters of one flat tensor share their scalars
    parameters: dict[str, SavedParameter] = {}
    for name in first.parameters:
        shards = [rank.parameters[name] for rank in ranks]
        ids = tuple(id(shard.scalars) for shard in shards)
        if ids not in known:
            known[ids] = tuple(merged(zip(files, (dict(each.scalars) for each in shards), strict=True)).items())
        replicated = []  # the first rank's, which must agree on all
        for number, state in enumerate(shards[0].replicated):
            values = {each.replicated[number].crc32 if number < len(each.replicated) else None for each in shards}
            replicated.append(replace(state, differs=state.differs or len(values) > 1))
        shapes = tuple(shard.shape for shard in shards)
        parameters[name] = replace(shards[0], replicated=tuple(replicated), shards=shapes, scalars=known[ids])
    groups = merged_groups(zip(files, (rank.groups for rank in ranks), strict=True))
    known_crc32s = [name for name in first.crc32s if all(name in rank.crc32s for rank in ranks)]
    crc32s = {name: tuple(chain(*(rank.crc32s[name] for rank in ranks))) for name in known_crc32s}
    return replace(_united(ranks, tensors, parameters, tp=len(ranks)), groups=groups, crc32s=crc32s)


def merge_stages(stages: Ranks) -> CheckpointMetadata:
    """Merge pipeline stages of the same param groups: a tied parameter's first copy counts, others are replicas."""
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
        if [set(group) for group in stage.groups] != [set(group) for group in first.groups]:
            problem = "the pipeline stages were saved with different param groups, which is not supported yet"
            raise UnsupportedError(problem, first.source.folder, list(first.groups), list(stage.groups))
        for key, tensor in stage.tensors.items():
            moved = _moved(tensor, at)
            if tensors.setdefault(key, moved) is not moved:
                replicas[key] = (*replicas.get(key, ()), moved)
        for name, saved in stage.parameters.items():
            parameters.setdefault(name, _moved_parameter(saved, at))
    files = (range(at, at + len(stage.files)) for at, stage in zip(_offsets(stages), stages, strict=True))
    groups = merged_groups(zip(files, (stage.groups for stage in stages), strict=True))
    united = _united(stages, tensors, parameters, pp=len(stages))
    return replace(united, groups=groups, replicas=replicas, stages=stages_of)


def with_more(metadata: CheckpointMetadata, more: CheckpointMetadata) -> CheckpointMetadata:
    """``metadata`` extended by the parameters and tensors that only ``more`` has, whose files come last."""
    at = len(metadata.files)
    parameters = {name: _moved_parameter(saved, at) for name, saved in more.parameters.items()}
    known = metadata.parameters.keys() | {name for name, _ in metadata.tensors}
    tensors = {key: _moved(tensor, at) for key, tensor in more.tensors.items() if key[0] not in known}
    ep = max(metadata.source.ep, more.source.ep)
    return _united([metadata, more], {**metadata.tensors, **tensors}, {**metadata.parameters, **parameters}, ep=ep)


def _with_empty_shards(ranks: Ranks) -> Ranks:
    """Add empty shards: AutoTP may leave a rank without elements of a parameter, which its files then do not list."""
    holders = {name: rank for rank in reversed(ranks) for name in rank.parameters}
    keys: dict[int, dict[str, list[str]]] = {}  # by the rank that holds them, and the name
    completed = []
    for number, rank in enumerate(ranks):
        parameters = dict(rank.parameters)
        tensors = dict(rank.tensors)
        for name in holders.keys() - rank.parameters.keys():
            layout = None
            with suppress(CannotSplit):
                layout = rank.declared.layout(name)
            shape = layout.shard_shape(number) if layout is not None and number < layout.degree else (1,)
            if math.prod(shape) == 0:
                parameters[name] = replace(holders[name].parameters[name], shape=shape, replicated=())
                tensors.pop((name, FROZEN), None)
                holder = holders[name]
                if id(holder) not in keys:
                    keys[id(holder)] = _keys_by_name(holder)
                for key in keys[id(holder)].get(name, ()):
                    tensor = holder.tensors[name, key]
                    leading = tensor.shape[: len(tensor.shape) - len(shape)]
                    tensors[name, key] = replace(tensor, shape=(*leading, *shape), sources=chunks_of())
        completed.append(replace(rank, parameters=parameters, tensors=tensors))
    return completed


def _keys_by_name(rank: CheckpointMetadata) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, key in rank.tensors:
        found.setdefault(name, []).append(key)
    return found


def _offsets(ranks: Ranks) -> list[int]:
    """How many files come before those of each rank."""
    return list(accumulate((len(rank.files) for rank in ranks[:-1]), initial=0))


def _moved(tensor: TensorMetadata, files: int) -> TensorMetadata:
    if not files:
        return tensor
    sources = tuple(source.moved(files) for source in tensor.sources)
    return TensorMetadata(
        tensor.name, tensor.key, tensor.shape, tensor.dtype, sources, tensor.has_own_shape, tensor.shards
    )  # much faster than replace


def _moved_parameter(saved: SavedParameter, files: int) -> SavedParameter:
    states = tuple(replace(state, file=state.file + files) for state in saved.replicated)
    own = any(isinstance(value, PerRank) for _, value in saved.scalars)
    scalars = tuple(moved(dict(saved.scalars), files).items()) if own else saved.scalars
    return replace(saved, replicated=states, scalars=scalars)


def shard_by_shard(shards: Sequence[TensorMetadata], files_before: Sequence[int] = ()) -> TensorMetadata:
    """The tensor with these shards, in tensor-parallel order; a :class:`DamagedError` if their dtypes differ.

    ``files_before``: so many more files come before those of each shard.
    """
    first = shards[0]
    if len(shards) == 1:
        return first
    dtypes = [shard.dtype for shard in shards if not shard.is_empty]
    if len(set(dtypes)) > 1:
        problem = f"tensor-parallel ranks saved {first.key} of this parameter in different dtypes"
        raise DamagedError(problem, None, dtypes[0], ", ".join(dtypes), parameter=first.name)
    sources: Iterable[ChunkSource] = chain.from_iterable(tensor.sources for tensor in shards)
    if files_before:
        pairs = zip(shards, files_before, strict=True)
        sources = (source.moved(files) if files else source for tensor, files in pairs for source in tensor.sources)
    shapes = tuple(tensor.shape for tensor in shards)
    dtype = (dtypes or [first.dtype])[0]
    return TensorMetadata(first.name, first.key, first.shape, dtype, tuple(sources), first.has_own_shape, shapes)


def _check_same_stage(first: CheckpointMetadata, other: CheckpointMetadata) -> None:
    both = [(one, other.tensors[key]) for key, one in first.tensors.items() if key in other.tensors]
    pairs = [
        [((each.name, each.key), each.dtype, each.has_own_shape, each.is_quantized) for each in pair]
        for pair in both
        if not any(each.is_empty for each in pair)
    ]

    def facts_of(rank: CheckpointMetadata, at: int) -> dict[str, list[Any]]:
        scalars = ((name, saved.group, dict(saved.scalars)) for name, saved in sorted(rank.parameters.items()))
        return {
            "parameters": sorted(rank.parameters),
            "tensors": sorted(rank.tensors),
            "hyperparameters of the param groups": settings(rank.groups),
            # ranks may differ in the values of all but the step
            "scalar optimizer states": [(name, group, sorted(each), each.get("step")) for name, group, each in scalars],
            "dtypes": [pair[at] for pair in pairs if pair[0] != pair[1]],
        }

    all_found = facts_of(other, 1)
    for what, expected in facts_of(first, 0).items():
        found = all_found[what]
        if expected != found:
            problem = f"tensor-parallel ranks of one pipeline stage were saved with different {what}"
            alone = (_only_in(expected, found), _only_in(found, expected))
            raise DamagedError(problem, other.files[0].path, *(str(items)[:300] for items in alone))


def _only_in(one: Iterable[Any], two: Iterable[Any]) -> list[Any]:
    """What only the first of two lists has, by its text: not each is compared with all."""
    texts = set(map(repr, two))
    return [item for item in one if repr(item) not in texts]


def _united(
    ranks: Ranks,
    tensors: Mapping[tuple[str, str], TensorMetadata],
    parameters: Mapping[str, SavedParameter],
    **degree: Any,
) -> CheckpointMetadata:
    """The union of several; where two disagree, the first counts."""
    aliases = dict(chain.from_iterable(rank.aliases.items() for rank in reversed(ranks)))
    hidden = dict(chain.from_iterable(rank.hidden_names.items() for rank in ranks))
    return replace(
        ranks[0],
        hidden_names=hidden,
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

    Source: ``PipelineModule.save_state_dict`` (pipe/module.py): each layer's state dict, without the layer's number. Of
    a tied layer only the first occurrence has a file, while its parameters are named ``tied_modules.<key>.*``.
    """

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "layer", "tp_rank", "extra_states")

    layer: int
    tp_rank: int
    weights: Mapping[str, TensorRef]
    extra_states: Mapping[str, bytes] = field(default_factory=dict)  # as of ``ModelShard``

    def named(self, known: frozenset[str]) -> dict[str, TensorRef]:
        """Its tensors by FQN, some of which are ``known``; of a tied layer, by the tied module's name."""
        tied = _tied_names(known)
        found = {}
        for key, ref in self.weights.items():
            name = f"{self.layer}.{key}"
            found[name if name in known else tied.get(key, name)] = ref
        return found

    def named_extra_states(self, known: frozenset[str]) -> dict[str, str]:
        """The entry of each extra state by its FQN: where the tensors are named as a tied module's, so is it."""
        tied = next(filter(None, map(_TIED.match, self.named(known))), None)
        prefix = f"{self.layer}." if tied is None else tied[0]
        return {f"{prefix}{entry}": entry for entry in self.extra_states}


@lru_cache(maxsize=2)  # called for every layer with the same names
def _tied_names(known: frozenset[str]) -> dict[str, str]:
    """Name within a tied module -> FQN; not where two end in the same name."""
    names = list(filter(_TIED.match, known))
    counts = Counter(_TIED.sub("", name) for name in names)
    return {_TIED.sub("", name): name for name in names if counts[_TIED.sub("", name)] == 1}


def index_layer(file: PickledFile, layer: int, tp_rank: int) -> LayerShard:
    entries = {str(name): entry for name, entry in checked_tree(file).items()}
    weights = {name: ref for name, ref in entries.items() if isinstance(ref, TensorRef) and not is_extra_state(name)}
    extra = digests(file, extra_states_in(file))
    return LayerShard(**file.facts, layer=layer, tp_rank=tp_rank, weights=weights, extra_states=extra)


@dataclass(frozen=True)
class ExpertShard(SourceFile):
    """One expert's file: its tensors by FQN."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "layer", "expert", "weights", "extra_states")

    layer: int
    expert: int
    weights: Mapping[str, TensorRef]
    extra_states: Mapping[str, bytes] = field(default_factory=dict)  # as of ``ModelShard``

    @property
    def path_of_layer(self) -> str:
        """Where its layer is in the model."""
        name = next(iter(self.weights))
        parts = expert_name(name)
        return name.rpartition(".")[0].rpartition(".")[0] if parts is None else parts.layer


def index_expert(file: PickledFile) -> ExpertShard:
    """Read one expert's file; :class:`DamagedError` if it has anything but that expert's tensors."""
    ((layer, expert, _),) = sort_names([os.path.basename(file.path)], is_universal=False).experts
    entries = {str(name): entry for name, entry in checked_tree(file).items()}
    extra = extra_states_in(file)
    weights = {name: entry for name, entry in entries.items() if isinstance(entry, TensorRef) and name not in extra}
    if lost := {name: text_of(entries[name]) for name in entries if name not in weights and name not in extra}:
        raise not_tensors(file.path, lost)
    found = {name: expert_name(name) for name in weights}
    others = [name for name, e in found.items() if (e.number != expert if e else not name.endswith(f".{expert}"))]
    if others or not weights:
        problem = "this file does not have the weights of the expert that its name says"
        have = listed(others) if others else "no tensors"
        raise LayoutError(problem, file.path, f"tensors of expert {expert} of one layer", have)
    return ExpertShard(**file.facts, layer=layer, expert=expert, weights=weights, extra_states=digests(file, extra))


def with_module_files(
    metadata: CheckpointMetadata,
    weights: Iterable[tuple[SourceFile, int, Mapping[str, TensorRef]]],
    is_buffer: Callable[[str], bool],
    tp: int = 1,
) -> CheckpointMetadata:
    """``metadata`` extended by what files of layers or experts hold: buffers, and parameters that no optimizer owned.

    ``weights`` are of all ``tp`` tensor-parallel ranks: a file, its rank, and its tensors by FQN. Raises
    :class:`UnsupportedError` for views.
    """
    files = list(metadata.files)
    numbers = {file.path: number for number, file in enumerate(metadata.files)}
    shards: dict[str, list[tuple[int, int, TensorRef]]] = {}
    for file, tp_rank, named in weights:
        number = numbers.setdefault(file.path, len(files))
        files += [SourceFile(file.path, file.nbytes, records=file.records)] if number == len(files) else []
        for name, ref in named.items():
            if name not in metadata.parameters:
                refuse_view(name, "this weight or buffer", ref, file.path)
                shards.setdefault(name, []).append((tp_rank, number, ref))
    tensors = {}
    for name, ranks in shards.items():
        ranks.sort(key=lambda item: item[0])
        if [rank for rank, _, _ in ranks] == list(range(tp)):
            key = BUFFER if is_buffer(name) else FROZEN
            tensors[name, key] = shard_by_shard([dense_tensor(name, key, ref, number) for _, number, ref in ranks])
    every = {**metadata.tensors, **tensors} if tensors else metadata.tensors
    return replace(metadata, tensors=every, files=tuple(files))

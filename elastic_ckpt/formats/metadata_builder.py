"""Builds :class:`CheckpointMetadata` for every format: parameters, chunks of their tensors, and notes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple

from elastic_ckpt.core.chunks import FlatTensors, PartitionedChunks, PartitionRule, StorageChunk, by_rank, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange, per_parameter_numel
from elastic_ckpt.core.fqn import cannot_slice, sliced
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    ITEMSIZE,
    MASTER,
    WHOLE_KINDS,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
    TensorTable,
    is_floating,
)
from elastic_ckpt.core.quantized_weights import weight_of
from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    ELEMENTWISE,
    MOMENTS,
    PER_PARAMETER,
    REPLICATED,
    TOUCHED,
    BlockFormat,
    StateOptions,
)
from elastic_ckpt.core.values import merged
from elastic_ckpt.errors import DamagedError, Remedies, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.classification import (
    DAMAGED,
    FRESH,
    OPAQUE,
    UNKNOWN_LENGTHS,
    Lengths,
    RankStates,
    SavedKind,
    classify,
    notes_and_warnings,
)
from elastic_ckpt.formats.known_states import STEP, check_scalars, check_value
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_states import StatesOfOne, normal_groups, resolve_codebooks, with_group_step
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

Shape = tuple[int, ...]
Shapes = Sequence[tuple[str, Shape]]
Tensors = dict[tuple[str, str], TensorMetadata]
_PLAIN = SavedKind(ELEMENTWISE)
_BUFFERS_DIFFERED = "buffers differed between ranks when saved; after a change of topology all ranks get rank 0's"
_SWAPPED = TensorRef("float32", (0,), (1,), 0)  # layout of a swap file


class _Partitioned(NamedTuple):
    """A flat tensor's parameters, how each is partitioned, and the partition of each rank."""

    shapes: Shapes
    rules: Sequence[PartitionRule]
    flats: Sequence[FlatShard]

    @property
    def numel(self) -> int:
        """Elements of each partition, padding included."""
        ends = (rule.start + rule.step for rule in self.rules)
        return max(ends, default=0) if self.flats[0].swapped else self.flats[0].partition_numel


class MetadataBuilder:
    """Collects the metadata of one model-parallel rank, or of a universal checkpoint.

    ``files`` are those that chunks index; swap files follow. ``states`` are (path, optimizer states) of every flat
    tensor, for their quantization maps; ``lengths`` is what their lengths together tell of their kinds.
    """

    def __init__(
        self,
        found: CheckpointInfo,
        files: Iterable[SourceFile],
        options: StateOptions = StateOptions(),  # noqa: B008  frozen
        states: Iterable[tuple[str, StatesOfOne]] = (),
        lengths: Lengths = UNKNOWN_LENGTHS,
    ) -> None:
        self.parameters: dict[str, SavedParameter] = {}
        self.tensors = TensorTable()
        self.notes = list(found.notes)
        self._found = found
        self._files = [SourceFile(file.path, file.nbytes, records=file.records) for file in files]
        self._options = options
        self._codebooks, self._damaged_maps = resolve_codebooks(states)
        self._lengths = lengths
        self._kinds: dict[str, SavedKind] = {}
        self.opaque: dict[str, str] = {}
        self._damaged: dict[str, str] = {}

    def add_flat(
        self,
        shapes: Shapes,
        rules: Sequence[PartitionRule],
        number: int,
        group: Mapping[str, Any],
        flats: Sequence[FlatShard],
        files: range,
        stacked: Mapping[str, Sequence[int]] = MappingProxyType({}),
        is_alone: bool = False,
    ) -> list[str]:
        """Add one flat tensor, partitioned over all ranks: its parameters, their master weights and states.

        ``rules`` say how each parameter is partitioned; ``number`` and ``group`` are their param group; ``flats`` and
        ``files`` have the partition of each rank and the index of its file; ``stacked`` has the experts in parameters
        that stack some, of which the slices are added instead; ``is_alone``: it is one parameter, of its own shape,
        whose states may have any. Returns the FQNs.
        """
        kinds = self._classify(rules, flats, files, shapes[0] if is_alone else None)
        stacks = [name for name, _ in shapes if name in stacked]
        whole = [key for key, kind in kinds.items() if stacks and kind.kind in (TOUCHED, PER_PARAMETER)]
        if whole and self._options.are_restored:
            raise cannot_slice(whole[0], stacks[0])
        kinds = {key: kind for key, kind in kinds.items() if key not in whole}
        shapes, rules = sliced(shapes, rules, stacked)
        first = flats[0]
        states = first.states
        saved = (dict(flat.states.scalars) for flat in flats)
        if len({id(flat.states.scalars) for flat in flats}) > 1:  # files share what they have in common
            of_ranks = merged((range(file, file + 1), values) for file, values in zip(files, saved, strict=True))
            states = replace(states, scalars=tuple(of_ranks.items()))
        path = self._files[files[0]].path
        scalars = with_group_step(states.scalars, bool(states.tensors or first.swapped), group)
        check_value(path, STEP, dict(scalars).get(STEP, 0), self._options)
        check_scalars(path, scalars, self._options, shapes[0][0] if shapes else None)
        replicated = []
        for key in (key for key, kind in kinds.items() if kind.kind == REPLICATED):
            ref = states.tensors[key]
            digests = [flat.states.digests.get(key) for flat in flats]
            crc32 = 0 if digests[0] is None else digests[0].crc32
            differs = None in digests or len(set(digests)) > 1 or not ref.is_contiguous
            replicated.append(ReplicatedState(key, ref.dtype, ref.shape, files[0], ref.byte_offset, crc32, differs))
        for name, shape in shapes:
            if name in self.parameters:
                problem = "this parameter is listed twice: it has two masters"
                raise DamagedError(problem, path, "every parameter in one flat tensor", "two", parameter=name)
            self.parameters[name] = SavedParameter(shape, number, scalars, tuple(replicated))
        if is_alone:
            refuse_view(shapes[0][0], f"{MASTER} of this parameter", first.master, self._files[files[0]].path)
        partitioned = _Partitioned(shapes, rules, flats)
        found = {}
        for key in first.swapped:
            swapped = range(len(self._files), len(self._files) + len(flats))
            found[key] = self._partitioned(partitioned, key, [_SWAPPED] * len(flats), _PLAIN, swapped)
            self._files += [flat.swapped[key] for flat in flats]
        if MASTER not in first.swapped:
            found[MASTER] = self._partitioned(partitioned, MASTER, [flat.master for flat in flats], _PLAIN, files)
        for key, kind in kinds.items():
            refs = [flat.states.tensors[key] for flat in flats if key in flat.states.tensors]  # all, unless opaque
            if kind.kind == ELEMENTWISE:
                found[key] = self._partitioned(partitioned, key, refs, kind, files)
            elif kind.kind == TOUCHED:
                self._add_touched(partitioned, key, refs, files)
            elif kind.kind == PER_PARAMETER:
                name = shapes[0][0]
                self.tensors.add({(name, key): dense_tensor(name, key, refs[0], files[0], has_own_shape=True)})
        self.tensors.add_flat(shapes, rules, found)
        return [name for name, _ in shapes]

    def _classify(
        self, rules: Sequence[PartitionRule], flats: Sequence[FlatShard], files: range, alone: tuple[str, Shape] | None
    ) -> dict[str, SavedKind]:
        """The kinds of the states of one flat tensor, or one parameter; records those that are opaque or damaged."""
        changes = [0] * (len(flats) + 1)
        for rule in rules:
            if rule.numel:
                changes[rule.ranks.start] += rule.numel
                changes[rule.ranks.stop] -= rule.numel
        touched = [-1] if alone else accumulate(changes[:-1])
        ranks = [
            RankStates(self._files[file].path, alone[1] if alone else (flat.partition_numel,), each, flat.states)
            for file, flat, each in zip(files, flats, touched, strict=True)
        ]
        has_tensors = any(flat.states.tensors for flat in flats)
        kinds = self._with_damaged_maps(classify(ranks, self._options, lengths=self._lengths)) if has_tensors else {}
        for key, kind in kinds.items():
            if kind.kind == OPAQUE and alone and key not in COMPANIONS:
                kinds[key] = replace(kind, kind=PER_PARAMETER)
            view = _first_view(key, kind, flats)
            if view and kinds[key].kind in (ELEMENTWISE, PER_PARAMETER, TOUCHED):
                kinds[key] = replace(kind, kind=OPAQUE, why=view)
        if alone:
            kinds |= _uneven_moments(kinds, flats[0].states.tensors)
        self.record(kinds, alone[0] if alone else "")
        for flat in flats:
            opaque = flat.states.opaque.items()
            self.opaque |= {key: why for key, why in opaque if self._options.schema.get(key) != FRESH}
        return kinds

    def _with_damaged_maps(self, kinds: Mapping[str, SavedKind]) -> dict[str, SavedKind]:
        """Kinds of which those of quantized states without a sound map are :data:`DAMAGED`."""
        maps = {key: self._damaged_maps.get(COMPANIONS[key][1]) for key, kind in kinds.items() if kind.block_numel}
        return dict(kinds) | {key: replace(kinds[key], kind=DAMAGED, why=why) for key, why in maps.items() if why}

    def record(self, kinds: Mapping[str, SavedKind], name: str = "") -> None:
        """Record the kinds of some states, and which are opaque or damaged; ``name``: whose they are, if of one."""
        for key, kind in kinds.items():
            known = self._kinds.setdefault(key, kind)
            if {known.kind, kind.kind} == {ELEMENTWISE, REPLICATED}:
                self.opaque[key] = "one value for each element of some parameters, but one tensor for others"
        self._kinds |= kinds
        self.opaque |= {key: kind.why for key, kind in kinds.items() if kind.kind == OPAQUE}
        where = f" ({name})" if name else ""
        self._damaged |= {key: f"{kind.why}{where}" for key, kind in kinds.items() if kind.kind == DAMAGED}

    def _partitioned(
        self, partitioned: _Partitioned, key: str, refs: Sequence[TensorRef], kind: SavedKind, files: range
    ) -> FlatTensors:
        """A state laid out as the partition; ``refs`` by rank."""
        dtype = self._one_dtype(partitioned, key, refs, files)
        blocks = None
        scales = array("q")
        if kind.block_numel:
            blocks = BlockFormat(kind.block_numel, COMPANIONS[key][0], self._codebooks[COMPANIONS[key][1]])
            scales = by_rank(flat.states.tensors[blocks.scales].byte_offset for flat in partitioned.flats)
        offsets = by_rank(ref.byte_offset for ref in refs)
        return FlatTensors(files, offsets, partitioned.numel, dtype, ITEMSIZE[dtype], kind.planes, blocks, scales)

    def _add_touched(self, partitioned: _Partitioned, key: str, refs: Sequence[TensorRef], files: range) -> None:
        """Add whole parameters, one after the other; if several ranks saved one, the first rank's copy counts."""
        dtype = self._one_dtype(partitioned, key, refs, files)
        offsets = [ref.byte_offset for ref in refs]
        for (name, shape), rule in zip(partitioned.shapes, partitioned.rules, strict=True):
            sources = chunks_of()
            for rank in reversed(rule.ranks):
                sources = chunks_of(StorageChunk(FlatRange(0, rule.numel), files[rank], offsets[rank]))
                offsets[rank] += rule.numel * ITEMSIZE[dtype]
            self.tensors.add({(name, key): TensorMetadata(name, key, shape, dtype, sources)})

    def _one_dtype(self, partitioned: _Partitioned, key: str, refs: Sequence[TensorRef], files: range) -> str:
        """The dtype of the flat tensors of all ranks; a :class:`DamagedError` if they differ."""
        dtype = refs[0].dtype
        for rank, ref in enumerate(refs):
            if ref.dtype != dtype:
                named = zip(partitioned.shapes, partitioned.rules, strict=True)
                name = next((name for (name, _), rule in named if rank in rule.ranks), None)
                problem = f"ranks saved {key} of this parameter in different dtypes"
                expected = f"{dtype}, as on others"
                raise DamagedError(problem, self._files[files[rank]].path, expected, ref.dtype, parameter=name)
        return dtype

    def build(
        self, model: ModelShard, zero_stage: int, groups: Sequence[Mapping[str, Any]], **source: Any
    ) -> CheckpointMetadata:
        """The metadata of a run of ``zero_stage``, whose model-states files ``model`` represents."""
        partition_degree = int(model.counters.get("dp_world_size", 1))
        facts = self._found.source(zero_stage, partition_degree, model.ds_version, **source)
        more: dict[str, Any] = {"aliases": model.shared, "declared": model.declared, "run": model.run}
        more["hidden_names"] = model.hidden
        more["stacked"] = {name: sum(map(len, placed)) for name, placed in model.stacked.items()}
        return self.metadata(facts, groups, crc32s=weights_crc32s([model]), **more)

    def metadata(
        self, source: SourceFacts, groups: Sequence[Mapping[str, Any]], warnings: Iterable[str] = (), **facts: Any
    ) -> CheckpointMetadata:
        """What was collected, with ``facts`` as further fields."""
        fresh = frozenset(key for key, kind in self._kinds.items() if kind.kind == FRESH)
        scalars = {id(saved.scalars): saved.scalars for saved in self.parameters.values()}.values()
        values = frozenset(chain((key for each in scalars for key, _ in each), *groups))
        notes, unmatched = notes_and_warnings(self._kinds, self._options, values)
        return CheckpointMetadata(
            source=source,
            files=tuple(self._files),
            parameters=self.parameters,
            tensors=self.tensors,
            groups=normal_groups(groups, is_bitsandbytes=bool(self._codebooks)),
            states=StateFacts(self.opaque, self._damaged, fresh),
            notes=(*self.notes, *notes),
            warnings=(*unmatched, *warnings),
            **facts,
        )


def _first_view(key: str, kind: SavedKind, flats: Sequence[FlatShard]) -> str:
    """What is a view of a state, or of the scales of its codes, on any rank, since both are read in one piece."""
    for name in (key, COMPANIONS[key][0]) if kind.block_numel else (key,):
        # files share what they have in common
        refs = {id(ref): ref for ref in (flat.states.tensors.get(name) for flat in flats) if ref is not None}
        view = next((ref for ref in refs.values() if not ref.is_contiguous), None)
        if view is not None:
            of_scales = "" if name == key else f"its scales, {name}, are "
            return f"{of_scales}a view of shape {view.shape} and strides {view.stride}"
    return ""


def _uneven_moments(kinds: Mapping[str, SavedKind], tensors: Mapping[str, TensorRef]) -> dict[str, SavedKind]:
    """Kinds of one parameter's moments: damaged where they differ in shape, or are no real numbers.

    Whatever the shape is in which an optimizer keeps them, it is that of all.
    """
    moments = {key: tensors[key] for key in MOMENTS if key in kinds and kinds[key].kind in (ELEMENTWISE, PER_PARAMETER)}
    shapes = {ref.shape for ref in moments.values()}
    found = ", ".join(f"{key} {ref.dtype} of shape {ref.shape}" for key, ref in moments.items())
    is_sound = len(shapes) < 2 and all(map(is_floating, (ref.dtype for ref in moments.values())))
    return (
        {}
        if is_sound
        else {key: SavedKind(DAMAGED, why=f"moments that do not fit together: {found}") for key in moments}
    )


def dense_tensor(
    name: str, key: str, ref: TensorRef, file: int, shape: Shape | None = None, has_own_shape: bool = False
) -> TensorMetadata:
    """A tensor that is whole in one file, of the shape that it has there unless ``shape`` is given."""
    sources = chunks_of(StorageChunk(FlatRange(0, ref.numel), file, ref.byte_offset)) if ref.numel else chunks_of()
    return TensorMetadata(name, key, ref.shape if shape is None else shape, ref.dtype, sources, has_own_shape)


def weights_crc32s(models: Sequence[ModelShard]) -> dict[str, tuple[int, ...]]:
    """CRC32s of weights, by tensor-parallel rank, where they are compared.

    With experts, DeepSpeed saves tied weights once per name. Of others, those of what describes quantized weights.
    """
    found: dict[str, tuple[int, ...]] = {}
    every = bool(models[0].features.experts)
    for model in models:
        compared = {name: ref for name, ref in model.weights.items() if every or weight_of(name) is not None}
        known = {(offset, nbytes): crc32 for offset, nbytes, crc32 in model.records if crc32} if compared else {}
        for name, ref in compared.items():
            if (crc32 := known.get((ref.byte_offset, ref.numel * ITEMSIZE[ref.dtype]))) is not None:
                found[name] = (*found.get(name, ()), crc32)
    return {name: crc32s for name, crc32s in found.items() if len(crc32s) == len(models)}


def refuse_view(name: str, what: str, ref: TensorRef, path: str, remedy: Remedies = None) -> None:
    """Raise :class:`UnsupportedError` for a tensor that is not contiguous; ``remedy``: if the class's does not fit."""
    if not ref.is_contiguous:
        problem = f"{what} was saved as a view that is not contiguous, which is not supported yet"
        found = f"shape {ref.shape}, strides {ref.stride}"
        raise UnsupportedError(problem, path, "a contiguous tensor", found, parameter=name, remedy=remedy)


def module_tensors(
    models: Sequence[ModelShard], own: int | None, trained: Iterable[str], first_file: int = 0
) -> tuple[Tensors, list[str]]:
    """Buffers and frozen parameters, which no optimizer owned, by (name, key); and notes for the report.

    ``models`` are a model-parallel rank's files in data-parallel order; buffers are taken from ``own``: this rank's own
    if the topology is unchanged; ``None``: from rank 0's. An optimizer owned ``trained``.
    """
    tensors: Tensors = {}
    number = own or 0
    source = models[number]

    def add(name: str, key: str, ref: TensorRef, file: int) -> None:
        refuse_view(name, f"this {WHOLE_KINDS[key]}", ref, source.path)
        tensors[name, key] = dense_tensor(name, key, ref, first_file + file)

    for name in source.buffers:
        add(name, BUFFER, source.weights[name], number)
    is_zero3 = "zero_pp_rank_" in source.path.rsplit("/", 1)[-1]
    partitioned = dict(source.frozen_shapes) if len(models) > 1 or is_zero3 else {}
    for name, shape in partitioned.items():
        if all(name in shard.frozen_fragments for shard in models):
            tensors[name, FROZEN] = _partitioned(models, name, shape, first_file)
    skipped = {*trained, *source.buffers, *partitioned, *source.shared}
    of_buffers = {source.weights[name] for name in source.buffers}
    for name, ref in ((name, ref) for name, ref in source.weights.items() if name not in skipped):
        if not is_zero3:
            add(name, FROZEN, ref, 0)
        elif ref.numel and ref in of_buffers:  # DeepSpeed does not list a submodule's second name
            add(name, BUFFER, ref, number)
        elif ref.numel and weight_of(name) is not None:  # whole on each rank, beside a weight that is partitioned
            add(name, FROZEN, ref, number)
    if not is_zero3:
        # exclude_frozen_parameters removes only the first name of tied frozen weights
        for alias, name in source.shared.items():
            if alias in source.weights and name not in source.weights and name not in skipped:
                add(name, FROZEN, source.weights[alias], 0)
    return tensors, [_BUFFERS_DIFFERED] * (own is None and len({shard.buffers_crc32 for shard in models}) > 1)


def _partitioned(models: Sequence[ModelShard], name: str, shape: Shape, first_file: int) -> TensorMetadata:
    """A frozen parameter under ZeRO-3: each rank's file has its padded partition."""
    refs = [shard.frozen_fragments[name] for shard in models]
    numel = math.prod(shape)
    first = refs[0]  # padding may have made partitions longer than need be
    rule = PartitionRule(numel, max(first.numel, per_parameter_numel(numel, len(models))))
    for rank in rule.ranks:
        mine = min(rule.step, numel - rank * rule.step)
        ref = refs[rank]
        refuse_view(name, "a rank's part of this frozen parameter", ref, models[rank].path)
        if mine > ref.numel or (ref.numel, ref.dtype) != (first.numel, first.dtype):
            problem = "a rank's part of this frozen parameter has the wrong size or dtype"
            expected = f"{mine} elements of {first.dtype}"
            found = f"{ref.numel} of {ref.dtype}"
            raise DamagedError(problem, models[rank].path, expected, found, parameter=name)
    files = range(first_file, first_file + len(refs))
    offsets = by_rank(ref.byte_offset for ref in refs)
    flat = FlatTensors(files, offsets, rule.step, first.dtype, ITEMSIZE[first.dtype])
    sources = (PartitionedChunks(rule, flat),) if numel else chunks_of()
    return TensorMetadata(name, FROZEN, shape, first.dtype, sources)

"""Builds :class:`CheckpointMetadata` for every format: parameters, chunks of their tensors, and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.flat_ranges import FlatRange, Placement, per_parameter_numel, per_parameter_partition
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    StorageChunk,
    TensorMetadata,
)
from elastic_ckpt.core.state_kinds import COMPANIONS, ELEMENTWISE, REPLICATED, TOUCHED, WHOLE, StateOptions
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.classify import DAMAGED, FRESH, OPAQUE, RankStates, SavedKind, classify
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_states import (
    StatesOfOne,
    block_code,
    kind_notes,
    normal_groups,
    resolve_codebooks,
    unmatched_names,
    with_group_step,
)
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

Shape = tuple[int, ...]
Shapes = Sequence[tuple[str, Shape]]
Tensors = dict[tuple[str, str], TensorMetadata]
_PLAIN = SavedKind(ELEMENTWISE)
_BUFFERS_DIFFERED = "buffers differed between ranks when saved; after a change of topology all ranks get rank 0's"
#: Layout of a swap file.
_SWAPPED = TensorRef("float32", (0,), (1,), 0)


class MetadataBuilder:
    """Collects the metadata of one model-parallel rank, or of a universal checkpoint.

    Args:
        found: the folder.
        files: those that chunks index; swap files follow.
        options: the user's declarations about optimizer states.
        states: (path, optimizer states) of every flat tensor, for their quantization maps; raises
            :class:`DamagedError` if one cannot be restored.
    """

    def __init__(
        self,
        found: Found,
        files: Iterable[SourceFile],
        options: StateOptions = StateOptions(),  # noqa: B008  frozen
        states: Iterable[tuple[str, StatesOfOne]] = (),
    ) -> None:
        self.parameters: dict[str, SavedParameter] = {}
        self.tensors: Tensors = {}
        self.scalar_forms: dict[str, str] = {}
        self.notes = list(found.notes)
        self._found = found
        self._files = [SourceFile(file.path, file.nbytes, records=file.records) for file in files]
        self._options = options
        self._codebooks, self._map_notes = resolve_codebooks(states)
        self._kinds: dict[str, SavedKind] = {}
        self._opaque: dict[str, str] = {}
        self._damaged: dict[str, str] = {}
        self._chunks: dict[tuple[str, str], tuple[Shape, str, list[StorageChunk]]] = {}

    def classify(
        self, ranks: Sequence[RankStates], states: Iterable[StatesOfOne], parameter: str = "", any_shape: bool = False
    ) -> dict[str, SavedKind]:
        """The kinds of the states of one flat partition; records those that are opaque or damaged.

        Args:
            ranks, states: what each rank saved for it, and the same unclassified.
            parameter: named in errors about damaged states.
            any_shape: whether the partition is one parameter, whose states may have any shape.
        """
        kinds = classify(ranks, self._options) if ranks[0].tensors else {}
        self._kinds |= kinds
        for key, kind in kinds.items():
            if kind.kind == OPAQUE and any_shape and key not in COMPANIONS:
                kinds[key] = replace(kind, kind=WHOLE)
            elif kind.kind == OPAQUE:
                self._opaque[key] = kind.why
            elif kind.kind == DAMAGED:
                self._damaged[key] = f"{kind.why} ({parameter})" if parameter else kind.why
        for each in states:
            self._opaque |= {key: why for key, why in each.opaque.items() if self._options.schema.get(key) != FRESH}
        return kinds

    def add_flat(
        self,
        shapes: Shapes,
        number: int,
        group: Mapping[str, Any],
        ranks: Sequence[tuple[int, FlatShard, Sequence[Placement]]],
        kinds: Mapping[str, SavedKind],
    ) -> None:
        """Add one flat tensor, partitioned over ``ranks``: its parameters, their master weights and states.

        Args:
            shapes: names and logical shapes of the parameters.
            number, group: their param group.
            ranks: per rank, the index of its file, its partition, and the placements of parameters in it.
            kinds: of the states.
        """
        file, first, _ = ranks[0]
        states = first.states
        scalars = with_group_step(states.scalars, bool(states.tensors or first.swapped), group)
        self.scalar_forms |= states.scalar_forms
        replicated = []
        for key in (key for key, kind in kinds.items() if kind.kind == REPLICATED):
            ref, digests = states.tensors[key], [flat.states.digests.get(key) for _, flat, _ in ranks]
            crc32 = 0 if digests[0] is None else digests[0].crc32
            differs = None in digests or len(set(digests)) > 1 or not ref.is_contiguous
            replicated.append(ReplicatedState(key, ref.dtype, ref.shape, file, ref.byte_offset, crc32, differs))
        for name, shape in shapes:
            self.parameters[name] = SavedParameter(shape, number, scalars, tuple(replicated))
        for file, flat, placed in ranks:
            self._add_partition(shapes, placed, flat, kinds, file)

    def _add_partition(
        self, shapes: Shapes, placed: Sequence[Placement], flat: FlatShard, kinds: Mapping[str, SavedKind], file: int
    ) -> None:
        for key, source in flat.swapped.items():
            self._files.append(source)
            self._add_region(shapes, placed, flat, key, _SWAPPED, _PLAIN, len(self._files) - 1)
        if MASTER not in flat.swapped:
            self._add_region(shapes, placed, flat, MASTER, flat.master, _PLAIN, file)
        for key, kind in kinds.items():
            ref = flat.states.tensors[key]
            if kind.kind == ELEMENTWISE:
                self._add_region(shapes, placed, flat, key, ref, kind, file)
            elif kind.kind == TOUCHED:
                self._add_touched(shapes, placed, key, ref, file)
            elif kind.kind == WHOLE:
                name = shapes[placed[0].index][0]
                self.tensors[name, key] = dense_tensor(name, key, ref, file, is_whole=True)

    def _add_region(
        self,
        shapes: Shapes,
        placed: Sequence[Placement],
        flat: FlatShard,
        key: str,
        ref: TensorRef,
        kind: SavedKind,
        file: int,
    ) -> None:
        """Add a tensor laid out as the partition, in each of its rows."""
        if not ref.is_contiguous:
            self._opaque[key] = f"a view of shape {ref.shape} and strides {ref.stride}"
            return
        itemsize, row_numel = ITEMSIZE[ref.dtype], flat.partition_numel
        for row in range(kind.rows):
            for placement in placed:
                name, shape = shapes[placement.index]
                inside, start = placement.range, placement.flat_offset
                if row:
                    skipped = row * math.prod(shape)
                    inside = FlatRange(skipped + inside.start, skipped + inside.stop)
                offset = ref.byte_offset + (row * row_numel + start) * itemsize
                code = block_code(key, kind, flat.states, self._codebooks, row, row_numel, start)
                whole = shape if kind.rows == 1 else (kind.rows, *shape)
                self._add_chunk(name, key, whole, ref.dtype, StorageChunk(inside, file, offset, code))

    def _add_touched(self, shapes: Shapes, placed: Sequence[Placement], key: str, ref: TensorRef, file: int) -> None:
        """Add whole parameters, one after the other; if several ranks saved one, the first rank's copy counts."""
        offset = ref.byte_offset
        for placement in placed:
            name, shape = shapes[placement.index]
            numel = math.prod(shape)
            if (name, key) not in self._chunks:
                self._add_chunk(name, key, shape, ref.dtype, StorageChunk(FlatRange(0, numel), file, offset))
            offset += numel * ITEMSIZE[ref.dtype]

    def _add_chunk(self, name: str, key: str, shape: Shape, dtype: str, chunk: StorageChunk) -> None:
        known = self._chunks.get((name, key))
        if known is None:
            known = self._chunks[name, key] = shape, dtype, []
        if known[1] != dtype:
            raise DamagedError(
                f"ranks saved {key} of this parameter in different dtypes",
                parameter=name,
                file=self._files[chunk.file].path,
                expected=f"{known[1]}, as on other ranks",
                found=dtype,
                remedy="files of two saves are mixed: restore the folder from its original, or take another tag",
            )
        if chunk.range.stop > chunk.range.start:
            known[2].append(chunk)

    def build(
        self, model: ModelShard, zero_stage: int, groups: Sequence[Mapping[str, Any]], **source: Any
    ) -> CheckpointMetadata:
        """The metadata, with ``groups`` as hyperparameters per param group, and ``source`` in its :class:`SourceFacts`.

        ``model`` is the model-states file that represents all, ``zero_stage`` that of the run that saved it.
        """
        made: Tensors = {}
        for (name, key), (shape, dtype, chunks) in self._chunks.items():
            if len(shape) > len(self.parameters[name].shape):  # rank after rank, each with some of every row
                chunks.sort(key=lambda chunk: chunk.range.start)
            made[name, key] = TensorMetadata(name, key, shape, dtype, tuple(chunks))
        found, dp = self._found, int(model.counters.get("dp_world_size", 1))
        fresh = (key for key, kind in self._kinds.items() if kind.kind == FRESH)
        return CheckpointMetadata(
            source=SourceFacts(found.format, found.folder, found.tag, zero_stage, dp, model.ds_version, **source),
            files=tuple(self._files),
            parameters=self.parameters,
            tensors=made | self.tensors,
            groups=normal_groups(groups, is_bitsandbytes=bool(self._codebooks)),
            states=StateFacts(self._opaque, self._damaged, frozenset(fresh), self.scalar_forms),
            notes=(*self.notes, *self._map_notes, *kind_notes(self._kinds)),
            warnings=unmatched_names(self._kinds, self._options),
            aliases=model.shared,
            declared=model.declared,
            run=model.run,
        )


def dense_tensor(
    name: str, key: str, ref: TensorRef, file: int, shape: Shape | None = None, is_whole: bool = False
) -> TensorMetadata:
    """A tensor that is whole in one file, of the shape that it has there unless ``shape`` is given."""
    chunks = (StorageChunk(FlatRange(0, ref.numel), file, ref.byte_offset),) if ref.numel else ()
    return TensorMetadata(name, key, ref.shape if shape is None else shape, ref.dtype, chunks, is_whole)


def refuse_view(name: str, what: str, ref: TensorRef, path: str) -> None:
    """Raise :class:`UnsupportedError` for a tensor that is not contiguous."""
    if not ref.is_contiguous:
        raise UnsupportedError(
            f"{what} was saved as a view that is not contiguous, which is not supported yet",
            parameter=name,
            file=path,
            expected="a contiguous tensor",
            found=f"shape {ref.shape}, strides {ref.stride}",
            remedy="load at the topology it was saved with, or make it contiguous before saving",
        )


def module_tensors(
    models: Sequence[ModelShard], own: int, trained: Iterable[str], first_file: int = 0
) -> tuple[Tensors, list[str]]:
    """Buffers and frozen parameters, which no optimizer owned, by (name, key); and notes for the report.

    Args:
        models: a model-parallel rank's model-states files, in data-parallel order.
        own: the file to take buffers from: this rank's own if the topology is unchanged, else 0.
        trained: names that an optimizer owned.
        first_file: index of the first file.
    """
    tensors: Tensors = {}
    source = models[own]

    def add(name: str, key: str, ref: TensorRef, file: int) -> None:
        refuse_view(name, f"this {key}", ref, source.path)
        tensors[name, key] = dense_tensor(name, key, ref, first_file + file)

    for name in source.buffers:
        add(name, BUFFER, source.weights[name], own)
    is_zero3 = "zero_pp_rank_" in source.path.rsplit("/", 1)[-1]
    partitioned = dict(source.frozen_shapes) if len(models) > 1 or is_zero3 else {}
    for name, shape in partitioned.items():
        if all(name in shard.frozen_fragments for shard in models):
            tensors[name, FROZEN] = _partitioned(models, name, shape, first_file)
    skipped = {*trained, *source.buffers, *partitioned, *source.shared}
    if not is_zero3:
        for name in (name for name in source.weights if name not in skipped):
            add(name, FROZEN, source.weights[name], 0)
        # exclude_frozen_parameters removes only the first name of tied frozen weights
        for alias, name in source.shared.items():
            if alias in source.weights and name not in source.weights and name not in skipped:
                add(name, FROZEN, source.weights[alias], 0)
    differ = own == 0 and len({shard.buffers_crc32 for shard in models}) > 1
    return tensors, [_BUFFERS_DIFFERED] if differ else []


def _partitioned(models: Sequence[ModelShard], name: str, shape: Shape, first_file: int) -> TensorMetadata:
    """A frozen parameter under ZeRO-3: each rank's file has its padded partition."""
    numel, chunks = math.prod(shape), []
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
            chunks.append(StorageChunk(placement.range, first_file + rank, ref.byte_offset))
    return TensorMetadata(name, FROZEN, shape, dtype, tuple(chunks))

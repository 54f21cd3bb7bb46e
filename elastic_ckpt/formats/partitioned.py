"""Checkpoints of ZeRO-1, 2 and 3 -> CheckpointMetadata: where each parameter is in the partitions of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange, Placement
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StorageChunk,
    TensorMetadata,
)
from elastic_ckpt.core.state_kinds import ELEMENTWISE, REPLICATED, TOUCHED, Codebook, StateOptions
from elastic_ckpt.formats.base import Found, source_file
from elastic_ckpt.formats.classify import DAMAGED, FRESH, OPAQUE, Held, SavedKind, classify
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.module_tensors import module_tensors
from elastic_ckpt.formats.pickled import TensorRef
from elastic_ckpt.formats.saved_groups import normal_groups, with_group_step
from elastic_ckpt.formats.saved_states import block_code, kind_notes, resolve_codebooks, unmatched_names
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard
from elastic_ckpt.formats.zero3 import place_zero3
from elastic_ckpt.formats.zero12 import place_zero12

_PLAIN = SavedKind(ELEMENTWISE)
_SWAPPED_DTYPE = "float32"


def partitioned_metadata(
    found: Found,
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    own: int | None,
    options: StateOptions,
) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer states are partitioned.

    Args:
        found: the folder.
        models: its model-states files, in rank order.
        optimizers: its optimizer-states files, in rank order.
        own: the model-states file of this rank, where each rank of the job takes buffers from another one; ``None``:
            all take them from the first.
        options: the user's word on optimizer states.
    """
    files = [source_file(item) for item in models] + [source_file(item) for item in optimizers]
    codebooks, map_notes = resolve_codebooks((shard.path, flat.states) for shard in optimizers for flat in shard.flats)
    collector = _Collector(files, models[0], optimizers, codebooks, options)
    for flat in range(len(models[0].param_shapes)):
        collector.add(flat, first_shard=len(models))
    tensors = collector.tensors()
    whole, notes = module_tensors(models, own or 0, frozenset(collector.parameters))
    return CheckpointMetadata(
        source=SourceFacts(
            "native", found.folder, found.tag, optimizers[0].zero_stage, len(optimizers), models[0].ds_version
        ),
        files=tuple(collector.files),
        parameters=collector.parameters,
        tensors={**tensors, **whole},
        groups=normal_groups(optimizers[0].groups, is_bitsandbytes=bool(codebooks)),
        aliases=models[0].shared,
        opaque_states=collector.opaque,
        damaged_states=collector.damaged,
        fresh_states=frozenset(key for key, kind in collector.kinds.items() if kind.kind == FRESH),
        scalar_forms=collector.scalar_forms,
        frozen_recorded=models[own or 0].frozen_recorded,
        buffers_of_this_rank=own is not None,
        notes=found.notes + notes + map_notes + kind_notes(collector.kinds),
        warnings=unmatched_names(collector.kinds, options),
    )


@dataclass(slots=True)
class _Collected:
    """What is known so far of one tensor: its dtype, how many rows of its parameter's elements it has, its chunks."""

    dtype: str
    rows: int
    chunks: list[StorageChunk]


class _Collector:
    """Collects parameters and the chunks of their tensors, one flat partition after the other."""

    def __init__(
        self,
        files: list[SourceFile],
        model: ModelShard,
        shards: Sequence[OptimizerShard],
        codebooks: Mapping[str, Codebook],
        options: StateOptions,
    ) -> None:
        self.files = files
        self.parameters: dict[str, SavedParameter] = {}
        self.opaque: dict[str, str] = {}
        self.damaged: dict[str, str] = {}
        self.scalar_forms: dict[str, str] = {}
        self.kinds: dict[str, SavedKind] = {}
        self._model = model
        self._shards = shards
        self._codebooks = codebooks
        self._options = options
        self._collected: dict[tuple[str, str], _Collected] = {}

    def add(self, flat: int, first_shard: int) -> None:
        """One flat partition, of all ranks."""
        dp = len(self._shards)
        place = place_zero3 if self._shards[0].zero_stage == 3 else place_zero12
        placements = [place(self._model, shard, flat, dp) for shard in self._shards]
        kinds = self._classify(flat, placements)
        self._add_parameters(flat, kinds, first_shard)
        for shard, placed in zip(self._shards, placements, strict=True):
            part, file = shard.flats[flat], first_shard + shard.dp_rank
            self._add_swapped(flat, part, placed)
            if MASTER not in part.swapped:
                self._add_region(flat, MASTER, part.master, file, placed, _PLAIN, part)
            for key, kind in kinds.items():
                ref = part.states.tensors[key]
                if kind.kind == TOUCHED:
                    self._add_touched(flat, key, ref, file, placed)
                elif kind.kind == ELEMENTWISE:
                    self._add_region(flat, key, ref, file, placed, kind, part)

    def _classify(self, flat: int, placements: Sequence[Sequence[Placement]]) -> dict[str, SavedKind]:
        shapes = self._model.param_shapes[flat]
        held = []
        for shard, placed in zip(self._shards, placements, strict=True):
            part = shard.flats[flat]
            touched = sum(math.prod(shapes[index][1]) for index in {placement.index for placement in placed})
            states = part.states
            held.append(Held(shard.path, part.partition_numel, touched, states.tensors, states.digests))
        kinds = classify(held, self._options) if held[0].tensors else {}
        for key, kind in kinds.items():
            if kind.kind == OPAQUE:
                self.opaque[key] = kind.why
            elif kind.kind == DAMAGED:
                self.damaged[key] = kind.why
        self.kinds.update(kinds)
        skipped = {key for key, word in self._options.schema.items() if word == FRESH}
        for shard in self._shards:
            states = shard.flats[flat].states
            self.opaque.update({key: what for key, what in states.opaque.items() if key not in skipped})
        return kinds

    def _add_parameters(self, flat: int, kinds: Mapping[str, SavedKind], first_shard: int) -> None:
        first = self._shards[0]
        part, group = first.flats[flat], first.flat_groups[flat]
        states = part.states
        scalars = with_group_step(
            states.scalars, bool(states.tensors or part.swapped), first.groups[group] if first.groups else {}
        )
        self.scalar_forms.update(states.scalar_forms)
        replicated = tuple(
            self._replicated(flat, key, first_shard) for key, kind in kinds.items() if kind.kind == REPLICATED
        )
        for name, shape in self._model.param_shapes[flat]:
            self.parameters[name] = SavedParameter(shape, group, scalars, replicated)

    def _replicated(self, flat: int, key: str, first_shard: int) -> ReplicatedState:
        digests = {shard.flats[flat].states.digests.get(key) for shard in self._shards}
        states = self._shards[0].flats[flat].states
        ref, digest = states.tensors[key], states.digests.get(key)
        differs = len(digests) > 1 or digest is None or not ref.is_contiguous
        crc32 = 0 if digest is None else digest.crc32
        return ReplicatedState(key, ref.dtype, ref.shape, first_shard, ref.byte_offset, crc32, differs)

    def _add_swapped(self, flat: int, part: FlatShard, placements: Sequence[Placement]) -> None:
        for key, source in part.swapped.items():
            self.files.append(source)
            for placement in placements:
                offset = placement.flat_offset * ITEMSIZE[_SWAPPED_DTYPE]
                chunk = StorageChunk(placement.range, len(self.files) - 1, offset)
                self._append(flat, placement.index, key, chunk, _SWAPPED_DTYPE)

    def _add_region(
        self,
        flat: int,
        key: str,
        ref: TensorRef,
        file: int,
        placements: Sequence[Placement],
        kind: SavedKind,
        part: FlatShard,
    ) -> None:
        """A tensor that is cut as the partition is, ``rows`` times one behind the other."""
        if not ref.is_contiguous:
            self.opaque[key] = f"a view of shape {ref.shape} and strides {ref.stride}"
            return
        itemsize = ITEMSIZE[ref.dtype]
        for row in range(kind.rows):
            for placement in placements:
                inside, start = placement.range, placement.flat_offset
                if row:
                    skipped = row * math.prod(self._model.param_shapes[flat][placement.index][1])
                    inside = FlatRange(skipped + inside.start, skipped + inside.stop)
                offset = ref.byte_offset + (row * part.partition_numel + start) * itemsize
                code = block_code(key, kind, part.states, self._codebooks, row, part.partition_numel, start)
                self._append(flat, placement.index, key, StorageChunk(inside, file, offset, code), ref.dtype, kind.rows)

    def _add_touched(self, flat: int, key: str, ref: TensorRef, file: int, placements: Sequence[Placement]) -> None:
        """Whole parameters, of which several ranks may hold the same ones: the first rank's are taken."""
        position = 0
        for placement in placements:
            name, shape = self._model.param_shapes[flat][placement.index]
            numel = math.prod(shape)
            if (name, key) not in self._collected:
                offset = ref.byte_offset + position * ITEMSIZE[ref.dtype]
                self._append(flat, placement.index, key, StorageChunk(FlatRange(0, numel), file, offset), ref.dtype)
            position += numel

    def _append(self, flat: int, index: int, key: str, chunk: StorageChunk, dtype: str, rows: int = 1) -> None:
        place = self._model.param_shapes[flat][index][0], key
        collected = self._collected.get(place)
        if collected is None:
            self._collected[place] = _Collected(dtype, rows, [chunk])
        else:
            collected.chunks.append(chunk)
            collected.dtype, collected.rows = dtype, rows

    def tensors(self) -> dict[tuple[str, str], TensorMetadata]:
        """The logical tensors by (name, key)."""
        made = {}
        for (name, key), collected in self._collected.items():
            shape = self.parameters[name].shape
            if collected.rows > 1:
                shape = (collected.rows, *shape)
                collected.chunks.sort(key=lambda chunk: chunk.range.start)
            made[name, key] = TensorMetadata(name, key, shape, collected.dtype, tuple(collected.chunks))
        return made

"""Checkpoints of ZeRO-1, 2 and 3 -> Catalog: where each parameter lies in the flat partitions of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic_ckpt.catalog import (
    MASTER,
    Catalog,
    Extent,
    LogicalTensor,
    SavedParameter,
    SourceFacts,
    SourceFile,
)
from elastic_ckpt.dtypes import ITEMSIZE
from elastic_ckpt.formats.base import Found, source_file
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.module_tensors import module_tensors
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard
from elastic_ckpt.formats.zero3 import place_zero3
from elastic_ckpt.formats.zero12 import place_zero12

_SWAPPED_DTYPE = "float32"


def partitioned_catalog(
    found: Found, models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard], own: int, per_rank: bool
) -> Catalog:
    """The catalog of a checkpoint whose optimizer states are partitioned.

    Args:
        found: the folder.
        models: its model-states files, in rank order.
        optimizers: its optimizer-states files, in rank order.
        own: the model-states file to take buffers from.
        per_rank: whether each rank of the job takes them from another file.
    """
    files = [source_file(item) for item in models] + [source_file(item) for item in optimizers]
    collector = _Collector(files, first_shard=len(models))
    for flat, named_shapes in enumerate(models[0].param_shapes):
        scalars, group = optimizers[0].flats[flat].scalars, optimizers[0].flat_groups[flat]
        for name, shape in named_shapes:
            collector.parameters[name] = SavedParameter(shape, group, scalars)
        for shard in optimizers:
            collector.add(models[0], shard, flat, len(optimizers))
    tensors = collector.tensors()
    whole, notes = module_tensors(models, own, frozenset(collector.parameters))
    return Catalog(
        source=SourceFacts(
            "native", found.folder, found.tag, optimizers[0].zero_stage, len(optimizers), models[0].ds_version
        ),
        files=tuple(collector.files),
        parameters=collector.parameters,
        tensors={**tensors, **whole},
        groups=optimizers[0].groups,
        aliases=models[0].shared,
        opaque_states=collector.opaque,
        frozen_recorded=models[own].frozen_recorded,
        buffers_of_this_rank=per_rank,
        notes=found.notes + notes,
    )


class _Collector:
    """Collects parameters and the extents of their tensors, shard by shard."""

    def __init__(self, files: list[SourceFile], first_shard: int) -> None:
        self.files = files
        self.parameters: dict[str, SavedParameter] = {}
        self.opaque: dict[str, str] = {}
        self._first_shard = first_shard
        self._extents: dict[tuple[str, str], list[Extent]] = {}
        self._dtypes: dict[tuple[str, str], str] = {}

    def add(self, model: ModelShard, shard: OptimizerShard, flat: int, dp: int) -> None:
        """One flat partition of one rank."""
        part = shard.flats[flat]
        self.opaque.update(part.opaque)
        place = place_zero3 if shard.zero_stage == 3 else place_zero12
        placements = place(model, shard, flat, dp)
        for key, file, start, dtype in self._regions(part, self._first_shard + shard.dp_rank):
            for placement in placements:
                name = model.param_shapes[flat][placement.index][0]
                offset = start + placement.flat_offset * ITEMSIZE[dtype]
                self._extents.setdefault((name, key), []).append(Extent(placement.range, file, offset))
                self._dtypes[name, key] = dtype

    def _regions(self, part: FlatShard, shard_file: int) -> Iterator[tuple[str, int, int, str]]:
        """(key, file, byte offset, dtype) of the master and each state of a flat partition."""
        in_shard = {key: ref for key, ref in {MASTER: part.master, **part.states}.items() if key not in part.swapped}
        for key, ref in in_shard.items():
            yield key, shard_file, ref.byte_offset, ref.dtype
        for key, source in part.swapped.items():
            self.files.append(source)
            yield key, len(self.files) - 1, 0, _SWAPPED_DTYPE

    def tensors(self) -> dict[tuple[str, str], LogicalTensor]:
        """The logical tensors by (name, key)."""
        return {
            (name, key): LogicalTensor(name, key, self.parameters[name].shape, self._dtypes[name, key], tuple(extents))
            for (name, key), extents in self._extents.items()
        }

"""What a checkpoint holds, as data: every format is read into this one form.

Offsets into files are in bytes, positions in tensors in elements of the *logical* tensor (the whole parameter,
row-major).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.sequence import NO_SEQUENCE_PARALLEL, SequenceParallel
from elastic_ckpt.core.state_kinds import BlockFormat

#: CheckpointMetadata key of the fp32 master weights; optimizer states go under their own names beside it.
MASTER = "fp32"
#: CheckpointMetadata key of a module buffer.
BUFFER = "buffer"
#: CheckpointMetadata key of a parameter that no optimizer owned at save time.
FROZEN = "frozen"


@dataclass(frozen=True)
class SourceFile:
    """One file of the checkpoint: absolute path and size in bytes when its metadata was read."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockCode:
    """How the elements of a chunk are quantized.

    Attributes:
        format: blocks and quantization map.
        position: of the chunk's first element in the tensor whose blocks are counted: ``position // format.numel`` is
            its block.
        scales_offset: absolute offset in the chunk's file of the scale of block 0 (fp32, one a block).
    """

    format: BlockFormat
    position: int
    scales_offset: int


@dataclass(frozen=True, slots=True)
class StorageChunk:
    """A contiguous range of a tensor, or of one tensor-parallel shard of it, in one file.

    Attributes:
        range: which elements of the tensor or shard.
        file: index into :attr:`CheckpointMetadata.files`.
        byte_offset: absolute offset of the first element in that file.
        code: how its elements are quantized; ``None``: they are values.
        shard: tensor-parallel rank that saved it.
    """

    range: FlatRange
    file: int
    byte_offset: int
    code: BlockCode | None = None
    shard: int = 0


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One parameter, state, buffer or frozen weight, whole, and the chunks that tile it.

    Attributes:
        name: name of the parameter or buffer in the model.
        key: :data:`MASTER`, :data:`BUFFER`, :data:`FROZEN`, or the name of an optimizer state.
        shape: logical shape; of a state with rows, ``(rows, *shape of the parameter)``. Of a checkpoint with
            tensor-parallel shards, the shape of the first one.
        dtype: name of the torch dtype in the file (``"float32"``); of the codes, where it is quantized.
        chunks: sorted by shard and ``range.start``.
        is_whole: whether it is a state with a shape of its own, which cannot be cut with its parameter.
        shards: shape of each tensor-parallel shard; empty: there is one, of ``shape``.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[StorageChunk, ...]
    is_whole: bool = False
    shards: tuple[tuple[int, ...], ...] = ()

    @property
    def shard_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor-parallel shard, be it only one."""
        return self.shards or (self.shape,)


@dataclass(frozen=True, slots=True)
class ReplicatedState:
    """A tensor state that is never sharded: one for a whole partition, whatever its size.

    Attributes:
        key, dtype, shape: what it is.
        file: index into :attr:`CheckpointMetadata.files` of one copy.
        byte_offset: where that copy starts.
        crc32: of its bytes.
        differs: whether ranks saved different values.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    byte_offset: int
    crc32: int
    differs: bool = False


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter that the optimizer was given.

    Attributes:
        shape: its logical shape.
        group: its param group.
        scalars: scalar states (``step``) as (key, value), sorted.
        replicated: states of the partition that it was in.
        own_step: the step count beside its own states, where the optimizer counts for a whole group instead
            (DeepSpeed's FusedAdam without ZeRO); ``None``: the one in ``scalars``.
        shards: its shape on each tensor-parallel rank; empty: there is one, of ``shape``.
    """

    shape: tuple[int, ...]
    group: int
    scalars: tuple[tuple[str, float], ...]
    replicated: tuple[ReplicatedState, ...] = ()
    own_step: float | None = None
    shards: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Where the checkpoint comes from.

    Attributes:
        format: ``"native"`` or ``"universal"``.
        folder: absolute path of the tag's folder.
        tag: name of the tag.
        zero_stage: stage of the run that saved it; 0 where optimizer states were not partitioned.
        dp: ranks of the run that saved it over which ZeRO partitioned.
        ds_version: DeepSpeed version that saved it.
        tp, pp: tensor- and pipeline-parallel degree of the files; a universal checkpoint holds whole tensors.
        sequence: how sequence parallelism divided the ``dp`` ranks.
        frozen_recorded: whether the checkpoint lists the frozen parameters of the saved model; if not, they may have
            been left out on purpose (``exclude_frozen_parameters=True``).
        buffers_recorded: whether the checkpoint holds the module's buffers.
        merged_from: tensor-parallel degree whose shards DeepSpeed's converter has put together.
    """

    format: str
    folder: str
    tag: str
    zero_stage: int
    dp: int
    ds_version: str
    tp: int = 1
    pp: int = 1
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL
    frozen_recorded: bool = True
    buffers_recorded: bool = True
    merged_from: int = 1


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What is known of optimizer states by their keys, whichever parameter they belong to.

    Attributes:
        opaque: states whose layout is not understood: key -> description.
        damaged: states of which something is missing: key -> description.
        fresh: states that are there and that the user wants left.
        scalar_forms: scalar state -> how it was saved: ``"int"``, ``"float"``, or the name of a torch dtype.
    """

    opaque: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    scalar_forms: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: StateFacts) -> StateFacts:
        return StateFacts(
            {**other.opaque, **self.opaque},
            {**other.damaged, **self.damaged},
            self.fresh | other.fresh,
            {**other.scalar_forms, **self.scalar_forms},
        )


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything a checkpoint holds.

    Attributes:
        source: where it comes from.
        files: the files that chunks point into.
        parameters: optimizer-owned parameters by name.
        tensors: logical tensors by ``(name, key)``.
        groups: hyperparameters of each saved param group, in saved order.
        aliases: tied names: name without data of its own -> name that holds it.
        states: what is known of optimizer states by their keys.
        buffers_of_this_rank: whether each rank reads buffers from a file of its own, so that they may differ.
        declared: what the checkpoint says about its tensor-parallel shards.
        run: arguments of the run that saved it (Megatron's ``args``).
        replicas: tied replicas, the copies of a parameter that other pipeline stages saved, by ``(name, key)``.
        stages: name of a parameter, or of another tensor of a stage's own files -> the pipeline stages that saved it,
            ascending; empty where there was one stage.
        saved_names: names that were changed since the save: name -> name in the files.
        notes: what the reader noticed and the user should know.
        warnings: what the user should look at.
    """

    source: SourceFacts
    files: tuple[SourceFile, ...]
    parameters: Mapping[str, SavedParameter]
    tensors: Mapping[tuple[str, str], TensorMetadata]
    groups: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    states: StateFacts = field(default_factory=StateFacts)
    buffers_of_this_rank: bool = False
    declared: Declared = field(default_factory=Declared)
    run: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[tuple[str, str], tuple[TensorMetadata, ...]] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    saved_names: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def names(self, key: str) -> list[str]:
        """Names that have a tensor under ``key``, in metadata order."""
        return [name for name, tensor_key in self.tensors if tensor_key == key]

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of the optimizer states that belong to parameters and are tensors."""
        return tuple(sorted({key for _, key in self.tensors} - {MASTER, BUFFER, FROZEN}))

"""What a checkpoint holds, as data; every format is read into this form.

File offsets are in bytes, positions in tensors in elements of the *logical* tensor (the whole one, in row-major order).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.chunks import ChunkSource, FlatTensors, PartitionedChunks, PartitionRule, StorageChunk, chunks_of
from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.core.local_state import NO_SEQUENCE_PARALLEL, SequenceParallel
from elastic_ckpt.core.shard_specs import DeclaredSpecs
from elastic_ckpt.core.state_kinds import BlockFormat
from elastic_ckpt.errors import ElasticCkptError, Remedies

E = TypeVar("E", bound=ElasticCkptError)

#: Key of fp32 master weights.
MASTER = "fp32"
#: Key of module buffers.
BUFFER = "buffer"
#: Key of parameters that no optimizer owned.
FROZEN = "frozen"
WEIGHTS = frozenset({MASTER, BUFFER, FROZEN})
#: What a message calls a tensor that no optimizer owns. Pretrained weights are such, too.
WHOLE_KINDS = MappingProxyType({BUFFER: "buffer", FROZEN: "weight"})

_BY_SIZE = {
    1: "bool int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
#: Bytes of one element.
ITEMSIZE = MappingProxyType({name: size for size, names in _BY_SIZE.items() for name in names.split()})

#: Floating-point dtypes that torch converts to others -> those that have all of their values.
_WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",), "float64": ()}


def converts_exactly(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target in _WIDER.get(source, ())


def is_floating(dtype: str) -> bool:
    """Whether it is a floating-point dtype that torch converts to others."""
    return dtype in _WIDER


@dataclass(frozen=True)
class SourceFile:
    """A file of the checkpoint: absolute path, size in bytes when its metadata was read, and records with tensors."""

    path: str
    nbytes: int
    records: Records = field(default_factory=Records, kw_only=True, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One parameter, state, buffer or frozen weight, and the chunks that tile it."""

    name: str
    key: str  # MASTER, BUFFER, FROZEN or the name of an optimizer state
    #: Logical shape, ``(n, *shape of the parameter)`` of a state of ``n`` planes; with shards, that of the first.
    shape: tuple[int, ...]
    dtype: str  # torch dtype in the file (``"float32"``), of the codes if quantized
    sources: tuple[ChunkSource, ...]  # where the elements of each tensor-parallel shard are; at least one
    has_own_shape: bool = False  # a state of another shape than its parameter, with which it cannot be sharded
    shards: tuple[tuple[int, ...], ...] = ()  # shape of each tensor-parallel shard; empty for a single one of ``shape``

    @property
    def shard_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor-parallel shard; at least one."""
        return self.shards or (self.shape,)

    @property
    def chunks(self) -> tuple[StorageChunk, ...]:
        """All chunks, shard by shard: many, of which a load computes only those that it reads."""
        return tuple(chain.from_iterable(self.sources))

    def chunks_in(self, files: Collection[int]) -> Iterator[StorageChunk]:
        return chain.from_iterable(source.in_files(files) for source in self.sources)

    @property
    def is_empty(self) -> bool:
        """Whether no file has an element of it."""
        return not any(self.sources)

    @property
    def blocks(self) -> BlockFormat | None:
        """How its elements are quantized; ``None`` for plain values, and for an empty tensor, which hides it."""
        for source in self.sources:  # asked for every tensor: a generator would take twice as long
            if source.blocks is not None:
                return source.blocks
        return None

    @property
    def is_quantized(self) -> bool:
        return self.blocks is not None


Place = tuple[str, str]  # name and key of a tensor
#: Shape of a parameter, how ZeRO partitions it, and by key the flat tensors of its masters and states.
_Partitioned = tuple[tuple[int, ...], PartitionRule, Mapping[str, FlatTensors]]
_NOT_PARTITIONED: _Partitioned = (), PartitionRule(0, 0), {}


class TensorTable(Mapping[Place, TensorMetadata]):
    """Tensors by name and key; those of flat tensors are made when they are first asked for.

    A model of many experts has a hundred thousand tensors, of which a rank needs few.
    """

    def __init__(self) -> None:
        self._listed: dict[Place, TensorMetadata] = {}
        self._made: dict[Place, TensorMetadata] = {}
        self._partitioned: dict[str, _Partitioned] = {}

    def add(self, tensors: Mapping[Place, TensorMetadata]) -> None:
        """Add tensors one by one. They take the place of those that are in a flat tensor too."""
        self._listed |= tensors

    def add_flat(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        rules: Sequence[PartitionRule],
        states: Mapping[str, FlatTensors],
    ) -> None:
        """Add the parameters in a flat tensor, and by key the masters and states that are laid out like them."""
        for (name, shape), rule in zip(shapes, rules, strict=True):
            self._partitioned[name] = shape, rule, states

    def __getitem__(self, place: Place) -> TensorMetadata:
        found: TensorMetadata | None = self.get(place)
        if found is None:
            raise KeyError(place)
        return found

    def get(self, place: Place, default: Any = None) -> Any:
        """As of every mapping, but without an exception for each one that is not there."""
        if (found := self._listed.get(place) or self._made.get(place)) is not None:
            return found
        name, key = place
        shape, rule, states = self._partitioned.get(name, _NOT_PARTITIONED)
        if (flat := states.get(key)) is None:
            return default
        sources = (PartitionedChunks(rule, flat),) if rule.numel else chunks_of()
        made = TensorMetadata(name, key, (flat.planes, *shape) if flat.planes > 1 else shape, flat.dtype, sources)
        self._made[place] = made
        return made

    def __contains__(self, place: object) -> bool:
        if place in self._listed or not isinstance(place, tuple):
            return place in self._listed
        return place[1] in self._partitioned.get(place[0], _NOT_PARTITIONED)[2]

    def __iter__(self) -> Iterator[Place]:
        partitioned = ((name, key) for name, (_, _, states) in self._partitioned.items() for key in states)
        return chain((place for place in partitioned if place not in self._listed), self._listed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class DerivedTensors(Mapping[Place, TensorMetadata]):
    """Tensors that ``make`` makes of other places' when they are first asked for, given both places."""

    def __init__(self, sources: Mapping[Place, Place], make: Callable[[Place, Place], TensorMetadata]) -> None:
        self._sources = sources
        self._made = cache(lambda place: make(place, sources[place]))

    def __getitem__(self, place: Place) -> TensorMetadata:
        return self._made(place)

    def __contains__(self, place: object) -> bool:
        return place in self._sources

    def __iter__(self) -> Iterator[Place]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


@dataclass(frozen=True, slots=True)
class ReplicatedState:
    """A tensor state that is never sharded: one for a whole partition, whatever its size."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: int  # index into ``CheckpointMetadata.files``; with ``byte_offset``, it locates one copy
    byte_offset: int
    crc32: int  # of its bytes
    differs: bool = False  # ranks saved different values


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter that the optimizer owned."""

    shape: tuple[int, ...]  # logical
    group: int  # number of its param group
    #: Sorted scalar states (``step``): numbers, ``None``, and what is in :mod:`elastic_ckpt.core.values`.
    scalars: tuple[tuple[str, Any], ...]
    replicated: tuple[ReplicatedState, ...] = ()  # of its partition
    own_step: float | None = None  # if the optimizer counts per group (FusedAdam without ZeRO); else in ``scalars``
    shards: tuple[tuple[int, ...], ...] = ()  # shape of each tensor-parallel shard; empty for a single one of ``shape``


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Where the checkpoint comes from."""

    format: str  # its name in ``READERS`` of :mod:`elastic_ckpt.formats`
    folder: str  # absolute path of the tag's folder
    tag: str
    zero_stage: int  # of the save; 0 if optimizer states were not partitioned
    partition_degree: int  # ranks that ZeRO partitioned over at the save, data- times sequence-parallel ones
    ds_version: str
    tp: int = 1  # degrees of the files; a universal checkpoint holds whole tensors
    pp: int = 1
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL  # how sequence parallelism divided these ranks
    frozen_recorded: bool = True  # if not, frozen parameters may be excluded (``exclude_frozen_parameters=True``)
    buffers_recorded: bool = True  # whether the checkpoint holds the module's buffers
    merged_from: int = 1  # tensor-parallel degree whose shards DeepSpeed's converter merged
    ep: int = 1  # expert-parallel degree, among these ranks; with layers of several degrees, the largest
    by_rank: bool = True  # whether each file is what one rank has saved
    foreign: str = ""  # whose files of whole tensors these are, if not DeepSpeed's: they show no topology
    files: int = 0  # and how many

    @property
    def is_universal(self) -> bool:
        """Whether DeepSpeed's converter made the files, each a whole tensor or what is to be divided anew."""
        return not (self.by_rank or self.foreign)


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Optimizer states of unknown layout, and incomplete ones: key -> why; those that the user asked not to restore."""

    opaque: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    #: Files that are not there, by path below the tag, with a star for a parameter -> those that lack them, if any.
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: StateFacts) -> StateFacts:
        opaque = {**other.opaque, **self.opaque}
        damaged = {**other.damaged, **self.damaged}
        return StateFacts(opaque, damaged, self.fresh | other.fresh, {**other.missing, **self.missing})


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything a checkpoint holds."""

    source: SourceFacts
    files: tuple[SourceFile, ...]
    parameters: Mapping[str, SavedParameter]  # owned by the optimizer, by FQN
    tensors: Mapping[Place, TensorMetadata]
    groups: tuple[Mapping[str, Any], ...]  # hyperparameters of each param group, in saved order; values as of scalars
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name without data of its own -> name that holds it
    states: StateFacts = field(default_factory=StateFacts)
    buffers_of_this_rank: bool = False  # each rank reads buffers from its own file, so that they may differ
    declared: DeclaredSpecs = field(default_factory=DeclaredSpecs)
    run: Mapping[str, Any] = field(default_factory=dict)  # arguments of the run that saved it (Megatron's ``args``)
    #: Tied replicas of other pipeline stages or names, as they are named in the files.
    replicas: Mapping[Place, tuple[TensorMetadata, ...]] = field(default_factory=dict)
    #: Name of what is in a stage's own files -> pipeline stages that saved it, ascending; empty for a single stage.
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    saved_names: Mapping[str, str] = field(default_factory=dict)  # name -> name in the files, where changed
    hidden_names: Mapping[str, str] = field(default_factory=dict)  # FQN -> DeepSpeed's, with what wrappers add to it
    #: CRC32 of weights, per tensor-parallel rank, where a copy of tied ones was saved for each of their names, and of
    #: what describes quantized weights.
    crc32s: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: Parameter in which AutoEP stacks experts, whose slices are listed instead -> number of experts.
    stacked: Mapping[str, int] = field(default_factory=dict)
    #: What modules keep beside parameters and buffers, by name in the state dict.
    extra_states: Mapping[str, SavedExtraState] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what the reader noticed
    warnings: tuple[str, ...] = ()  # and what calls for the user's attention

    def error(
        self, kind: type[E], problem: str, names: str | Iterable[str], expected: Any, found: Any, remedy: Remedies = ""
    ) -> E:
        """An error about some names of this checkpoint."""
        return kind(problem, self.source.folder, expected, found, parameter=names, remedy=remedy)

    def names(self, key: str) -> Sequence[str]:
        """Names that have a tensor under ``key``, in metadata order."""
        return self._names.get(key, ())

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of the parameters' tensor states."""
        return tuple(sorted(self._names.keys() - WEIGHTS))

    @cached_property
    def keys_by_name(self) -> Mapping[str, frozenset[str]]:
        """Tensor states by parameter, for those that have any; empty for one that has scalar states alone."""
        keys: dict[str, set[str]] = {name: set() for name, saved in self.parameters.items() if saved.scalars}
        state_keys = set(self.state_keys)
        for name, key in self.tensors:
            if key in state_keys:
                keys.setdefault(name, set()).add(key)
        return {name: frozenset(found) for name, found in keys.items()}

    @cached_property
    def aliases_of(self) -> Mapping[str, Sequence[str]]:
        """The tied names without data of their own, by the name that holds it."""
        found: dict[str, list[str]] = {}
        for alias, holder in self.aliases.items():
            found.setdefault(holder, []).append(alias)
        return found

    @cached_property
    def _names(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for name, key in self.tensors:
            found.setdefault(key, []).append(name)
        return found

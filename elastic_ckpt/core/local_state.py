"""What the live engine of one rank holds, and its place in the job, as pure data: the destination of every element.

Engine adapters (:mod:`elastic_ckpt.engines`) build it and keep the tensors; the planner reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.state_kinds import LiveState
from elastic_ckpt.core.strided import TPLayout


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """How sequence parallelism divides the ranks that ZeRO calls data-parallel."""

    degree: int = 1  # ranks that share one sample
    #: Whether ZeRO partitions over data times sequence ranks, as with an ``mpu``, or over the data-parallel ranks
    #: alone, as ZeRO-1 and 2 do with a device mesh.
    partitioned: bool = True
    #: Whether the ranks of a group are not adjacent (a custom ``mpu``); those of other degrees cannot be matched then.
    strided: bool = False

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that share their samples, among those that ZeRO partitions over."""
        return self.degree if self.partitioned else 1

    def data_degree(self, partition_degree: int) -> int:
        """Data-parallel degree, given the number of ranks that ZeRO partitions over."""
        return partition_degree // self.ranks_per_sample or partition_degree


NO_SEQUENCE_PARALLEL = SequenceParallel()
#: How names of what pipeline stages share begin (``TiedLayerSpec`` in a ``PipelineModule``).
TIED_MODULES = "tied_modules."
#: In place of a class where there is no live optimizer.
SAVED_OPTIMIZER = "the optimizer that saved it"


@dataclass(frozen=True, slots=True)
class FlatPartition:
    """One flat fp32 tensor of this rank: a param group (ZeRO-1/2), sub-group (ZeRO-3), or often a parameter."""

    index: int
    group: int
    numel: int  # padding included
    dtype: str  # torch dtype of the master weights
    members: tuple[str, ...]  # all parameters of the group or sub-group, on this rank or not
    replicated: bool = False  # every data-parallel rank holds the same bytes
    #: Tensor states of the optimizer; ``None`` for an unknown optimizer, which takes the checkpoint's as is.
    states: tuple[LiveState, ...] | None = ()
    scalars: tuple[str, ...] | None = ()  # sorted scalar states (``step``); ``None`` if unknown


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of a parameter (``shape``: of this rank's shard), at ``flat_offset`` of flat partition ``flat``."""

    name: str
    shape: tuple[int, ...]
    range: FlatRange
    flat: int
    flat_offset: int


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that no optimizer owns: a buffer, or a frozen parameter (with ZeRO-3, this rank's part of it)."""

    name: str
    key: str
    shape: tuple[int, ...]
    range: FlatRange
    dtype: str
    replicated: bool = False  # every data-parallel rank holds the same bytes
    trains: bool = False  # an optimizer would own it, if the engine had one


@dataclass(frozen=True, slots=True)
class QuantizationEntry:
    """An entry of the live state dict that describes how a frozen weight is quantized (absmax, quant_state, SCB)."""

    name: str
    weight: str  # the weight that it describes
    dtype: str
    shape: tuple[int, ...]
    #: Of its bytes, if ``state_dict`` makes it anew each time. Else it is live memory, and a :class:`WholeTensor` too.
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class LiveShards:
    """How live tensor-parallel ranks hold a parameter, as far as known."""

    shapes: tuple[tuple[int, ...], ...]  # on each tensor-parallel rank
    dim: int | None = None  # sharded dimension that the parameter records; -1: replicated, ``None``: not recorded
    stride: int = 1  # consecutive sub-parameters on each rank (Megatron's ``partition_stride``)
    owner: str = ""  # top-level packages of its module (``"megatron.core"``)
    layout: TPLayout | None = None  # in full, where recorded (AutoTP)
    values: tuple[int, ...] = ()  # checksum of a buffer's values on each tensor-parallel rank
    origin: str = ""  # of these facts, if not a live parameter
    is_unsliced: bool = False  # each of the ranks that hold it has it whole, as one of several experts


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Degree and rank in each parallelism."""

    partition_degree: int = 1  # ranks that ZeRO partitions over: data-parallel times sequence-parallel
    partition_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL  # how it divides the ``partition_degree`` ranks
    sp_rank: int = 0
    #: Among the same ranks, or these times ``tp`` if they do not slice experts; of several degrees, the largest.
    ep: int = 1
    ep_rank: int = 0

    @property
    def data_degree(self) -> int:
        """Data-parallel degree without sequence parallelism."""
        return self.sequence.data_degree(self.partition_degree)

    @property
    def mp_rank(self) -> int:
        """Model-parallel rank, as in DeepSpeed's file names."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True)
class LiveGroup:
    """A live param group: its parameters in ``torch.optim``'s order, and its values without ``params``."""

    names: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True)
class LiveStage:
    """What one live pipeline stage has."""

    names: frozenset[str]  # of every parameter and buffer
    groups: tuple[tuple[str, ...], ...]  # the parameters of each param group, in ``torch.optim``'s order


@dataclass(frozen=True)
class ModelLayout:
    """The live model without its tensors: FQNs and tensor-parallel layouts."""

    coordinates: RankCoordinates = RankCoordinates()  # of this rank
    #: Of each parameter and buffer of its pipeline stage; empty if nothing is known.
    layouts: Mapping[str, LiveShards] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()  # what only other pipeline stages or expert-parallel ranks hold
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> its other names in the module
    #: Parameter of a tied pipeline module, of which each stage has a copy of its own -> these stages.
    unsynchronized: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)  # plain arguments of the live run (Megatron-DeepSpeed's)
    #: Name in the state dict of each extra state that a module of this rank takes -> whether the module keeps one now.
    extra_states: Mapping[str, bool] = field(default_factory=dict)
    extra_states_elsewhere: frozenset[str] = frozenset()  # as ``elsewhere``

    @property
    def names(self) -> frozenset[str]:
        """Every parameter and buffer of the model, the same on all ranks."""
        return self.elsewhere.union(self.layouts)


@dataclass(frozen=True)
class LocalState:
    """What one rank's engine holds in memory."""

    zero_stage: int
    optimizer: str  # class name of the base optimizer
    flats: tuple[FlatPartition, ...]
    fragments: tuple[Fragment, ...]  # in flat order
    wholes: tuple[WholeTensor, ...]
    groups: tuple[LiveGroup, ...]
    model: ModelLayout = field(default_factory=ModelLayout)
    family: str | None = None  # optimizers that keep the same states under other names; ``None`` if there are none
    defaults: frozenset[str] = frozenset()  # hyperparameters that this optimizer knows
    others: frozenset[str] = frozenset()  # entries of the module's state dict that hooks make
    own_entries: frozenset[str] = frozenset()  # of these, what a module loads in a way of its own
    quantization: tuple[
        QuantizationEntry, ...
    ] = ()  # of its frozen weights, below ZeRO-3; these are in ``others``, too
    stages: tuple[LiveStage, ...] = ()  # of the whole pipeline, in order; empty without one

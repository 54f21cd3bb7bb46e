"""What the live engine of one rank holds, as pure data: where every element has to go.

An engine adapter (:mod:`elastic_ckpt.engines`) fills these in; the planner reads them. They hold no tensors: the
adapter keeps the tensor of the *flat partition* that an index names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.sequence import NO_SEQUENCE_PARALLEL, SequenceParallel
from elastic_ckpt.core.state_kinds import LiveState
from elastic_ckpt.core.strided import TPLayout


@dataclass(frozen=True, slots=True)
class FlatPartition:
    """One fp32 tensor of this rank, on which the optimizer steps.

    Attributes:
        index: ZeRO-1/2: the param group; ZeRO-3: the sub-group; without partitions, often the parameter.
        group: index into :attr:`LocalState.groups`.
        numel: elements, padding included.
        dtype: name of the torch dtype of the master weights.
        members: names of all parameters of the group or sub-group, on this rank or not.
        replicated: whether every data-parallel rank holds the same bytes.
        states: the tensor states that the optimizer keeps for it; ``None``: an unknown optimizer, which takes the
            states of the checkpoint as they are.
        scalars: the scalar states that it keeps for it (``step``), sorted; ``None``: not known.
    """

    index: int
    group: int
    numel: int
    dtype: str
    members: tuple[str, ...]
    replicated: bool = False
    states: tuple[LiveState, ...] | None = ()
    scalars: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of one parameter inside a flat partition of this rank.

    Attributes:
        name, shape: the parameter; of a tensor-parallel one, the shape of this rank's shard.
        range: which elements of it.
        flat: index into :attr:`LocalState.flats`.
        flat_offset: where the range starts in that flat partition, in elements.
    """

    name: str
    shape: tuple[int, ...]
    range: FlatRange
    flat: int
    flat_offset: int


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that no optimizer owns: a buffer, or a frozen parameter (ZeRO-3: this rank's part of it).

    Attributes:
        name, key, shape: the tensor; ``key`` is :data:`elastic_ckpt.core.metadata.BUFFER` or
            :data:`elastic_ckpt.core.metadata.FROZEN`.
        range: the elements on this rank.
        dtype: name of the live torch dtype.
        replicated: whether every data-parallel rank holds the same bytes.
        trains: whether an optimizer would own it, if the engine had one.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    range: FlatRange
    dtype: str
    replicated: bool = False
    trains: bool = False


@dataclass(frozen=True, slots=True)
class LiveLayout:
    """How the live tensor-parallel ranks hold a parameter, as far as it is known.

    Attributes:
        shapes: its shape on each tensor-parallel rank.
        dim: its sharded dimension, where the parameter records it; -1: recorded as replicated; ``None``: not recorded.
        stride: number of sub-parameters that follow each other on each rank (Megatron's ``partition_stride``).
        owner: top-level packages of its module (``"megatron.core"``).
        split: its layout, where that is recorded in full (AutoTP).
        values: checksum of a buffer's values on each tensor-parallel rank; empty for parameters.
        origin: source of these facts, where it is not a live parameter.
    """

    shapes: tuple[tuple[int, ...], ...]
    dim: int | None = None
    stride: int = 1
    owner: str = ""
    split: TPLayout | None = None
    values: tuple[int, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Where a rank stands in its job: degree of each parallelism, and its rank in each.

    Attributes:
        dp, dp_rank: of the ranks that ZeRO partitions over: data-parallel ones, times sequence-parallel ones.
        tp, tp_rank: tensor-parallel.
        pp, pp_rank: pipeline-parallel.
        sequence: how sequence parallelism divides the ``dp`` ranks.
        sp_rank: sequence-parallel rank.
    """

    dp: int = 1
    dp_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL
    sp_rank: int = 0

    @property
    def data_degree(self) -> int:
        """Data-parallel degree: ranks with samples of their own."""
        return self.sequence.data_degree(self.dp)

    @property
    def data_rank(self) -> int:
        """Which of them this is, or shares its samples."""
        return self.sequence.data_rank(self.dp_rank)

    @property
    def mp_rank(self) -> int:
        """The number that DeepSpeed's files of this rank go by."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True)
class LiveGroup:
    """A live param group.

    Attributes:
        names: its parameters, in the order in which ``torch.optim`` numbers them.
        hyperparameters: its values, without ``params``.
    """

    names: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True)
class ModelLayout:
    """The live model without any memory: names and tensor-parallel layouts, as the ranks of a job share them.

    Attributes:
        coordinates: of the rank that looks at it.
        layouts: how tensor-parallel ranks hold each parameter and buffer of its stage; empty where nothing is known.
        elsewhere: names of parameters and buffers that only other pipeline stages hold.
        ties: parameter -> the other names that it has in the live module.
    """

    coordinates: RankCoordinates = RankCoordinates()
    layouts: Mapping[str, LiveLayout] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Every parameter and buffer of the model, the same on all ranks."""
        return self.elsewhere.union(self.layouts)


@dataclass(frozen=True)
class LocalState:
    """What one rank's engine holds in memory, and the model that it is of.

    Attributes:
        zero_stage: 0 to 3.
        optimizer: class name of the base optimizer.
        flats: flat partitions.
        fragments: ranges of parameters inside them, in flat order.
        wholes: buffers and frozen parameters.
        groups: param groups.
        model: names and tensor-parallel layouts, and where this rank stands.
        family: optimizers of one family keep the same states under different names; ``None``: no other one does.
        defaults: names of the hyperparameters that this optimizer knows.
    """

    zero_stage: int
    optimizer: str
    flats: tuple[FlatPartition, ...]
    fragments: tuple[Fragment, ...]
    wholes: tuple[WholeTensor, ...]
    groups: tuple[LiveGroup, ...]
    model: ModelLayout = field(default_factory=ModelLayout)
    family: str | None = None
    defaults: frozenset[str] = frozenset()

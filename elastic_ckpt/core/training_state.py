"""What a checkpoint holds besides tensors: small Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: 1-bit optimizers of DeepSpeed before 0.19, by lower-case class name, as in its config.
ONE_BIT_OPTIMIZERS = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})

#: Entry of our section in a saved config: by how many steps counts of the optimizer are ahead of the counters.
AHEAD = "ahead"


@dataclass(frozen=True)
class LossScale:
    """State of an fp16 loss scaler, in one form for all optimizers: ``cur_scale``, ``cur_iter`` ..."""

    dynamic: bool
    values: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return "dynamic" if self.dynamic else "static"


@dataclass(frozen=True)
class BatchSizes:
    """Global batch in samples, micro-batch of a rank, micro-batches per step; ``None`` where not recorded."""

    global_batch: int | None
    micro_batch: int | None
    accumulation_steps: int | None


@dataclass(frozen=True)
class TrainingState:
    """What a job resumes besides tensors: counters, batch sizes, scheduler, loss scale, client state."""

    counters: Mapping[str, Any]  # global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size
    batch: BatchSizes
    lr_scheduler: Any
    loss_scale: LossScale | None  # ``None`` if the run did not train in fp16
    overflow: bool
    checkpoint: Mapping[str, Any]  # all other top-level entries of the model-states file, the client state included
    #: Whether the job has the ranks of the save, so that each gets its own state; if not, every rank has rank 0's.
    same_ranks: bool = False
    #: Tensor- and pipeline-parallel degree of the save, if this is the state of the same model-parallel rank; else 0.
    degrees: tuple[int, int] = (1, 1)
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name, why an entry of the client state is missing


@dataclass(frozen=True)
class Features:
    """Features of a run that decide who restores it."""

    experts: tuple[int, ...] = ()  # number of experts, by layer
    expert_groups: tuple[str, ...] = ()  # param groups of experts, which show the expert-parallel degree
    one_bit: bool = False
    mics: int = 0  # ranks in a MiCS shard group; 0 without MiCS

    def __or__(self, other: Features) -> Features:
        return Features(
            self.experts or other.experts,
            tuple(sorted({*self.expert_groups, *other.expert_groups})),
            self.one_bit or other.one_bit,
            max(self.mics, other.mics),
        )

    @property
    def names(self) -> str:
        """Those that only DeepSpeed's own loader restores, in words; empty where there is none."""
        names = ["a 1-bit optimizer"] * self.one_bit + [f"MiCS (mics_shard_size {self.mics})"] * (self.mics > 0)
        return ", ".join(names)

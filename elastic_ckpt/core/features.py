"""Features of a run that only DeepSpeed's own loader restores."""

from __future__ import annotations

from dataclasses import dataclass

#: 1-bit optimizers of DeepSpeed before 0.19, by lower-case class name, which is their name in the config too.
ONE_BIT_OPTIMIZERS = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


@dataclass(frozen=True)
class Features:
    """What is special about a run.

    Attributes:
        experts: number of experts, by layer.
        expert_groups: names of the param groups of experts, which tell their expert-parallel degree.
        one_bit: whether a 1-bit optimizer steps.
        mics: ranks in a MiCS shard group; 0 without MiCS.
    """

    experts: tuple[int, ...] = ()
    expert_groups: tuple[str, ...] = ()
    one_bit: bool = False
    mics: int = 0

    def __or__(self, other: Features) -> Features:
        return Features(
            self.experts or other.experts,
            tuple(sorted({*self.expert_groups, *other.expert_groups})),
            self.one_bit or other.one_bit,
            max(self.mics, other.mics),
        )

    @property
    def names(self) -> str:
        """The features as people call them; empty where there is none."""
        names = (
            (bool(self.experts or self.expert_groups), "mixture of experts"),
            (self.one_bit, "a 1-bit optimizer"),
            (self.mics > 0, f"MiCS (mics_shard_size {self.mics})"),
        )
        return ", ".join(name for present, name in names if present)

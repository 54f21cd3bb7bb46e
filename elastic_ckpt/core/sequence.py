"""Sequence parallelism (DeepSpeed Ulysses and ALST) beside data parallelism. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """How sequence parallelism divides the ranks that ZeRO calls data-parallel.

    The ranks of a sequence-parallel group share their samples and are adjacent: rank = data-parallel rank x
    ``degree`` + sequence-parallel rank (``initialize_sequence_parallel``, parallel_state_sp.py).

    Attributes:
        degree: ranks that share one sample; 1 without sequence parallelism.
        partitioned: whether ZeRO partitions over data times sequence ranks, as it does with an ``mpu``. With a device
            mesh (``"sequence_parallel_size"`` and ``"data_parallel_size"``), ZeRO-1 and 2 partition over the
            data-parallel ranks alone.
        strided: whether the ranks of a group are not adjacent, as with a custom ``mpu``. Ranks of different degrees
            then cannot be matched.
    """

    degree: int = 1
    partitioned: bool = True
    strided: bool = False

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that share their samples, among those that ZeRO partitions over."""
        return self.degree if self.partitioned else 1

    def data_degree(self, dp: int) -> int:
        """Data-parallel degree, given the ``dp`` ranks that ZeRO partitions over."""
        return dp // self.ranks_per_sample or dp

    def data_rank(self, dp_rank: int) -> int:
        """Data-parallel rank, given the rank among those that ZeRO partitions over."""
        return dp_rank // self.ranks_per_sample


NO_SEQUENCE_PARALLEL = SequenceParallel()

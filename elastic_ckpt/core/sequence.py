"""Sequence parallelism (DeepSpeed Ulysses and ALST) as a coordinate beside data parallelism. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """How sequence parallelism divides the ranks that ZeRO calls data-parallel.

    The ranks of one sequence-parallel group share their samples, and neighbour each other: rank = data-parallel rank x
    ``degree`` + sequence-parallel rank (``initialize_sequence_parallel``, parallel_state_sp.py).

    Attributes:
        degree: ranks that share one sample; 1: no sequence parallelism.
        partitioned: whether ZeRO partitions over data times sequence ranks, as it does with an ``mpu``. With a device
            mesh (``"sequence_parallel_size"`` and ``"data_parallel_size"`` in the config), ZeRO-1 and 2 partition
            over the data-parallel ranks alone.
        strided: whether the ranks of one group are no neighbours, as an ``mpu`` of one's own may have it. Which rank of
            another degree belongs to which is then not known.
    """

    degree: int = 1
    partitioned: bool = True
    strided: bool = False

    @property
    def ranks_per_sample(self) -> int:
        """Ranks among those that ZeRO partitions over which share their samples."""
        return self.degree if self.partitioned else 1

    def data_degree(self, dp: int) -> int:
        """Data-parallel degree, of ``dp`` ranks that ZeRO partitions over."""
        return dp // self.ranks_per_sample or dp

    def data_rank(self, dp_rank: int) -> int:
        """Data-parallel rank of one of them."""
        return dp_rank // self.ranks_per_sample


NO_SEQUENCE_PARALLEL = SequenceParallel()

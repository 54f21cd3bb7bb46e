"""The topology of a job that does not run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_ckpt.core.local_state import RankCoordinates


@dataclass(frozen=True, slots=True)
class Topology:
    """Degrees, ZeRO stage, and what decides how partitions are cut.

    Attributes:
        dp, tp, pp: data-, tensor- and pipeline-parallel degree.
        zero_stage: 0 to 3.
        sub_group_numel: ``sub_group_size`` of ZeRO-3, which DeepSpeed counts in elements of a rank's partition.
        alignment: ``"align_partitions"``: partitions are multiples of so many elements; 1: as DeepSpeed pads them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    sub_group_numel: int = 1_000_000_000
    alignment: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> RankCoordinates:
        """Where a global rank stands: tensor-parallel ranks are neighbours, stages lie farthest apart.

        Source of the order: ``PipeModelDataParallelTopology`` (``["pipe", "data", "model"]``, topology.py).
        """
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return RankCoordinates(self.dp, dp_rank, self.tp, tp_rank, self.pp, pp_rank)

    def places(self) -> Iterator[RankCoordinates]:
        """All of them, in rank order."""
        return map(self.place, range(self.ranks))

    def __str__(self) -> str:
        return f"ZeRO-{self.zero_stage}, DP={self.dp}, TP={self.tp}, PP={self.pp}"

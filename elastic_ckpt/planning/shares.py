"""Who reads which piece of a tensor that every data-parallel rank holds whole. Pure.

Each byte of it is read once in the job: big tensors are cut into one piece a rank, small ones are dealt out whole, to
the rank that has least to read so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.read_plan import Share

#: A tensor of at most this many bytes for each rank is not worth cutting.
_SMALL_NBYTES = 1 << 20


class Sharing:
    """Deals out replicated slots, the same way on every rank that offers them in the same order.

    Args:
        dp: data-parallel degree.
        dp_rank: this rank's place in it.
    """

    def __init__(self, dp: int, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._load_nbytes = [0] * dp
        self.shares: list[Share] = []

    def mine(self, slot: int, numel: int, dtype: str) -> FlatRange:
        """Deal out one slot; returns the elements that this rank reads, of which there may be none."""
        mine = FlatRange(0, 0)
        for owner, piece in self._deal(numel, ITEMSIZE[dtype]):
            self.shares.append(Share(slot, piece, owner))
            self._load_nbytes[owner] += piece.numel * ITEMSIZE[dtype]
            if owner == self._dp_rank:
                mine = piece
        return mine

    def whole(self, slots: Sequence[tuple[int, int, str]]) -> bool:
        """Deal out slots that must be read together; returns whether this rank reads them.

        Args:
            slots: (slot, elements, dtype) of each.
        """
        owner = self._load_nbytes.index(min(self._load_nbytes))
        for slot, numel, dtype in slots:
            if numel:
                self.shares.append(Share(slot, FlatRange(0, numel), owner))
                self._load_nbytes[owner] += numel * ITEMSIZE[dtype]
        return owner == self._dp_rank

    def _deal(self, numel: int, itemsize: int) -> list[tuple[int, FlatRange]]:
        if not numel:
            return []
        dp = len(self._load_nbytes)
        if numel * itemsize <= _SMALL_NBYTES * dp:
            return [(self._load_nbytes.index(min(self._load_nbytes)), FlatRange(0, numel))]
        step = -(-numel // dp)
        cuts = [FlatRange(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(dp)]
        return [(rank, cut) for rank, cut in enumerate(cuts) if cut.numel]

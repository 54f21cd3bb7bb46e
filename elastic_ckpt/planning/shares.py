"""Which rank reads which range of a tensor that every data-parallel rank holds whole. Pure.

Each byte is read once in the job: large tensors are divided into one range per rank, small ones go whole to the rank
that has least to read so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.read_plan import Share

#: Tensors up to this many bytes per rank are not divided.
_SMALL_NBYTES = 1 << 20


class Sharing:
    """Assigns replicated slots to data-parallel ranks; deterministic given the order of calls."""

    def __init__(self, dp: int, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._load_nbytes = [0] * dp
        self.shares: list[Share] = []

    def mine(self, slot: int, numel: int, dtype: str) -> FlatRange:
        """Assign one slot; returns the (possibly empty) range of elements that this rank reads."""
        dp = len(self._load_nbytes)
        if numel * ITEMSIZE[dtype] <= _SMALL_NBYTES * dp:
            return FlatRange(0, numel if self.whole([(slot, numel, dtype)]) else 0)
        step = -(-numel // dp)
        ranges = [FlatRange(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(dp)]
        for owner, range_ in enumerate(ranges):
            self._deal(slot, range_, dtype, owner)
        return ranges[self._dp_rank]

    def whole(self, slots: Sequence[tuple[int, int, str]]) -> bool:
        """Assign slots, as (slot, elements, dtype), that are read together; returns whether this rank reads them."""
        owner = self._load_nbytes.index(min(self._load_nbytes))
        for slot, numel, dtype in slots:
            self._deal(slot, FlatRange(0, numel), dtype, owner)
        return owner == self._dp_rank

    def _deal(self, slot: int, elements: FlatRange, dtype: str, owner: int) -> None:
        if elements.numel:
            self.shares.append(Share(slot, elements, owner))
            self._load_nbytes[owner] += elements.numel * ITEMSIZE[dtype]

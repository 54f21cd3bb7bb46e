"""Copies in a checkpoint that should be the same: which ones there are. Pure.

Tensor-parallel ranks hold norms and some biases whole, and pipeline stages hold tied weights twice. Each rank trains a
copy of its own, and in big runs they drift apart; a load at another degree can keep only one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from elastic_ckpt.bands import Transfer, copied
from elastic_ckpt.catalog import BUFFER, Catalog, LogicalTensor
from elastic_ckpt.destinations import Destinations
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.plan import Comparison, Piece
from elastic_ckpt.rules.resolve import FIRST, MEAN, Resharding
from elastic_ckpt.strips import strips


def compare_replicas(
    catalog: Catalog, destinations: Destinations, resharding: Resharding, restored: Iterable[str], with_states: bool
) -> tuple[Comparison, ...]:
    """This rank's share of the comparisons: they are dealt out among the ranks of a pipeline stage.

    Args:
        catalog: what the checkpoint holds.
        destinations: what the live engine holds.
        resharding: which parameters every tensor-parallel rank saved whole.
        restored: names that are restored.
        with_states: whether optimizer states are.
    """
    lane = destinations.tp_rank * destinations.dp + destinations.dp_rank
    every = _all(catalog, resharding, frozenset(restored), with_states)
    mine = islice(every, lane, None, destinations.tp * destinations.dp)
    return tuple(replace(_comparison(one.name, one.key, one.copies, one.taken), is_guess=one.is_guess) for one in mine)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A comparison whose pieces have not been looked for yet."""

    name: str
    key: str
    copies: Sequence[tuple[LogicalTensor, Transfer]]
    taken: str = FIRST
    is_guess: bool = False


def _all(catalog: Catalog, resharding: Resharding, names: frozenset[str], with_states: bool) -> Iterator[_Wanted]:
    """Those of all ranks of the stage, in the same order on each."""
    state_keys = set(catalog.state_keys)
    for (name, key), tensor in sorted(catalog.tensors.items()):
        if name not in names or tensor.is_whole or (not with_states and key in state_keys):
            continue
        twins = catalog.twins.get((name, key), ())
        shards = range(len(tensor.shard_shapes))
        if name in resharding.replicas:
            transfer = resharding.transfers.get((name, ""))
            taken = MEAN if transfer is not None and transfer.blend else FIRST
            every = [(tensor, copied_shard(tensor, shard)) for shard in shards]
            is_guess = name in resharding.guessed and (key == BUFFER or len(tensor.shard_shapes[0]) > 1)
            yield _Wanted(name, key, every, taken, is_guess)
        for twin in twins:
            for shard in shards:
                yield _Wanted(name, key, [(tensor, copied_shard(tensor, shard)), (twin, copied_shard(twin, shard))])
        for first, second in resharding.overlaps.get(name, ()):
            yield _Wanted(name, key, [(tensor, Transfer((first,))), (tensor, Transfer((second,)))])


def copied_shard(tensor: LogicalTensor, shard: int) -> Transfer:
    """One saved shard as it is."""
    return copied(shard, math.prod(tensor.shard_shapes[shard]))


def _comparison(name: str, key: str, copies: Sequence[tuple[LogicalTensor, Transfer]], taken: str) -> Comparison:
    numel = sum(band.numel for _, band in copies[0][1].bands)
    return Comparison(name, key, numel, tuple(_pieces(*copy) for copy in copies), taken)


def _pieces(tensor: LogicalTensor, transfer: Transfer) -> tuple[Piece, ...]:
    numel = sum(band.numel for _, band in transfer.bands)
    found = strips(tensor, transfer, FlatRange(0, numel))
    return tuple(sorted((piece for strip in found for piece in strip.pieces(0)), key=lambda piece: piece.start))

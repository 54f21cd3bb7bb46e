"""Copies in a checkpoint that should be the same: which ones there are. Pure.

Tensor-parallel ranks hold norms and some biases whole, and pipeline stages hold tied weights twice. Each rank trains a
copy of its own, and in big runs they drift apart; a load at another degree can keep only one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elastic_ckpt.bands import copied
from elastic_ckpt.catalog import Catalog, LogicalTensor
from elastic_ckpt.destinations import Destinations
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.plan import Comparison, Piece
from elastic_ckpt.rules.resolve import Resharding
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
    names, state_keys = set(restored), set(catalog.state_keys)
    found = []
    for (name, key), tensor in sorted(catalog.tensors.items()):
        if name not in names or tensor.is_whole or (not with_states and key in state_keys):
            continue
        shards = range(len(tensor.shard_shapes)) if name in resharding.replicas else range(1)
        copies = [_pieces(tensor, shard) for shard in shards]
        copies += [_pieces(twin, 0) for twin in catalog.twins.get((name, key), ())]
        if len(copies) > 1:
            found.append(Comparison(name, key, math.prod(tensor.shard_shapes[0]), tuple(copies)))
    lane = destinations.tp_rank * destinations.dp + destinations.dp_rank
    return tuple(found[lane :: destinations.tp * destinations.dp])


def _pieces(tensor: LogicalTensor, shard: int) -> tuple[Piece, ...]:
    numel = math.prod(tensor.shard_shapes[shard])
    found = strips(tensor, copied(shard, numel), FlatRange(0, numel))
    return tuple(sorted((piece for strip in found for piece in strip.pieces(0)), key=lambda piece: piece.start))

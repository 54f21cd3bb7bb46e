"""Broadcasts replicated slots, of which each data-parallel rank has read its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from elastic_ckpt.core.read_plan import ReadPlan, Share
from elastic_ckpt.distributed import in_buckets


def exchange_shares(plan: ReadPlan, tensors: Mapping[int, torch.Tensor], group: Any) -> int:
    """Broadcast every share of a plan from its owner. Collective over the data-parallel group.

    Args:
        plan: the executed plan; its shares are the same on every rank.
        tensors: the live tensor of every replicated slot; overwritten where another rank is the owner.
        group: the data-parallel process group.

    Returns:
        Bytes that this rank received.
    """
    members = dist.get_process_group_ranks(group) if plan.shares else []
    me = dist.get_rank(group=group) if plan.shares else 0
    received_nbytes = 0
    for bucket in _buckets(plan, tensors):
        owner = bucket[0].owner
        parts = [tensors[s.slot].detach().view(-1)[s.range.start : s.range.stop] for s in bucket]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        # as bytes: not every backend knows every dtype
        dist.broadcast(whole.view(torch.uint8), src=members[owner], group=group)
        if owner == me:
            continue
        received_nbytes += whole.numel() * whole.element_size()
        if len(parts) > 1:
            for part, values in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                part.copy_(values)
    return received_nbytes


def _buckets(plan: ReadPlan, tensors: Mapping[int, torch.Tensor]) -> Iterator[list[Share]]:
    """Shares of one owner, dtype and device that fit into a bucket together, or one larger share."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Share]] = {}
    for share in plan.shares:
        tensor = tensors[share.slot]
        kinds.setdefault((share.owner, tensor.dtype, tensor.device), []).append(share)
    for (_, dtype, _), shares in kinds.items():
        yield from in_buckets(shares, [share.range.numel * dtype.itemsize for share in shares])

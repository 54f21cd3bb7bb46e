"""Which shares travel together: one owner, dtype and device, up to a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_ckpt.io.reader
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.read_plan import BroadcastRange, ReadPlan
from elastic_ckpt.io.reader import _buckets, exchange_shares

BUCKET = 16 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def plan_of(shares: Sequence[BroadcastRange]) -> ReadPlan:
    return ReadPlan(files=(), targets=(), items=(), shares=tuple(shares))


def on_meta(sizes: Sequence[tuple[int, torch.dtype]]) -> dict[int, torch.Tensor]:
    """Tensors of any size that need no memory."""
    return {target: torch.empty(numel, dtype=dtype, device="meta") for target, (numel, dtype) in enumerate(sizes)}


def nbytes(bucket: Sequence[BroadcastRange], tensors: Mapping[int, torch.Tensor]) -> int:
    return sum(share.range.numel * tensors[share.target].dtype.itemsize for share in bucket)


@st.composite
def dealings(draw: st.DrawFn) -> tuple[list[BroadcastRange], dict[int, torch.Tensor]]:
    shares, sizes = [], []
    for target in range(draw(st.integers(0, 12))):
        numel = draw(st.sampled_from([1, 5, BUCKET // 16, BUCKET // 4, BUCKET // 4 + 1, BUCKET]))
        sizes.append((numel, draw(st.sampled_from(DTYPES))))
        cut = draw(st.integers(0, numel))
        pieces = [FlatRange(0, cut), FlatRange(cut, numel)]
        shares += [BroadcastRange(target, piece, draw(st.integers(0, 2))) for piece in pieces if piece.numel]
    return shares, on_meta(sizes)


@settings(deadline=None)
@given(dealings())
def test_every_share_travels_once_with_others_of_its_kind_and_no_bucket_is_too_big(
    case: tuple[list[BroadcastRange], dict[int, torch.Tensor]],
) -> None:
    shares, tensors = case
    buckets = list(_buckets(plan_of(shares), tensors))
    flat = [share for bucket in buckets for share in bucket]
    assert sorted(flat, key=shares.index) == shares
    for bucket in buckets:
        assert len({(share.owner, tensors[share.target].dtype) for share in bucket}) == 1
        assert len(bucket) == 1 or nbytes(bucket, tensors) <= BUCKET
    kinds = [(bucket[0].owner, tensors[bucket[0].target].dtype) for bucket in buckets]
    for (kind, bucket), (next_kind, next_bucket) in zip(
        zip(kinds, buckets, strict=True), list(zip(kinds, buckets, strict=True))[1:], strict=False
    ):
        if kind == next_kind:
            assert nbytes([*bucket, next_bucket[0]], tensors) > BUCKET, "the next share would have had room"


def test_shares_of_other_owners_in_between_do_not_end_a_bucket() -> None:
    tensors = on_meta([(4, torch.float32)] * 4)
    shares = [BroadcastRange(target, FlatRange(0, 4), target % 2) for target in range(4)]
    assert list(_buckets(plan_of(shares), tensors)) == [[shares[0], shares[2]], [shares[1], shares[3]]]


def test_a_bucket_that_is_just_full_is_one_and_a_byte_more_is_two() -> None:
    half = BUCKET // 2
    shares = [BroadcastRange(target, FlatRange(0, half), 0) for target in range(2)]
    assert len(list(_buckets(plan_of(shares), on_meta([(half, torch.int8)] * 2)))) == 1
    shares[1] = BroadcastRange(1, FlatRange(0, half + 1), 0)
    assert len(list(_buckets(plan_of(shares), on_meta([(half + 1, torch.int8)] * 2)))) == 2


def test_a_share_bigger_than_a_bucket_travels_alone() -> None:
    tensors = on_meta([(1, torch.int8), (BUCKET + 1, torch.int8), (1, torch.int8)])
    shares = [BroadcastRange(target, FlatRange(0, tensor.numel()), 0) for target, tensor in tensors.items()]
    assert list(_buckets(plan_of(shares), tensors)) == [[share] for share in shares]


def test_tensors_on_different_devices_do_not_travel_together() -> None:
    tensors = {0: torch.zeros(1), 1: torch.zeros(1, device="meta")}
    shares = [BroadcastRange(target, FlatRange(0, 1), 0) for target in range(2)]
    assert len(list(_buckets(plan_of(shares), tensors))) == 2


def test_a_plan_without_shares_needs_no_process_group() -> None:
    assert exchange_shares(plan_of([]), {}, group=None) == 0


@pytest.mark.parametrize("me", [0, 1])
def test_what_others_own_is_overwritten_and_counted_and_the_rest_left_alone(
    me: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = {0: torch.arange(6.0), 1: torch.arange(10.0, 14.0), 2: torch.tensor([[7, 8], [9, 10]])}
    shares = [
        BroadcastRange(0, FlatRange(0, 2), 0),
        BroadcastRange(0, FlatRange(2, 6), 1),
        BroadcastRange(1, FlatRange(1, 3), 1),
        BroadcastRange(2, FlatRange(0, 4), 1),
    ]
    mine = {target: torch.full_like(tensor, -1) for target, tensor in truth.items()}
    for share in shares:
        if share.owner == me:
            read = truth[share.target].view(-1)[share.range.start : share.range.stop]
            mine[share.target].view(-1)[share.range.start : share.range.stop] = read
    sent: list[int] = []

    def broadcast(raw: torch.Tensor, src: int, group: object, async_op: bool) -> None:
        """Another rank's bytes, if it is one: those of the bucket whose turn it is."""
        owner = src - 5
        sent.append(owner)
        if owner != me:
            bucket = list(_buckets(plan_of(shares), truth))[len(sent) - 1]
            values = [truth[s.target].view(-1)[s.range.start : s.range.stop] for s in bucket]
            raw.copy_(torch.cat(values).view(torch.uint8))

    monkeypatch.setattr(elastic_ckpt.io.reader.dist, "broadcast", broadcast)
    monkeypatch.setattr(elastic_ckpt.io.reader, "wait", lambda work: None)
    monkeypatch.setattr(elastic_ckpt.io.reader.dist, "get_process_group_ranks", lambda group: [5, 6])
    monkeypatch.setattr(elastic_ckpt.io.reader.dist, "get_rank", lambda group: me)
    received = exchange_shares(plan_of(shares), mine, group="the group")
    assert sent == [0, 1, 1]
    assert received == (8 if me else 6 * 4 + 4 * 8)
    assert torch.equal(mine[0], truth[0])
    assert mine[1].tolist() == [-1, 11, 12, -1]
    assert torch.equal(mine[2], truth[2])

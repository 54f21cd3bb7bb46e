"""Bands against torch: whatever is cut, a tensor filled with its own element numbers comes out right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.strided import (
    StridedCopy,
    TPLayout,
    blended,
    clip_source,
    clip_target,
    copied,
    duplicates,
    fused,
    replicated,
    reshard,
)


def apply(band: StridedCopy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Element by element, and never twice."""
    for row in range(band.rows):
        for column in range(band.width):
            place = band.target + row * band.target_stride + column
            assert target[place] == -1, "written twice"
            target[place] = source[band.source + row * band.source_stride + column]


@st.composite
def bands(draw: st.DrawFn) -> StridedCopy:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    strides = [width + draw(st.integers(0, 4)) for _ in range(2)]
    starts = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return StridedCopy(*starts, width, rows, *(strides if rows > 1 else (0, 0)))


@given(bands(), st.integers(0, 60), st.integers(0, 60))
def test_a_clipped_band_is_what_lies_in_the_range(band: StridedCopy, start: int, numel: int) -> None:
    source = torch.arange(100)
    whole, parts = torch.full((100,), -1), torch.full((100,), -1)
    apply(band, source, whole)
    wanted = FlatRange(start, start + numel)
    found = list(clip_target(band, wanted))
    assert len(found) <= 3
    assert [part.target for part in found] == sorted(part.target for part in found)
    for part in found:
        apply(part, source, parts)
    inside = (torch.arange(100) >= wanted.start) & (torch.arange(100) < wanted.stop)
    assert torch.equal(parts, torch.where(inside, whole, -1))


@given(bands(), st.integers(0, 60), st.integers(0, 60))
def test_clipping_the_source_is_clipping_the_target_of_the_way_back(band: StridedCopy, start: int, numel: int) -> None:
    source = torch.arange(100)
    source[:start] = -1
    source[start + numel :] = -1
    whole, parts = torch.full((100,), -1), torch.full((100,), -1)
    apply(band, source, whole)
    for part in clip_source(band, FlatRange(start, start + numel)):
        assert part.numel > 0
        apply(part, torch.arange(100), parts)
    assert torch.equal(parts, whole)


def shards(whole: torch.Tensor, split: TPLayout) -> list[torch.Tensor]:
    """By torch's own cutting."""
    return [
        torch.cat([whole.narrow(split.dim, a, b - a) for a, b in ranges] or [whole.narrow(split.dim, 0, 0)], split.dim)
        for ranges in split.ranges
    ]


@st.composite
def resharding(draw: st.DrawFn) -> tuple[torch.Tensor, TPLayout, TPLayout]:
    """One parameter, cut in two ways: sub-parameters of any widths, any dimension, uneven shards, replicated ones."""
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    subs = [draw(st.integers(1, 8)) for _ in range(draw(st.integers(1, 3)))]
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    shape[dim] = sum(subs)

    def cut() -> TPLayout:
        degree = draw(st.sampled_from([1, 2, 3, 4]))
        if draw(st.integers(0, 4)) == 0:
            return replicated(tuple(shape), degree)
        widths = []
        for sub in subs:
            ends = sorted(draw(st.lists(st.integers(0, sub), min_size=degree - 1, max_size=degree - 1)))
            widths.append([b - a for a, b in zip([0, *ends], [*ends, sub], strict=True)])
        return fused(tuple(shape), dim, widths)

    return torch.arange(math.prod(shape)).view(shape), cut(), cut()


@given(resharding())
def test_any_cut_becomes_any_other(case: tuple[torch.Tensor, TPLayout, TPLayout]) -> None:
    whole, source, target = case
    if source.dim != target.dim:  # one of them is replicated, which has no dimension of its own
        source = (
            TPLayout(source.shape, target.dim, (((0, source.shape[target.dim]),),) * source.degree)
            if (source.ranges[0] == ((0, source.shape[0]),) and source.dim == 0)
            else source
        )
        target = (
            TPLayout(target.shape, source.dim, (((0, target.shape[source.dim]),),) * target.degree)
            if (source.dim != target.dim)
            else target
        )
    saved = [shard.reshape(-1) for shard in shards(whole, source)]
    for rank, expected in enumerate(shards(whole, target)):
        assert target.shard_shape(rank) == tuple(expected.shape)
        transfer = reshard(source, target, rank)
        found = torch.full((expected.numel(),), -1)
        for shard, band in transfer.copies:
            apply(band, saved[shard], found)
        assert torch.equal(found, expected.reshape(-1))
        assert not transfer.missing


def test_the_same_cut_on_both_sides_is_one_plain_copy() -> None:
    split = fused((6, 8, 3), 1, [[4, 4]])
    assert reshard(split, split, 1).copies == copied(1, 6 * 4 * 3).copies


def test_rows_of_padding_that_were_not_saved_are_missing() -> None:
    source, target = fused((5, 3), 0, [[5]]), fused((8, 3), 0, [[4, 4]])
    assert reshard(source, target, 0).missing == ()
    transfer = reshard(source, target, 1)
    assert transfer.missing == (FlatRange(3, 12),)
    assert transfer.copies == ((0, StridedCopy(12, 0, 3)),)


def test_more_saved_rows_than_live_ones_are_left_out() -> None:
    source, target = fused((8, 2), 0, [[4, 4]]), fused((5, 2), 0, [[5]])
    transfer = reshard(source, target, 0)
    assert [(shard, band.numel) for shard, band in transfer.copies] == [(0, 8), (1, 2)]


def test_missing_columns_are_no_padding() -> None:
    with pytest.raises(ValueError, match="dimension 1"):
        reshard(fused((2, 4), 1, [[4]]), fused((2, 6), 1, [[3, 3]]), 1)


def test_a_blend_takes_every_shard() -> None:
    transfer = blended(3, 7, 0.5)
    assert transfer.scale == 0.5
    assert [shard for shard, _ in transfer.copies] == [0, 1, 2]


@given(resharding())
def test_elements_that_several_ranks_hold_are_named_beside_the_first_ones(
    case: tuple[torch.Tensor, TPLayout, TPLayout],
) -> None:
    whole, split, _ = case
    held = shards(whole, split)
    taken = [torch.full((shard.numel(),), -1) for shard in held]
    for rank, shard in enumerate(shards(whole, fused(split.shape, split.dim, [[split.shape[split.dim]]]))):
        for source, band in reshard(
            split, TPLayout(split.shape, split.dim, (((0, split.shape[split.dim]),),)), rank
        ).copies:
            apply(band.reversed(), torch.ones(shard.numel(), dtype=torch.int64), taken[source])
    for (owner, first), (other, second) in duplicates(split):
        values = [torch.full((band.numel,), -1) for band in (first, second)]
        apply(first, held[owner].flatten(), values[0])
        apply(second, held[other].flatten(), values[1])
        assert torch.equal(*values)
        assert owner < other
        apply(second.reversed(), torch.full((band_end(second),), 2), taken[other])
    assert all((marks > 0).all() for marks in taken)  # each element is taken, or compared with one that is


def band_end(band: StridedCopy) -> int:
    return band.target + (band.rows - 1) * band.target_stride + band.width


def test_no_rank_holds_a_plain_cut_twice() -> None:
    assert duplicates(fused((6, 4), 1, [[1, 1], [1, 1]])) == ()
    assert duplicates(replicated((6, 4), 1)) == ()
    assert [(a[0], b[0], a[1].numel) for a, b in duplicates(replicated((6, 4), 3))] == [(0, 1, 24), (0, 2, 24)]


def test_a_stretch_that_one_rank_holds_twice_is_compared_too() -> None:
    ((owner, first), (other, second)) = duplicates(TPLayout((4,), 0, (((0, 4), (1, 3)),)))[0]
    assert (owner, other) == (0, 0)
    assert (first.source, second.source, first.numel, second.numel) == (1, 4, 2, 2)


def test_columns_that_two_ranks_hold_are_compared_row_by_row() -> None:
    split = TPLayout((2, 4), 1, (((0, 3),), ((2, 4),)))
    assert duplicates(split) == (((0, StridedCopy(2, 0, 1, 2, 3, 1)), (1, StridedCopy(0, 0, 1, 2, 2, 1))),)

"""Flat ranges and cuts, against layouts written out element by element."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import group_rules, parameter_rules, placements
from elastic_ckpt.core.flat_ranges import (
    FlatRange,
    Placement,
    group_offsets,
    per_parameter_numel,
)

Element = tuple[int, int] | None

numels_lists = st.lists(st.integers(0, 23), min_size=1, max_size=8)
degrees = st.integers(1, 6)


@st.composite
def ranges(draw: st.DrawFn) -> FlatRange:
    start = draw(st.integers(0, 30))
    return FlatRange(start, start + draw(st.integers(0, 30)))


@st.composite
def flat_groups(draw: st.DrawFn) -> tuple[list[int], list[int] | None, int, int]:
    """Element counts, alignment paddings, number of ranks, size of one partition."""
    numels = draw(numels_lists)
    paddings = draw(st.none() | st.lists(st.integers(0, 5), min_size=len(numels), max_size=len(numels)))
    world_size = draw(degrees)
    total = sum(numels) + sum(paddings or [])
    partition = -(-total // world_size) + draw(st.integers(0, 4))
    return numels, paddings, world_size, partition


def flat_group(numels: list[int], paddings: list[int] | None) -> list[Element]:
    """ZeRO-1/2: the parameters of a group, one behind the other, each followed by its alignment padding."""
    flat: list[Element] = []
    for index, numel in enumerate(numels):
        flat += [(index, element) for element in range(numel)]
        flat += [None] * (paddings[index] if paddings else 0)
    return flat


def cut_flat_group(flat: list[Element], world_size: int, partition: int) -> list[list[Element]]:
    padded = flat + [None] * (world_size * partition - len(flat))
    return [padded[rank * partition : (rank + 1) * partition] for rank in range(world_size)]


def cut_each_parameter(numels: list[int], world_size: int) -> list[list[Element]]:
    """ZeRO-3: every parameter is padded to a multiple of the ranks and dealt out in equal chunks."""
    held: list[list[Element]] = [[] for _ in range(world_size)]
    for index, numel in enumerate(numels):
        padded: list[Element] = [(index, element) for element in range(numel)]
        while len(padded) % world_size:
            padded.append(None)
        chunk = len(padded) // world_size
        for rank in range(world_size):
            held[rank] += padded[rank * chunk : (rank + 1) * chunk]
    return held


def paint(placed: list[Placement], length: int) -> list[Element]:
    """What the placements say, element by element; nothing may be painted twice."""
    painted: list[Element] = [None] * length
    for placement in placed:
        for step in range(placement.range.numel):
            position = placement.flat_offset + step
            assert painted[position] is None, f"position {position} is placed twice"
            painted[position] = (placement.index, placement.range.start + step)
    return painted


def assert_lean(placed: list[Placement]) -> None:
    """One placement a parameter, none empty, in flat order."""
    assert all(placement.range.numel > 0 for placement in placed)
    indices = [placement.index for placement in placed]
    assert indices == sorted(set(indices))
    offsets = [placement.flat_offset for placement in placed]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (-3, -1)])
def test_a_range_that_is_none_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a range"):
        FlatRange(start, stop)


def test_an_empty_range_is_a_range() -> None:
    assert FlatRange(3, 3).numel == 0


@settings(deadline=None)
@given(ranges())
def test_numel_counts_the_elements(one: FlatRange) -> None:
    assert one.numel == len(range(one.start, one.stop))


@settings(deadline=None)
@given(ranges(), ranges())
def test_intersect_is_the_intersection_of_the_element_sets(one: FlatRange, other: FlatRange) -> None:
    shared = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    common = one.intersect(other)
    assert (set() if common is None else set(range(common.start, common.stop))) == shared
    assert common is None or common.numel > 0
    assert common == other.intersect(one)


@settings(deadline=None)
@given(st.lists(ranges()))
def test_ranges_sort_by_start_then_stop(many: list[FlatRange]) -> None:
    assert [(one.start, one.stop) for one in sorted(many)] == sorted((one.start, one.stop) for one in many)


@settings(deadline=None)
@given(flat_groups())
def test_group_offsets_are_the_positions_of_first_elements(
    group: tuple[list[int], list[int] | None, int, int],
) -> None:
    numels, paddings, _, _ = group
    flat = flat_group(numels, paddings)
    offsets = group_offsets(numels, paddings)
    assert len(offsets) == len(numels)
    assert offsets == sorted(offsets)
    for index, (numel, offset) in enumerate(zip(numels, offsets, strict=True)):
        assert flat[offset : offset + numel] == [(index, element) for element in range(numel)]


def test_group_offsets_count_the_padding_of_empty_parameters_too() -> None:
    assert group_offsets([3, 0, 2], [1, 4, 0]) == [0, 4, 8]
    assert group_offsets([3, 0, 2], []) == [0, 3, 3]


@settings(deadline=None)
@given(flat_groups())
def test_the_partition_of_a_group_is_the_cut_of_the_flat_group(
    group: tuple[list[int], list[int] | None, int, int],
) -> None:
    numels, paddings, world_size, partition = group
    naive = cut_flat_group(flat_group(numels, paddings), world_size, partition)
    offsets = group_offsets(numels, paddings)
    for rank in range(world_size):
        placed = list(placements(group_rules(numels, offsets, partition), rank))
        assert_lean(placed)
        assert paint(placed, partition) == naive[rank]


def test_the_partition_of_a_group_follows_the_offsets_it_is_given() -> None:
    assert list(placements(group_rules([2, 3], [1, 10], 8), 1)) == [Placement(1, FlatRange(0, 3), 2)]


@pytest.mark.parametrize(("numels", "offsets"), [([1, 2], [0]), ([1], [0, 1])])
def test_the_partition_of_a_group_refuses_lists_of_different_lengths(numels: list[int], offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        group_rules(numels, offsets, 3)


@settings(deadline=None)
@given(numels_lists, degrees)
def test_the_partition_of_each_parameter_is_the_cut_of_every_parameter(numels: list[int], world_size: int) -> None:
    naive = cut_each_parameter(numels, world_size)
    steps = [per_parameter_numel(numel, world_size) for numel in numels]
    for rank in range(world_size):
        placed = list(placements(parameter_rules(numels, steps), rank))
        assert_lean(placed)
        assert paint(placed, len(naive[rank])) == naive[rank]


@settings(deadline=None)
@given(st.integers(0, 200), degrees)
def test_per_parameter_numel_is_what_every_rank_holds_of_a_padded_parameter(numel: int, world_size: int) -> None:
    assert {len(held) for held in cut_each_parameter([numel], world_size)} == {per_parameter_numel(numel, world_size)}


def test_a_rank_beyond_the_end_of_a_small_parameter_holds_nothing_of_it() -> None:
    # 3 elements over 5 ranks: ranks 3 and 4 hold padding alone; 5 over 4: two each, so that rank 3 holds none
    assert [list(placements(parameter_rules([3], [1]), rank)) for rank in (3, 4)] == [[], []]
    assert list(placements(parameter_rules([5, 4], [2, 1]), 3)) == [Placement(1, FlatRange(3, 4), 2)]


@given(st.integers(0, 2000), degrees, st.sampled_from([1, 3, 64, 256]))
def test_aligned_pieces_are_the_least_multiple_that_holds_the_parameter(numel: int, dp: int, multiple: int) -> None:
    piece = per_parameter_numel(numel, dp, multiple)
    assert piece % multiple == 0 and piece * dp >= numel
    assert piece == 0 or (piece - multiple) * dp < numel


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 5])
)
def test_aligned_pieces_are_cut_between_the_same_blocks_at_every_degree(numels: list[int], a: int, b: int) -> None:
    def blocks(dp: int) -> set[tuple[int, int, int]]:
        """(parameter, start, stop) of all blocks of 256 elements of all ranks' flat tensors, without padding."""
        found = set()
        steps = [per_parameter_numel(numel, dp, 256) for numel in numels]
        for rank in range(dp):
            for placed in placements(parameter_rules(numels, steps), rank):
                assert placed.flat_offset % 256 == placed.range.start % 256 == 0
                for start in range(placed.range.start, placed.range.stop, 256):
                    found.add((placed.index, start, min(start + 256, placed.range.stop)))
        return found

    assert blocks(a) == blocks(b)

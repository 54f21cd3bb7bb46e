"""Sums of parts of a record, against the CRC32 of the whole."""

from __future__ import annotations

import zlib
from functools import reduce
from itertools import pairwise
from operator import or_

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.checksums import PartialSum, Records, judge


@st.composite
def tiled(draw: st.DrawFn) -> tuple[bytes, list[list[tuple[int, int]]]]:
    """A record, and ranges that tile it, dealt out to readers."""
    data = draw(st.binary(min_size=1, max_size=200))
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=12))})
    ranges = list(pairwise(cuts))
    readers: list[list[tuple[int, int]]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for each in draw(st.permutations(ranges)):
        readers[draw(st.integers(0, len(readers) - 1))].append(each)
    return data, readers


def sum_of(data: bytes, ranges: list[tuple[int, int]]) -> PartialSum:
    parts = (PartialSum.of(start, stop, zlib.crc32(data[start:stop]), len(data)) for start, stop in ranges)
    return reduce(or_, parts, PartialSum())


@given(tiled())
def test_ranges_that_tile_a_record_have_its_checksum(case: tuple[bytes, list[list[tuple[int, int]]]]) -> None:
    data, readers = case
    sums = [sum_of(data, ranges) for ranges in readers if ranges]
    together = reduce(or_, sums)
    assert together.tiles(len(data)) and together.crc32 == zlib.crc32(data)
    assert judge(sums, len(data), zlib.crc32(data)) is True


@given(tiled(), st.data())
def test_a_flipped_bit_that_any_reader_met_is_found(
    case: tuple[bytes, list[list[tuple[int, int]]]], draws: st.DataObject
) -> None:
    data, readers = case
    position, bit = draws.draw(st.integers(0, len(data) - 1)), draws.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    sums = [sum_of(bytes(changed), ranges) for ranges in readers if ranges]
    assert judge(sums, len(data), zlib.crc32(data)) is False


@given(tiled(), st.data())
def test_what_was_not_read_by_anybody_is_not_judged(
    case: tuple[bytes, list[list[tuple[int, int]]]], draws: st.DataObject
) -> None:
    data, readers = case
    ranges = [each for reader in readers for each in reader]
    lost = draws.draw(st.integers(0, len(ranges) - 1))
    sums = [sum_of(data, [each for at, each in enumerate(ranges) if at != lost])]
    assert judge(sums, len(data), zlib.crc32(data)) is (None if len(ranges) > 1 or not sums[0].nbytes else True)


@given(tiled(), st.integers(1, 3))
def test_readers_of_the_same_bytes_must_agree(case: tuple[bytes, list[list[tuple[int, int]]]], copies: int) -> None:
    data, readers = case
    sums = [sum_of(data, ranges) for ranges in readers if ranges]
    assert judge(sums * copies, len(data), zlib.crc32(data)) is True
    wrong = PartialSum(sums[0].crc32 ^ 1, *sums[0].positions)
    assert judge([*sums, wrong], len(data), zlib.crc32(data)) is False


@given(tiled())
def test_a_reader_of_the_whole_record_vouches_for_itself_alone(case: tuple[bytes, list[list[tuple[int, int]]]]) -> None:
    data, readers = case
    whole = sum_of(data, [(0, len(data))])
    parts = [sum_of(data, ranges) for ranges in readers if ranges]
    assert judge([whole, *parts], len(data), zlib.crc32(data)) is True
    if len(parts) > 1:
        assert judge([whole, *parts[1:]], len(data), zlib.crc32(data)) is None


def test_a_gap_beside_an_overlap_of_its_size_is_no_tiling() -> None:
    data = bytes(range(100))
    assert not sum_of(data, [(0, 60), (50, 90)]).tiles(100)


def test_records_are_found_by_offset() -> None:
    records = Records.of([(640, 100, 7), (64, 100, 5), (64, 100, 5), (300, 10, 0)])
    assert list(records.offsets) == [64, 300, 640]
    found = {offset: records.index(offset) for offset in (0, 63, 64, 163, 164, 305, 640, 739, 740)}
    assert found == {0: None, 63: None, 64: 0, 163: 0, 164: None, 305: None, 640: 2, 739: 2, 740: None}
    assert Records.of([]).index(0) is None

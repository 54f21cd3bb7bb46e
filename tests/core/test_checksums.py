"""Sums of parts of a record, against the CRC32 of the whole."""

from __future__ import annotations

import pickle
import zlib
from functools import reduce
from itertools import pairwise
from operator import or_

from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ckpt.core.checksums import PartialSum, Records, _hash


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


@given(tiled(), st.data())
def test_a_flipped_bit_that_any_reader_met_is_found(
    case: tuple[bytes, list[list[tuple[int, int]]]], draws: st.DataObject
) -> None:
    data, readers = case
    position, bit = draws.draw(st.integers(0, len(data) - 1)), draws.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    assert reduce(or_, [sum_of(bytes(changed), ranges) for ranges in readers]).crc32 != zlib.crc32(data)


@given(tiled(), st.data())
def test_ranges_that_nobody_or_several_read_are_no_tiling(
    case: tuple[bytes, list[list[tuple[int, int]]]], draws: st.DataObject
) -> None:
    data, readers = case
    ranges = [each for reader in readers for each in reader]
    count = draws.draw(st.sampled_from([0, 2, 3]))
    number = draws.draw(st.sampled_from([at for at, (start, stop) in enumerate(ranges) if start < stop]))
    ranges[number : number + 1] = [ranges[number]] * count
    assert not sum_of(data, ranges).tiles(len(data))


def test_a_gap_beside_an_overlap_of_its_size_is_no_tiling() -> None:
    data = bytes(range(100))
    assert not sum_of(data, [(0, 60), (50, 90)]).tiles(100)


#: Bytes of a record of seven, by which ones are read: power sums of their positions are those of each byte once.
SAME_POWER_SUMS = [(0, 1), (4, 5), (0, 1), (4, 5), (5, 6), (5, 6), (3, 4)]


def counted(ranges: list[tuple[int, int]], record_nbytes: int) -> list[int]:
    """How often each byte of a record was read."""
    return [sum(start <= byte < stop for start, stop in ranges) for byte in range(record_nbytes)]


@st.composite
def ranges_of_a_record(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    record_nbytes = draw(st.integers(1, 12))
    edges = st.integers(0, record_nbytes)
    ranges = draw(st.lists(st.tuples(edges, edges).map(lambda pair: (min(pair), max(pair))), max_size=8))
    return record_nbytes, ranges


@example((7, SAME_POWER_SUMS))
@given(ranges_of_a_record())
def test_ranges_are_a_tiling_if_they_have_each_byte_once(case: tuple[int, list[tuple[int, int]]]) -> None:
    record_nbytes, ranges = case
    data = bytes(record_nbytes)
    assert sum_of(data, ranges).tiles(record_nbytes) == (counted(ranges, record_nbytes) == [1] * record_nbytes)


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=50))
def test_a_sum_is_small_whatever_was_read(starts: list[int]) -> None:
    sums = (PartialSum.of(start, start + 1, 0xFFFFFFFF, 1 << 51) for start in starts)
    whole = reduce(or_, sums)
    assert whole.edges < 1 << 64 and len(pickle.dumps([whole] * 2)) - len(pickle.dumps([])) < 120


def test_records_are_found_by_offset() -> None:
    records = Records.of([(640, 100, 7), (64, 100, 5), (64, 100, 5), (300, 10, 0)])
    assert list(records.offsets) == [64, 300, 640]
    found = {offset: records.index(offset) for offset in (0, 63, 64, 163, 164, 305, 640, 739, 740)}
    assert found == {0: None, 63: None, 64: 0, 163: 0, 164: None, 305: None, 640: 2, 739: 2, 740: None}
    assert Records.of([]).index(0) is None


def test_the_hash_of_a_position_is_splitmix64() -> None:
    """Its first numbers from the seeds 0 and 1, as the reference implementation gives them."""
    assert _hash(0) == 0xE220A8397B1DCDAF
    assert _hash(1) == 0x910A2DEC89025CC1

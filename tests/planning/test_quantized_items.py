"""Rows of 8-bit states cut anew: plan, copies and recodes together, against numpy, element by element.

Parameters lie in source partitions, each with blocks of its own that are counted from its start, and in one target row.
What is planned is done on bytes, and every element of the row is then decoded by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elastic_ckpt.core.read_plan import ReadItem, RequantizeItem
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.coalesce import parts_of
from elastic_ckpt.io.staging import ReadStats, requantize
from elastic_ckpt.planning.read_items import requantized_blocks, split_plane
from tests.planning.partitions import ITEMSIZE, ROUNDING, SIGNED, UNSIGNED, Disk, Partition

NUMPY = {"uint8": np.uint8, "float32": np.float32}
#: Equal scales are to be met often, and a block of zeros now and then.
SCALES = (1.0, 0.5, 0.37, 2e-9, 41.0, 0.0)
#: What is in targets before anything is written.
UNTOUCHED = {"uint8": 77, "float32": -7.0}
PLENTY = 1 << 20


FOUR, EIGHT = (BlockFormat(numel, "scales", SIGNED[0]) for numel in (4, 8))


# --- simulated files --------------------------------------------------------------------------------------------


# --- a simulated row --------------------------------------------------------------------------------------------


def row_of(
    target: int, start: int, numel: int, blocks: BlockFormat | None, scales_target: int = -1, scales_start: int = 0
) -> RequantizeItem:
    """A row that has no sources yet."""
    return RequantizeItem(target, start, numel, blocks, scales_target, scales_start, ())


def plan_row(row: RequantizeItem, items: Sequence[ReadItem]) -> tuple[list[ReadItem], list[RequantizeItem]]:
    """Plan a row from items whose ``target_offset`` counts from its first element."""
    return split_plane(
        replace(row, sources=tuple(replace(i, target_offset=row.start + i.target_offset) for i in items))
    )


@dataclass(frozen=True)
class Filled:
    """What was written, and how often."""

    values: NDArray[np.generic]
    scales: NDArray[np.float32]
    written: NDArray[np.int64]
    scales_written: NDArray[np.int64]
    stats: ReadStats


def fill(
    disk: Disk,
    row: RequantizeItem,
    copies: Sequence[ReadItem],
    recodes: Sequence[RequantizeItem],
    staging: int = PLENTY,
    behind: int = 0,
) -> Filled:
    """Do copies and recodes on targets 0 (codes or values) and 1 (scales), with ``behind`` more elements in each."""
    dtype = "float32" if row.blocks is None else "uint8"
    blocks = 0 if row.blocks is None else row.blocks.blocks(row.numel)
    tensors = [
        torch.full((row.start + row.numel + behind,), UNTOUCHED[dtype], dtype=getattr(torch, dtype)),
        torch.full((row.scales_start + blocks + behind,), UNTOUCHED["float32"]),
    ]
    written = [np.zeros(tensor.numel(), np.int64) for tensor in tensors]
    for copy in copies:
        raw = disk.files[copy.file][copy.byte_offset : copy.byte_offset + copy.numel * ITEMSIZE[copy.dtype]]
        assert len(raw) == copy.numel * ITEMSIZE[copy.dtype] > 0
        here = slice(copy.target_offset, copy.target_offset + copy.numel)
        tensors[copy.target][here] = torch.frombuffer(raw, dtype=getattr(torch, copy.dtype)).to(
            tensors[copy.target].dtype
        )
        written[copy.target][here] += 1
    stats = ReadStats()
    for recode in recodes:
        for chunk in parts_of(recode, staging):
            before = disk.nbytes
            done = requantize(chunk, tensors, disk.read)
            assert done.nbytes == disk.nbytes - before
            stats += done
            mark(chunk, written)
    return Filled(tensors[0].numpy(), tensors[1].numpy(), written[0], written[1], stats)


def mark(part: RequantizeItem, written: Sequence[NDArray[np.int64]]) -> None:
    """Count what a part writes: whole blocks, or just the elements that it has."""
    if part.blocks is not None:
        written[0][part.start : part.stop] += 1
        written[1][part.scales_start : part.scales_start + part.blocks.blocks(part.numel)] += 1
        return
    for source in part.sources:
        written[0][source.target_offset : source.target_stop] += 1


#: For each element of a row: its source partition and its position there; ``None``: a gap.
Sources = list[tuple[Partition, int] | None]


@dataclass(frozen=True)
class Case:
    """One random row."""

    disk: Disk
    row: RequantizeItem
    pieces: tuple[ReadItem, ...]
    sources: Sources
    staging: int

    @property
    def blocks(self) -> list[list[tuple[Partition, int]]]:
        """The source elements of each block of the row."""
        assert self.row.blocks is not None
        step = self.row.blocks.numel
        cuts = [self.sources[start : start + step] for start in range(0, len(self.sources), step)]
        return [[source for source in block if source is not None] for block in cuts]


def one_scale(block: Sequence[tuple[Partition, int]], codebook: Codebook) -> bool:
    """Whether all elements are quantized by one map at one scale."""
    if not all(part.format is not None and part.format.codebook == codebook for part, _ in block):
        return False
    return len({part.scale(position) for part, position in block}) == 1


#: A parameter and an element of it; ``None``: a gap.
Layout = list[tuple[int, int] | None]


def random_partition(random: Random, disk: Disk, numel: int, books: Sequence[Codebook]) -> Partition:
    """Codes of random bytes at random scales, or now and then values."""
    kind = random.choice(["coded"] * 10 + ["float32", "bfloat16"])
    numbers = np.random.default_rng(random.getrandbits(32))
    new_file = random.random() < 0.5
    if kind != "coded":
        values = numbers.normal(size=numel) * numbers.choice(SCALES, numel)
        return disk.raw(values if books[0].signed else np.abs(values), kind, new_file)
    blocks = BlockFormat(random.choice([4, 4, 4, 8]), "scales", random.choice([books[0]] * 6 + [books[1]]))
    codes = numbers.integers(0, 256, numel, np.uint8)
    scales = numbers.choice(SCALES[: random.choice([1, 1, 3, 6])], blocks.blocks(numel))
    return disk.coded(codes, scales, blocks, new_file, random.randrange(6), random.random() < 0.5)


def random_layout(random: Random, numels: Sequence[int], unit: int) -> Layout:
    """Parameters one behind the other, in any order, with gaps."""
    order = list(range(len(numels)))
    if random.random() < 0.3:
        random.shuffle(order)
    flat: Layout = [None] * (unit * random.choice([0, 0, 1, 2]))
    for number in order:
        flat += [(number, index) for index in range(numels[number])]
        flat += [None] * (unit * random.choice([0, 0, 0, 1, 2, 3, 9]))
    return flat


def random_target(random: Random, flat: Layout, numels: Sequence[int], unit: int) -> Layout:
    """A part of a layout: of the same one, or of another; some parameters may be left out."""
    goal = flat if random.random() < 0.6 else random_layout(random, numels, unit)
    lost = [number for number in range(len(numels)) if random.random() < 0.2]
    first = unit * random.randrange(-(-len(goal) // unit)) if random.random() < 0.3 else 4 * random.randrange(3)
    held = [None if element is None or element[0] in lost else element for element in goal[first:]]
    return (held[: random.randint(1, len(held))] if random.random() < 0.3 else held) if held else [None]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([1, 2, 4]))
    target = draw(st.sampled_from([4, 8, 4, 4, None]))
    books = draw(st.sampled_from([SIGNED, UNSIGNED]))
    random = Random(draw(st.integers(0, 2**32 - 1)))
    numels = [unit * random.randint(1, 24 // unit) for _ in range(random.randint(1, 4))]
    flat = random_layout(random, numels, unit)
    cuts = sorted({unit * random.randint(0, len(flat) // unit) for _ in range(random.randint(0, 3))})
    disk, where = Disk(), {}
    for start, stop in pairwise([0, *(cut for cut in cuts if 0 < cut < len(flat)), len(flat)]):
        part = random_partition(random, disk, stop - start, books)
        where |= {element: (part, place) for place, element in enumerate(flat[start:stop]) if element is not None}
    held = random_target(random, flat, numels, unit)
    sources: Sources = [None if element is None else where[element] for element in held]
    return Case(
        disk=disk,
        row=row_of(
            target=0,
            start=random.randrange(10),
            numel=len(held),
            blocks=None if target is None else BlockFormat(target, "scales", books[0]),
            scales_target=1,
            scales_start=random.randrange(6),
        ),
        pieces=pieces_of(held, sources),
        sources=sources,
        staging=draw(st.sampled_from([1, 48 * 4, 48 * 8, 48 * 13, 48 * 24])),
    )


def pieces_of(held: Layout, sources: Sources) -> tuple[ReadItem, ...]:
    """Runs of elements of one parameter in one partition."""
    pieces: list[ReadItem] = []
    for start, (element, source) in enumerate(zip(held, sources, strict=True)):
        if element is None or source is None:
            continue
        part, position = source
        before = held[start - 1] if start else None
        if before == (element[0], element[1] - 1) and sources[start - 1] == (part, position - 1):
            pieces[-1] = replace(pieces[-1], numel=pieces[-1].numel + 1)
        else:
            pieces.append(part.piece(position, start, 1))
    return tuple(pieces)


def check_values(case: Case, filled: Filled) -> None:
    """A row of fp32: every element as it was decoded in the source, gaps as they were."""
    written = filled.written[case.row.start :][: case.row.numel]
    got = filled.values[case.row.start :][: case.row.numel]
    for place, source in enumerate(case.sources):
        expected = UNTOUCHED["float32"] if source is None else source[0].values[source[1]]
        assert np.float32(got[place]).tobytes() == np.float32(expected).tobytes()
        assert written[place] == (source is not None)


def check_codes(case: Case, filled: Filled) -> float:
    """A row of codes; returns the largest change, as a fraction of its block's scale."""
    row, target, worst = case.row, case.row.blocks, 0.0
    assert target is not None
    table = np.float32(target.codebook.values)
    for number, sources in enumerate(case.blocks):
        start = row.start + number * target.numel
        here = slice(start, min(start + target.numel, row.start + row.numel))
        scale = filled.scales[row.scales_start + number]
        times = set(filled.written[here].tolist()) | {int(filled.scales_written[row.scales_start + number])}
        assert times == {1 if sources else 0}, "a block is written once or, where it has no source, not at all"
        if not sources:
            assert set(filled.values[here].tolist()) == {UNTOUCHED["uint8"]}
            assert scale == UNTOUCHED["float32"]
            continue
        decoded = table[filled.values[here]] * scale
        exact = one_scale(sources, target.codebook)
        for place, value in enumerate(decoded, number * target.numel):
            source = case.sources[place]
            if source is None:
                assert value == 0.0, "a gap inside of a block is not zero"
                continue
            before = source[0].values[source[1]]
            if exact:
                assert value.tobytes() == before.tobytes()
                continue
            change = abs(float(value) - float(before)) / float(scale or 1.0)
            assert change <= target.codebook.bound + ROUNDING
            worst = max(worst, change)
    return worst


def check_nothing_else_is_written(case: Case, filled: Filled) -> None:
    outside = np.ones(len(filled.written), bool)
    outside[case.row.start : case.row.start + case.row.numel] = False
    blocks = 0 if case.row.blocks is None else case.row.blocks.blocks(case.row.numel)
    scales_outside = np.ones(len(filled.scales), bool)
    scales_outside[case.row.scales_start : case.row.scales_start + blocks] = False
    assert not filled.written[outside].any()
    assert not filled.scales_written[scales_outside].any()
    assert set(filled.values[outside].tolist()) <= {UNTOUCHED["uint8"], UNTOUCHED["float32"]}
    assert set(filled.scales[scales_outside].tolist()) <= {UNTOUCHED["float32"]}


quick = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(quick, max_examples=200)
@given(cases())
def test_every_element_of_a_row_is_that_of_its_source(case: Case) -> None:
    copies, recodes = plan_row(case.row, case.pieces)
    filled = fill(case.disk, case.row, copies, recodes, behind=3)
    check_nothing_else_is_written(case, filled)
    if case.row.blocks is None:
        check_values(case, filled)
        worst, recoded = 0.0, []
    else:
        worst = check_codes(case, filled)
        recoded = [block for block in case.blocks if block and not one_scale(block, case.row.blocks.codebook)]
    assert filled.stats.blocks == len(recoded)
    assert filled.stats.worst_error == pytest.approx(worst, abs=ROUNDING)


@quick
@given(cases())
def test_small_chunks_give_what_one_big_one_does(case: Case) -> None:
    copies, recodes = plan_row(case.row, case.pieces)
    step = 1 if case.row.blocks is None else case.row.blocks.numel
    whole = fill(case.disk, case.row, copies, recodes)
    parts = fill(case.disk, case.row, copies, recodes, case.staging)
    assert np.array_equal(whole.values, parts.values)
    assert np.array_equal(whole.scales, parts.scales)
    assert (whole.written.tolist(), whole.scales_written.tolist()) == (
        parts.written.tolist(),
        parts.scales_written.tolist(),
    )
    assert whole.stats.blocks == parts.stats.blocks
    assert whole.stats.worst_error == parts.stats.worst_error
    for recode in recodes:
        cut = list(parts_of(recode, case.staging))
        assert all((chunk.stop - chunk.start) * 48 <= max(case.staging, 48 * step) for chunk in cut)
        assert all((chunk.start - recode.start) % step == 0 and chunk.sources for chunk in cut)
        for chunk in cut:
            held = case.sources[chunk.start - case.row.start : chunk.stop - case.row.start]
            coded_only = case.row.blocks is None
            parts_held = [s[0] for s in held if s is not None and not (coded_only and s[0].format is None)]
            assert chunk.nbytes == sum(ITEMSIZE[part.dtype] for part in parts_held)


@quick
@given(cases())
def test_blocks_that_mix_several_source_blocks_are_counted(case: Case) -> None:
    _, recodes = plan_row(case.row, case.pieces)
    expected = 0
    for sources in case.blocks if case.row.blocks else ():
        same_map = case.row.blocks.codebook
        raw = any(part.format is None or part.format.codebook != same_map for part, _ in sources)
        found = {(id(part), position // part.format.numel) for part, position in sources if part.format is not None}
        expected += raw or len(found) > 1
    assert sum(map(requantized_blocks, recodes)) == expected


@quick
@given(cases())
def test_blocks_that_lie_whole_on_both_sides_are_plain_copies(case: Case) -> None:
    target = case.row.blocks
    assume(target is not None)
    copies, recodes = plan_row(case.row, case.pieces)
    copied = {
        (copy.target_offset - case.row.start) // target.numel + number
        for copy in copies
        if copy.target == 0
        for number in range(target.blocks(copy.numel))
    }
    for number, sources in enumerate(case.blocks):
        numel = min(target.numel, case.row.numel - number * target.numel)
        first = sources[0] if sources else None
        whole = (
            first is not None
            and first[0].format == target
            and first[1] % target.numel == 0
            and [(id(part), position) for part, position in sources]
            == [(id(first[0]), first[1] + step) for step in range(numel)]
        )
        assert (number in copied) == whole
    assert all(copy.numel == target.blocks(other.numel) for other, copy in zip(copies[::2], copies[1::2], strict=True))
    for recode in recodes:
        assert (recode.start - case.row.start) % target.numel == 0
        ends = recode.start + recode.numel - case.row.start
        assert ends % target.numel == 0 or ends == case.row.numel
        starts = [source.target_offset for source in recode.sources]
        assert starts == sorted(starts)
        assert all(
            recode.start <= source.target_offset and source.target_stop <= recode.stop for source in recode.sources
        )


# --- directed ---------------------------------------------------------------------------------------------------


def coded_row(numel: int, target: BlockFormat | None = FOUR) -> RequantizeItem:
    return row_of(0, 0, numel, target, 1, 0)


def sixteen(disk: Disk, scales: Sequence[float] = (1.0, 2.0, 3.0, 4.0)) -> Partition:
    return disk.coded(range(100, 116), scales, FOUR)


def test_neighbours_in_the_same_grid_are_two_plain_copies() -> None:
    disk = Disk()
    part = sixteen(disk)
    pieces = [part.piece(0, 0, 3), part.piece(3, 3, 6), part.piece(9, 9, 1), part.piece(10, 10, 6)]
    copies, recodes = plan_row(coded_row(16), pieces)
    assert recodes == []
    assert copies == [
        ReadItem(part.file, part.byte_offset, 0, 0, 16, "uint8"),
        ReadItem(part.file, part.scales_offset, 1, 0, 4, "float32"),
    ]


def test_blocks_may_move_by_whole_blocks() -> None:
    disk = Disk()
    part = sixteen(disk)
    copies, recodes = plan_row(row_of(0, 100, 20, FOUR, 1, 50), [part.piece(8, 4, 8)])
    assert recodes == []
    assert copies == [
        ReadItem(part.file, part.byte_offset + 8, 0, 104, 8, "uint8"),
        ReadItem(part.file, part.scales_offset + 8, 1, 51, 2, "float32"),
    ]


def test_whole_blocks_behind_a_part_of_one_are_plain_copies() -> None:
    disk = Disk()
    part = sixteen(disk)
    row = coded_row(16)
    copies, recodes = plan_row(row, [part.piece(3, 3, 12)])
    assert copies == [
        ReadItem(part.file, part.byte_offset + 4, 0, 4, 8, "uint8"),
        ReadItem(part.file, part.scales_offset + 4, 1, 1, 2, "float32"),
    ]
    assert [(recode.start, recode.numel, requantized_blocks(recode)) for recode in recodes] == [(0, 4, 0), (12, 4, 0)]
    filled = fill(disk, row, copies, recodes)
    assert filled.values.tolist() == [*[FOUR.codebook.zero] * 3, *range(103, 115), FOUR.codebook.zero]
    assert filled.scales.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_short_last_block_of_the_row_is_a_plain_copy() -> None:
    disk = Disk()
    part = sixteen(disk)
    copies, recodes = plan_row(coded_row(6), [part.piece(4, 0, 6)])
    assert recodes == []
    assert [copy.numel for copy in copies] == [6, 2]


def test_a_block_that_the_checkpoint_cut_short_is_finished_with_zeros() -> None:
    disk = Disk()
    part = sixteen(disk)
    copies, recodes = plan_row(coded_row(9), [part.piece(4, 0, 6)])
    assert [copy.numel for copy in copies] == [4, 1]
    assert [(recode.start, recode.numel, requantized_blocks(recode)) for recode in recodes] == [(4, 4, 0)]
    filled = fill(disk, coded_row(9), copies, recodes)
    assert filled.values.tolist() == [104, 105, 106, 107, 108, 109, FOUR.codebook.zero, FOUR.codebook.zero, 77]
    assert filled.scales.tolist() == [2.0, 3.0, UNTOUCHED["float32"]]
    assert (filled.stats.nbytes, filled.stats.blocks, filled.stats.worst_error) == (2 + 4, 0, 0.0)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_a_shifted_grid_mixes_neighbouring_blocks(shift: int) -> None:
    disk = Disk()
    part = sixteen(disk)
    row = coded_row(12)
    copies, recodes = plan_row(row, [part.piece(shift, 0, 12)])
    assert copies == []
    assert [requantized_blocks(recode) for recode in recodes] == [3]
    filled = fill(disk, row, copies, recodes)
    assert filled.stats.blocks == 3
    assert filled.stats.nbytes == 12 + 4 * 4
    assert 0.0 < filled.stats.worst_error <= FOUR.codebook.bound + ROUNDING


def test_a_shifted_grid_of_one_scale_keeps_its_codes() -> None:
    disk = Disk()
    part = sixteen(disk, (2.5,) * 4)
    row = coded_row(12)
    copies, recodes = plan_row(row, [part.piece(3, 0, 12)])
    filled = fill(disk, row, copies, recodes)
    assert filled.values.tolist() == list(range(103, 115))
    assert filled.scales.tolist() == [2.5] * 3
    assert (filled.stats.nbytes, filled.stats.blocks, filled.stats.worst_error) == (12 + 16, 0, 0.0)
    assert requantized_blocks(recodes[0]) == 3, "scales are not known when it is planned"


def test_smaller_blocks_inside_of_bigger_ones_keep_their_codes() -> None:
    disk = Disk()
    part = disk.coded(range(16), (1.0, 2.0), EIGHT)
    copies, recodes = plan_row(coded_row(16), [part.piece(0, 0, 16)])
    assert copies == []
    assert sum(map(requantized_blocks, recodes)) == 0
    filled = fill(disk, coded_row(16), copies, recodes)
    assert filled.values.tolist() == list(range(16))
    assert filled.scales.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert (filled.stats.nbytes, filled.stats.blocks, filled.stats.worst_error) == (16 + 2 * 4, 0, 0.0)


def test_another_map_is_quantized_anew_even_at_one_scale() -> None:
    disk = Disk()
    part = disk.coded(range(60, 64), (1.5,), replace(FOUR, codebook=SIGNED[1]))
    copies, recodes = plan_row(coded_row(4), [part.piece(0, 0, 4)])
    assert copies == []
    filled = fill(disk, coded_row(4), copies, recodes)
    decoded = np.float32(FOUR.codebook.values)[filled.values] * filled.scales[0]
    assert np.abs(decoded - part.values).max() <= FOUR.codebook.bound * filled.scales[0] * (1 + ROUNDING)
    assert filled.stats.blocks == 1


def test_blocks_of_two_partitions_in_one_file_are_not_one_block() -> None:
    disk = Disk()
    first = disk.coded([200, 201], (1.0,), FOUR)
    second = disk.coded([9, 8, 7, 6], (3.0,), FOUR, new_file=False)
    _, recodes = plan_row(coded_row(4), [first.piece(0, 0, 2), second.piece(2, 2, 2)])
    assert [requantized_blocks(recode) for recode in recodes] == [1]


def test_blocks_at_the_same_place_of_two_files_are_not_one_block() -> None:
    disk = Disk()
    first, second = sixteen(disk), sixteen(disk, (5.0, 6.0, 7.0, 8.0))
    assert (first.scales_offset, first.byte_offset) == (second.scales_offset, second.byte_offset)
    _, recodes = plan_row(coded_row(4), [first.piece(0, 0, 2), second.piece(2, 2, 2)])
    assert [requantized_blocks(recode) for recode in recodes] == [1]


def test_values_that_were_not_quantized_are_counted_once_a_block() -> None:
    disk = Disk()
    part, raw = sixteen(disk), disk.raw([0.5, -0.25, 1.0, 0.125, 3.0, 0.0])
    row = coded_row(12)
    copies, recodes = plan_row(row, [part.piece(0, 0, 4), raw.piece(0, 4, 5), part.piece(9, 9, 3)])
    assert [copy.target_offset for copy in copies] == [0, 0]
    assert [(recode.start, recode.numel, requantized_blocks(recode)) for recode in recodes] == [(4, 8, 2)]
    filled = fill(disk, row, copies, recodes)
    assert filled.stats.nbytes == 5 * 4 + 3 + 4
    assert filled.stats.blocks == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_values_side_by_side_become_values(dtype: str) -> None:
    disk = Disk()
    part, raw = sixteen(disk), disk.raw([0.5, -0.25, 1.0], dtype)
    row = row_of(0, 7, 12, None)
    copies, recodes = plan_row(row, [part.piece(3, 0, 3), raw.piece(1, 3, 2), part.piece(8, 6, 5)])
    assert copies == [ReadItem(raw.file, raw.byte_offset + ITEMSIZE[dtype], 0, 10, 2, dtype)]
    assert [(recode.start, recode.numel, recode.scales_target) for recode in recodes] == [(7, 12, -1)]
    filled = fill(disk, row, copies, recodes)
    untouched = np.float32([UNTOUCHED["float32"]])
    expected = [untouched.repeat(7), part.values[3:6], raw.values[1:3], untouched, part.values[8:13], untouched]
    assert filled.values.tolist() == np.concatenate(expected).tolist()
    assert (filled.stats.nbytes, filled.stats.blocks, filled.stats.worst_error) == (3 + 2 * 4 + 5 + 2 * 4, 0, 0.0)


def test_a_row_without_sources_is_left_alone() -> None:
    for target in (FOUR, None):
        assert plan_row(coded_row(10, target), []) == ([], [])


def test_pieces_far_apart_are_recoded_apart() -> None:
    disk = Disk()
    part = sixteen(disk)
    _, recodes = plan_row(coded_row(40), [part.piece(1, 1, 2), part.piece(5, 21, 2), part.piece(3, 24, 2)])
    assert [(recode.start, recode.numel, recode.scales_start) for recode in recodes] == [(0, 4, 0), (20, 8, 5)]
    assert [len(recode.sources) for recode in recodes] == [1, 2]


@pytest.mark.parametrize("staging", [1, PLENTY])
def test_chunks_without_sources_are_left_out(staging: int) -> None:
    disk = Disk()
    part = sixteen(disk)
    pieces = (part.piece(1, 3, 2), part.piece(5, 30, 2))
    recode = RequantizeItem(0, 0, 40, FOUR, 1, 0, pieces)
    found = [(chunk.start, chunk.stop, len(chunk.sources)) for chunk in parts_of(recode, staging)]
    assert found == ([(0, 4, 1), (4, 8, 1), (28, 32, 1)] if staging == 1 else [(0, 40, 2)])


def test_a_block_without_sources_among_others_is_zero() -> None:
    disk = Disk()
    part = sixteen(disk)
    recode = RequantizeItem(0, 0, 12, FOUR, 1, 0, (part.piece(1, 3, 1), part.piece(5, 9, 2)))
    filled = fill(disk, coded_row(12), [], [recode])
    zero = FOUR.codebook.zero
    assert filled.values.tolist() == [zero, zero, zero, 101, *[zero] * 5, 105, 106, zero]
    assert filled.scales.tolist() == [1.0, 0.0, 2.0]


def test_stats_add_up_and_keep_the_worst_error() -> None:
    total = ReadStats(3, 1, 2, 1, 0.25) + ReadStats(4, 2, 5, 2, 0.125)
    assert total == ReadStats(7, 3, 7, 3, 0.25)
    assert ReadStats() + total == total + ReadStats() == total


def test_the_worst_error_of_a_chunk_is_that_of_its_values() -> None:
    disk = Disk()
    codebook = FOUR.codebook
    low = int(np.argmax(np.diff(codebook.values)))
    middle = (codebook.values[low] + codebook.values[low + 1]) / 2
    raw = disk.raw([10.0, 10.0 * middle, 0.0, 0.0])
    _, recodes = plan_row(coded_row(4), [raw.piece(0, 0, 4)])
    stats = fill(disk, coded_row(4), [], recodes).stats
    assert stats.worst_error == pytest.approx(codebook.bound, rel=1e-4)
    assert (stats.nbytes, stats.blocks) == (16, 1)


@pytest.mark.parametrize("target", [FOUR, EIGHT, None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite_is_damage(bad: float, target: BlockFormat | None) -> None:
    disk = Disk()
    part = sixteen(disk, (1.0, 2.0, bad, 4.0))
    row = coded_row(7, target)
    _, recodes = plan_row(row, [part.piece(3, 0, 7)])
    with pytest.raises(DamagedError, match="scale of an 8-bit block is not finite") as caught:
        fill(disk, row, [], recodes)
    assert caught.value.found == f"{bad} near byte {part.scales_offset}"


@pytest.mark.parametrize("target", [FOUR, None])
@pytest.mark.parametrize(("position", "numel"), [(1, 7), (13, 3)])
def test_scales_of_blocks_that_are_not_asked_for_do_not_matter(
    position: int, numel: int, target: BlockFormat | None
) -> None:
    disk = Disk()
    part = sixteen(disk, (1.0, 2.0, float("nan"), 4.0))
    row = coded_row(numel, target)
    copies, recodes = plan_row(row, [part.piece(position, 0, numel)])
    filled = fill(disk, row, copies, recodes)
    assert filled.stats.nbytes == numel + (8 if position == 1 else 4)


def test_values_that_the_new_format_cannot_hold_are_damage() -> None:
    disk = Disk()
    positive = BlockFormat(4, "scales", UNSIGNED[0])
    for values, target in (([1.0, -1.0], positive), ([1.0, float("nan")], FOUR), ([float("inf"), 1.0], FOUR)):
        raw = disk.raw(values)
        row = coded_row(2, target)
        _, recodes = plan_row(row, [raw.piece(0, 0, 2)])
        with pytest.raises(DamagedError, match="8-bit format cannot express"):
            fill(disk, row, [], recodes)


def test_a_block_of_another_map_counts_as_one_that_is_quantized_anew() -> None:
    disk = Disk()
    part = disk.coded(range(60, 64), (1.5,), replace(FOUR, codebook=SIGNED[1]))
    _, recodes = plan_row(coded_row(4), [part.piece(0, 0, 4)])
    assert sum(map(requantized_blocks, recodes)) == 1

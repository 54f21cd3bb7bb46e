"""The chunks that a rule computes, against those of flat tensors that are written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import (
    BlockCode,
    Box,
    BoxChunks,
    ChunkSource,
    FlatTensors,
    ListedChunks,
    PartitionedChunks,
    PartitionRule,
    QuantizedChunks,
    QuantizedRun,
    StorageChunk,
    boxed,
    by_rank,
    chunks_of,
    group_rules,
    parameter_rules,
)
from elastic_ckpt.core.flat_ranges import FlatRange, group_offsets, per_parameter_numel
from elastic_ckpt.core.metadata import TensorMetadata
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from tests.oracle.chunk_lists import Flats, chunk_list, flats_by_parameter, flats_of_group

CODEBOOK = Codebook(tuple(number / 255 for number in range(256)))


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[list[int], list[PartitionRule], Flats]:
    """Sizes of parameters, empty ones among them, their rules, and the flat tensors of all ranks."""
    numels = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    ranks = draw(st.integers(1, 9))
    if draw(st.booleans()):
        multiple = draw(st.sampled_from([1, 1, 4]))
        steps = [per_parameter_numel(numel, ranks, multiple) for numel in numels]
        return numels, parameter_rules(numels, steps), flats_by_parameter(numels, ranks, multiple)
    paddings = [draw(st.sampled_from([0, 0, 1, 5])) for _ in numels] if draw(st.booleans()) else None
    needed = sum(numels) + sum(paddings or ())
    partition = max(-(-needed // ranks) + draw(st.integers(0, 3)), 1)
    rules = group_rules(numels, group_offsets(numels, paddings), partition)
    return numels, rules, flats_of_group(numels, paddings or [0] * len(numels), ranks, partition)


@st.composite
def cases(draw: st.DrawFn) -> list[tuple[int, ChunkSource, list[StorageChunk]]]:
    """Of each parameter the elements in all rows, the chunks that its rule computes, and those that are right."""
    numels, rules, flats = draw(partitioned())
    ranks, rows, itemsize = len(flats), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    files = range(draw(st.integers(0, 3)), 99, draw(st.integers(1, 3)))[:ranks]
    same = draw(st.booleans())
    offsets = [64 * draw(st.integers(0, 9)) if rank == 0 or not same else 0 for rank in range(ranks)]
    offsets = [offsets[0]] * ranks if same else offsets
    scales = [1000 + 7 * (0 if same else rank) for rank in range(ranks)]
    blocks = BlockFormat(draw(st.integers(1, 5)), "absmax1", CODEBOOK) if draw(st.booleans()) else None
    moved = draw(st.integers(0, 2))
    flat = FlatTensors(
        files, by_rank(offsets), len(flats[0]), "float32", itemsize, rows, blocks, by_rank(scales if blocks else [0])
    )
    found = []
    for number, (numel, rule) in enumerate(zip(numels, rules, strict=True)):
        if numel:
            right = chunk_list(
                flats, number, numel, [file + moved for file in files], offsets, itemsize, rows, blocks, scales
            )
            chunks = PartitionedChunks(rule, flat)
            found.append((rows * numel, chunks.moved(moved) if moved else chunks, right))
    return found


def overlapping(chunks: Sequence[StorageChunk], start: int, stop: int) -> list[StorageChunk]:
    return [chunk for chunk in chunks if chunk.range.intersect(FlatRange(start, stop)) is not None]


@given(cases())
def test_a_rule_computes_the_chunks_of_the_flat_tensors(
    found: list[tuple[int, ChunkSource, list[StorageChunk]]],
) -> None:
    for numel, chunks, right in found:
        assert list(chunks) == right
        assert chunks and chunks.tile(numel) and not chunks.tile(numel + 1)
        assert chunks.blocks == (None if right[0].code is None else right[0].code.format)
        assert ListedChunks(tuple(right)).tile(numel)


@given(cases(), st.data())
def test_chunks_of_a_range_and_of_files(
    found: list[tuple[int, ChunkSource, list[StorageChunk]]], data: st.DataObject
) -> None:
    for numel, chunks, right in found:
        start = data.draw(st.integers(0, numel - 1))
        stop = data.draw(st.integers(start + 1, numel))
        files = data.draw(st.sets(st.integers(0, 12)))
        for source in (chunks, ListedChunks(tuple(right))):
            assert list(source.within(start, stop)) == overlapping(right, start, stop)
            assert list(source.in_files(files)) == [chunk for chunk in right if chunk.file in files]
            assert list(source.moved(3).in_files({file + 3 for file in files})) == list(
                ListedChunks(tuple(right)).moved(3).in_files({file + 3 for file in files})
            )


def test_memory_does_not_grow_with_ranks_where_files_are_laid_out_alike() -> None:
    assert len(by_rank([64] * 1000)) == 1
    assert len(by_rank([64] * 999 + [128])) == 1000


@pytest.mark.parametrize(
    ("ends", "numel", "tile"),
    [([], 0, True), ([], 1, False), ([(0, 4)], 4, True), ([(0, 4), (3, 6)], 6, False), ([(0, 4), (5, 6)], 6, False)],
)
def test_listed_chunks_tile_without_holes_and_overlaps(ends: list[tuple[int, int]], numel: int, tile: bool) -> None:
    source = ListedChunks(tuple(StorageChunk(FlatRange(*each), 0, 0) for each in ends))
    assert source.tile(numel) is tile
    assert bool(source) is bool(ends)


def test_a_tensor_has_the_chunks_of_all_its_shards() -> None:
    blocks = BlockFormat(4, "absmax1", CODEBOOK)
    plain = StorageChunk(FlatRange(0, 2), 0, 8)
    coded = StorageChunk(FlatRange(0, 3), 1, 8, BlockCode(blocks, 0, 0))
    tensor = TensorMetadata(
        "a", "m", (2,), "uint8", (*chunks_of(), *chunks_of(plain), *chunks_of(coded)), shards=((0,), (2,), (3,))
    )
    assert tensor.chunks == (plain, coded)
    assert tensor.blocks == blocks and tensor.is_quantized and not tensor.is_empty
    empty = TensorMetadata("a", "m", (0,), "uint8", chunks_of())
    assert empty.is_empty and not empty.is_quantized


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """The shape of a tensor, and boxes that a mesh cut it into, each in a file of its own."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = []
    for number, ranges in enumerate(product(*map(pairwise, cuts))):
        offsets, sizes = tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)
        boxes.append(Box(offsets, sizes, number, 1000 * number))
    return shape, tuple(draw(st.permutations(boxes)))


def positions(shape: tuple[int, ...], box: Box) -> list[int]:
    """The flat positions of a box's elements, in its order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inside = product(*(range(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True)))
    return [sum(index * stride for index, stride in zip(place, strides, strict=True)) for place in inside]


@given(grids(), st.data())
def test_boxes_are_read_where_their_elements_are(
    grid: tuple[tuple[int, ...], tuple[Box, ...]], data: st.DataObject
) -> None:
    shape, boxes = grid
    numel = math.prod(shape)
    right = {at: (box.file, box.byte_offset + 4 * n) for box in boxes for n, at in enumerate(positions(shape, box))}
    for source in (BoxChunks(shape, 4, boxes), boxed(shape, 4, boxes)):
        assert source.tile(numel) and not source.tile(numel + 1) and source.blocks is None and source
        start = data.draw(st.integers(0, numel - 1))
        stop = data.draw(st.integers(start + 1, numel))
        for chunks, wanted in ((list(source), range(numel)), (source.within(start, stop), range(start, stop))):
            found = {
                at: (chunk.file, chunk.byte_offset + 4 * (at - chunk.range.start))
                for chunk in chunks
                for at in range(chunk.range.start, chunk.range.stop)
            }
            assert wanted.start in found and found.keys() >= set(wanted) and found.items() <= right.items()
            assert [chunk.range for chunk in chunks] == sorted(chunk.range for chunk in chunks)
        assert {chunk.file for chunk in source.moved(3)} == {box.file + 3 for box in boxes}
        assert [chunk.file for chunk in source.in_files({0})] == [0] * sum(chunk.file == 0 for chunk in source)


def test_boxes_with_a_hole_or_an_overlap_do_not_tile() -> None:
    first, second = Box((0, 0), (2, 2), 0, 0), Box((0, 2), (2, 2), 1, 0)
    assert BoxChunks((2, 4), 4, (first, second)).tile(8)
    assert not BoxChunks((2, 4), 4, (first, first)).tile(8)
    assert not BoxChunks((2, 4), 4, (first,)).tile(8)
    assert isinstance(boxed((4, 2), 4, (first, Box((2, 0), (2, 2), 1, 0))), ListedChunks)


@st.composite
def quantized(draw: st.DrawFn) -> tuple[QuantizedChunks, list[int], dict[int, tuple[int, int]]]:
    """A quantized tensor cut into runs of rows; the scales in its file, and of each element which one, and its origin."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    cuts = sorted({0, width, *draw(st.lists(st.integers(0, width), max_size=2))})
    block, begin, runs = draw(st.sampled_from([2, 4])), 1000, list[QuantizedRun]()
    scale_of: dict[int, tuple[int, int]] = {}
    scales = list[int]()
    for origin, (left, right) in enumerate(pairwise(cuts)):
        run = QuantizedRun(left, right - left, rows, width, origin, draw(st.integers(0, 9)))
        for row, column in product(range(rows), range(run.numel)):
            number = (run.position + row * run.numel + column) // block
            at = len(scales) + number - run.position // block
            scale_of[left + row * width + column] = begin + 4 * at, origin
        scales += run.blocks(block)
        runs.append(run)
    blocks = BlockFormat(block, "absmax1", CODEBOOK)
    shuffled = QuantizedChunks(tuple(runs), blocks, 3, 500, 7, begin)
    return shuffled, scales, scale_of


def test_scales_are_in_the_chunks_own_file_or_in_the_one_that_is_named() -> None:
    code = BlockCode(BlockFormat(4, "absmax1", CODEBOOK), 6, 1000)
    assert code.scales_of(7, 3) == (3, 1004, 12)
    assert code.scales_of(2, 3) == (3, 1004, 4)
    assert replace(code, scales_file=0).scales_of(2, 3) == (0, 1004, 4)


@given(quantized(), st.data())
def test_each_code_has_its_own_blocks_scale(
    case: tuple[QuantizedChunks, list[int], dict[int, tuple[int, int]]], data: st.DataObject
) -> None:
    chunks, scales, scale_of = case
    numel = len(scale_of)
    assert chunks.tile(numel) and not chunks.tile(numel + 1) and chunks and chunks.blocks == chunks.format
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    assert chunks.within(start, stop) == overlapping(list(chunks), start, stop)
    assert list(chunks.in_files({7})) == [] and list(chunks.in_files({3})) == list(chunks)
    found = {}
    for chunk in chunks.moved(2):
        assert (chunk.file, chunk.code and chunk.code.scales_file) == (5, 9) and chunk.code is not None
        assert chunk.byte_offset == 500 + chunk.range.start
        for at in range(chunk.range.start, chunk.range.stop):
            number = (chunk.code.position + at - chunk.range.start) // chunk.code.format.numel
            found[at] = chunk.code.scales_offset + 4 * number, chunk.code.origin
    assert found == scale_of
    assert {offset for offset, _ in found.values()} <= {1000 + 4 * at for at in range(len(scales))}

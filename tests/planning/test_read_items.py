"""Where elements of a live shard lie in the files, against torch's own cutting and the bytes that were written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import BlockCode, ListedChunks, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata, SourceFacts, TensorMetadata
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.strided import ShardSources, copied, fused, replicated, reshard
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.planning.read_items import check_tiling, read_items, rows_in_order

FORMAT = BlockFormat(4, "absmax1", Codebook((0.0, 1.0)))


@dataclass(frozen=True)
class Saved:
    """A tensor in files, each element under its number; of each file, where in a quantized tensor its bytes lie."""

    tensor: TensorMetadata
    files: list[torch.Tensor]


def save(shards: Sequence[torch.Tensor], ends: Sequence[Sequence[int]], dtype: str, is_coded: bool) -> Saved:
    """Every shard in chunks that end where is said, each in a file of its own, behind a header."""
    sources, itemsize = [], ITEMSIZE[dtype]
    files: list[torch.Tensor] = []
    for shard, values in enumerate(shards):
        chunks = []
        bounds = [0, *sorted({end for end in ends[shard] if 0 < end < values.numel()}), values.numel()]
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            code = BlockCode(FORMAT, 100 * len(files), 7) if is_coded else None
            chunks.append(StorageChunk(FlatRange(start, stop), len(files), 3 * itemsize, code))
            files.append(torch.cat([torch.full((3,), -9), values.flatten()[start:stop]]))
        sources.append(ListedChunks(tuple(chunks)))
    shapes = tuple(tuple(shard.shape) for shard in shards)
    return Saved(TensorMetadata("p", "state", shapes[0], dtype, tuple(sources), shards=shapes), files)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Saved, ShardSources, int, FlatRange, torch.Tensor, int]:
    rows, dims = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3))
    dim, parts = draw(st.integers(0, dims - 1)), draw(st.integers(1, 2))
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    shape[dim] = 6 * parts
    whole = torch.arange(rows * math.prod(shape)).view(rows, *shape)

    def cut(degree: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        pieces = [part.chunk(degree, dim + 1) for part in whole.chunk(parts, dim + 1)]
        widths = [[piece.shape[dim + 1] for piece in part] for part in pieces]
        return [torch.cat([part[rank] for part in pieces], dim + 1) for rank in range(degree)], widths

    source, target = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    (saved, source_widths), (live, target_widths) = cut(source), cut(target)
    if rows == 1:
        saved = [shard.squeeze(0) for shard in saved]
    rank = draw(st.integers(0, target - 1))
    transfer = reshard(fused(tuple(shape), dim, source_widths), fused(tuple(shape), dim, target_widths), rank)
    ends = [draw(st.lists(st.integers(0, saved[0].numel()), max_size=3)) for _ in saved]
    numel = live[rank].numel() // rows
    start = draw(st.integers(0, numel))
    wanted = FlatRange(start, draw(st.integers(start, numel)))
    dtype, is_coded = draw(st.sampled_from([("float32", False), ("bfloat16", False), ("uint8", True)]))
    return (
        whole,
        save(saved, ends, dtype, is_coded),
        transfer,
        rows,
        wanted,
        live[rank].reshape(rows, -1),
        draw(st.integers(-3, 5)),
    )


@settings(deadline=None, max_examples=150)
@given(cases())
def test_the_items_of_a_range_read_its_elements_once(
    case: tuple[torch.Tensor, Saved, ShardSources, int, FlatRange, torch.Tensor, int],
) -> None:
    _, saved, sources, rows, wanted, live, offset = case
    itemsize = ITEMSIZE[saved.tensor.dtype]
    for row in range(rows):
        inside = torch.full((live.shape[1],), -1)
        inside[wanted.start : wanted.stop] = live[row, wanted.start : wanted.stop]
        items = list(read_items(saved.tensor, sources, wanted, 3, offset, row, rows))
        for found in (items, rows_in_order(items)):
            got = torch.full_like(inside, -1)
            for item in found:
                assert (item.target, item.dtype) == (3, saved.tensor.dtype)
                first, rest = divmod(item.byte_offset, itemsize)
                assert rest == 0
                for step in range(item.rows):
                    start = item.target_offset - offset + step * item.target_stride
                    here = first + step * item.file_stride
                    assert (got[start : start + item.numel] == -1).all(), "written twice"
                    got[start : start + item.numel] = saved.files[item.file][here : here + item.numel]
                if saved.tensor.dtype != "uint8":
                    assert item.code is None
                else:  # the place of its first element among the blocks of its file
                    assert item.code == BlockCode(FORMAT, 100 * item.file + first - 3, 7)
            assert torch.equal(got, inside)
        starts = [item.target_offset for item in rows_in_order(items)]
        assert starts == sorted(starts)
        assert {item.rows for item in rows_in_order(items)} <= {1}


def test_strided_columns_of_one_chunk_are_one_item() -> None:
    whole = torch.arange(6 * 8).view(6, 8)
    saved = save([whole], [[]], "float32", False)
    sources = reshard(fused((6, 8), 1, [[8]]), fused((6, 8), 1, [[4, 4]]), 1)
    (item,) = read_items(saved.tensor, sources, FlatRange(0, 24), to_target=2)
    assert (item.rows, item.numel, item.file_stride, item.byte_offset) == (6, 4, 8, (3 + 4) * 4)
    assert [row.target_offset for row in rows_in_order([item])] == [2, 6, 10, 14, 18, 22]


def test_each_source_of_what_is_added_up_is_found() -> None:
    saved = save([torch.arange(4), torch.arange(4) + 10], [[2], []], "float32", False)
    both = ShardSources(copied(0, 4).copies + copied(1, 4).copies, 0.5)
    assert [item.numel for item in read_items(saved.tensor, both, FlatRange(1, 4))] == [1, 2, 3]
    first = reshard(replicated((4,), 2), replicated((4,), 2), 1)
    assert [item.file for item in read_items(saved.tensor, first, FlatRange(0, 4))] == [0, 1]


# --- tiling -----------------------------------------------------------------------------------------------------

CATALOG = CheckpointMetadata(SourceFacts("native", "/ckpt/tag", "tag", 1, 1, "0"), (), {}, {}, ({},))


def tiled(*pieces: tuple[int, int, int], shards: tuple[tuple[int, ...], ...] = ((2, 3), (4,))) -> TensorMetadata:
    of_shards = [[piece[1:] for piece in pieces if piece[0] == shard] for shard in range(len(shards) or 1)]
    sources = tuple(ListedChunks(tuple(StorageChunk(FlatRange(*each), 0, 0) for each in mine)) for mine in of_shards)
    return TensorMetadata("a.weight", "exp_avg", (2, 3), "float32", sources, shards=shards)


def test_shards_that_are_tiled_are_whole() -> None:
    check_tiling(CATALOG, tiled((0, 0, 4), (0, 4, 6), (1, 0, 4)))
    check_tiling(CATALOG, tiled((0, 0, 6), shards=((2, 3), (0,))))
    check_tiling(CATALOG, tiled((0, 0, 6), shards=()))


@pytest.mark.parametrize(
    ("pieces", "problem", "found"),
    [
        ([(0, 0, 6), (1, 1, 4)], "incomplete", "elements 0 to 1 of tensor-parallel rank 1 in no file"),
        ([(0, 0, 6), (1, 0, 3)], "incomplete", "elements 3 to 4 of tensor-parallel rank 1 in no file"),
        ([(0, 0, 6)], "incomplete", "elements 0 to 4 of tensor-parallel rank 1 in no file"),
        ([(0, 0, 2), (0, 3, 6), (1, 0, 4)], "incomplete", "elements 2 to 3 of tensor-parallel rank 0 in no file"),
        ([(0, 0, 6), (1, 0, 3), (1, 2, 4)], "stored twice", "elements 2 to 3 of tensor-parallel rank 1 in two files"),
        ([(0, 0, 6), (1, 0, 5)], "stored twice", "elements 4 to 5 of tensor-parallel rank 1 in two files"),
        ([(0, 0, 6), (0, 0, 4)], "stored twice", "elements 0 to 6 of tensor-parallel rank 0 in two files"),
    ],
)
def test_each_shard_has_to_be_tiled(pieces: list[tuple[int, int, int]], problem: str, found: str) -> None:
    with pytest.raises(DamagedError, match=problem) as caught:
        check_tiling(CATALOG, tiled(*pieces))
    assert caught.value.found == found
    assert caught.value.parameter == "a.weight"
    assert "exp_avg" in caught.value.problem


def test_of_one_shard_no_rank_is_named() -> None:
    with pytest.raises(DamagedError) as caught:
        check_tiling(CATALOG, tiled((0, 0, 5), shards=()))
    assert caught.value.found == "elements 5 to 6 in no file"

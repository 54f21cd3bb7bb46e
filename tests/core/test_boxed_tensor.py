"""Boxes follow torch's own functions: what they say of the files is what torch makes of the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.boxed_tensor import BoxedTensor
from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import FROZEN, TensorMetadata
from elastic_ckpt.planning.read_items import check_tiling

Pair = tuple[torch.Tensor, BoxedTensor]


def saved(file: int, *shape: int, dtype: str = "float32") -> Pair:
    """A tensor whose values tell file and position, and where it is."""
    numel = torch.Size(shape).numel()
    chunks = chunks_of(StorageChunk(FlatRange(0, numel), file, 64)) if numel else chunks_of()
    values = file * 1000 + torch.arange(numel).view(shape)
    return values, BoxedTensor.of(TensorMetadata("name", FROZEN, shape, dtype, chunks))


def read(tensor: BoxedTensor) -> torch.Tensor:
    """The values of the elements in the chunks."""
    metadata = tensor.metadata("name", FROZEN)
    check_tiling(None, metadata)  # type: ignore[arg-type]
    values = torch.full((torch.Size(tensor.shape).numel(),), -1)
    for chunk in metadata.chunks:
        first = chunk.file * 1000 + (chunk.byte_offset - 64) // 4
        values[chunk.range.start : chunk.range.stop] = torch.arange(first, first + chunk.range.numel)
    return values.view(tensor.shape)


@given(st.data())
def test_rearranged_boxes_are_where_torch_puts_the_elements(data: st.DataObject) -> None:
    draw, sizes = data.draw, st.integers(1, 4)
    shape = draw(st.tuples(sizes, sizes, sizes))
    tensors = [saved(file, *shape) for file in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 4))):
        ndim = tensors[0][0].ndim
        dim = draw(st.integers(-ndim, ndim - 1))
        how = draw(st.sampled_from(["cat", "stack", "chunk", "split", "squeeze"]))
        if how in ("cat", "stack"):
            tensors = [tuple(getattr(torch, how)([each[side] for each in tensors], dim=dim) for side in (0, 1))]
        elif how == "squeeze":
            tensors = [tuple(each.squeeze(dim).contiguous() for each in pair) for pair in tensors]
        else:
            count = draw(sizes)
            made = [tuple(getattr(torch, how)(each, count, dim=dim) for each in pair) for pair in tensors]
            tensors = [both for pair in made for both in zip(*pair, strict=True)]
        if tensors[0][0].ndim == 0 or len({each.shape for each, _ in tensors}) > 1:
            break
    for values, boxes in tensors:
        assert (tuple(values.shape), values.ndim) == (boxes.shape, boxes.ndim)
        assert torch.equal(read(boxes), values)


def test_parts_of_given_sizes_and_one_box_in_another_shape() -> None:
    values, boxes = saved(1, 2, 6, 3)
    for part, expected in zip(torch.split(boxes, [1, 2, 3], dim=1), torch.split(values, [1, 2, 3], dim=1), strict=True):
        assert torch.equal(read(part), expected)
    assert torch.equal(read(boxes.reshape(12, -1)), values.reshape(12, -1))


@pytest.mark.parametrize(
    "change",
    [
        lambda boxes: torch.transpose(boxes, 0, 1),
        lambda boxes: boxes.float(),
        lambda boxes: boxes.reshape(5, 5),
        lambda boxes: torch.split(boxes, [1, 1, 1], dim=1),
        lambda boxes: torch.cat([boxes, saved(2, 2, 5, 3)[1]], dim=0),
        lambda boxes: torch.cat([boxes, saved(2, 2, 6, 3, dtype="bfloat16")[1]], dim=0),
        lambda boxes: torch.cat([boxes, boxes], dim=1).reshape(-1),
    ],
)
def test_what_is_no_rearrangement_of_boxes_is_an_error(change: Any) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)):
        change(saved(1, 2, 6, 3)[1])


def test_a_tensor_is_cut_into_so_many_rows_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ckpt.core.boxed_tensor._MOST_BOXES", 4)
    _, tensor = saved(0, 5, 6)
    assert len(torch.chunk(tensor, 2)[0].boxes) == 1
    with pytest.raises(ValueError, match="more than 4 rows"):
        torch.chunk(tensor, 2, 1)

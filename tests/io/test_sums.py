"""Recodes that add up: shares of a value, and the mean of copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.read_plan import ReadItem, RequantizeItem
from elastic_ckpt.io.coalesce import parts_of
from elastic_ckpt.io.staging import ReadStats, requantize

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def fill(
    recode: RequantizeItem, files: Sequence[torch.Tensor], target: torch.Tensor, staging_nbytes: int = 1 << 20
) -> ReadStats:
    """Do all chunks of a recode on files in memory."""
    raw = [file.view(torch.uint8).numpy().tobytes() for file in files]
    stats = ReadStats()
    for chunk in parts_of(recode, staging_nbytes):
        stats += requantize(chunk, [target], lambda file, start, nbytes: bytearray(raw[file][start : start + nbytes]))
    return stats


def summed(files: Sequence[torch.Tensor], scale: float, start: int = 0) -> RequantizeItem:
    numel, dtype = files[0].numel(), str(files[0].dtype).removeprefix("torch.")
    pieces = tuple(ReadItem(number, 0, 0, start, numel, dtype) for number in range(len(files)))
    return RequantizeItem(0, start, numel, None, -1, 0, pieces, scale)


@pytest.mark.parametrize(
    ("dtype", "shares"),
    [("float64", 2), *((dtype, shares) for dtype in ("float32", "bfloat16") for shares in (2, 4, 8))],
)
def test_equal_shares_give_back_exactly_what_they_are_shares_of(dtype: str, shares: int) -> None:
    value = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DTYPES[dtype])
    target = torch.zeros(50, dtype=DTYPES[dtype])
    fill(summed([value / shares] * shares, 1.0), [value / shares] * shares, target)
    assert torch.equal(target, value)
    for copies in (2, 3, 4, 7) if dtype != "float64" else (2, 4):
        fill(summed([value] * copies, 1 / copies), [value] * copies, target.zero_())
        assert torch.equal(target, value)


def test_the_sum_is_rounded_once() -> None:
    files = [torch.tensor([2.0**24]), torch.tensor([1.0]), torch.tensor([1.0])]
    target = torch.zeros(1)
    fill(summed(files, 1.0), files, target)
    assert target.item() == 2.0**24 + 2
    files = [torch.tensor([256.0], dtype=torch.bfloat16), torch.ones(1).bfloat16(), torch.ones(1).bfloat16()]
    fill(summed(files, 1.0), files, target)
    assert target.item() == 258.0
    narrow = torch.zeros(1, dtype=torch.bfloat16)
    fill(summed(files, 1.0), files, narrow)
    assert narrow.item() == 258.0
    wide = torch.zeros(1, dtype=torch.float64)
    files = [torch.tensor([0.1]), torch.tensor([2e8])]
    fill(summed(files, 0.5), files, wide)
    assert wide.item() == (files[0].double() + files[1].double()).item() / 2


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_pieces_of_any_extent_are_added_up_whatever_the_chunks(data: st.DataObject) -> None:
    numel, start = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 5))
    expected, pieces = torch.zeros(numel), []
    files: list[torch.Tensor] = []
    for copy in range(data.draw(st.integers(1, 4))):
        values, place = torch.arange(1.0, numel + 1) * 10**copy, 0
        expected += values
        while place < numel:  # each copy in files of its own, cut anywhere
            width = data.draw(st.integers(1, numel - place))
            pieces.append(ReadItem(len(files), 4, 0, start + place, width, "float32"))
            files.append(torch.cat([torch.tensor([-5.0]), values[place : place + width]]))
            place += width
    pieces.sort(key=lambda item: item.target_offset)
    target = torch.full((numel + start + 3,), -7.0)
    recode = RequantizeItem(0, start, numel, None, -1, 0, tuple(pieces), 0.5)
    stats = fill(recode, files, target, data.draw(st.integers(1, 2000)))
    assert torch.equal(target[start : start + numel], expected / 2)
    assert (target[:start] == -7).all()
    assert (target[start + numel :] == -7).all()
    assert stats.nbytes == 4 * sum(piece.numel for piece in pieces)


def test_without_a_scale_pieces_are_written_and_not_added_up() -> None:
    files = [torch.tensor([1.0, 2.0])]
    recode = RequantizeItem(0, 1, 2, None, -1, 0, (ReadItem(0, 0, 0, 1, 2, "float32"),))
    target = torch.full((4,), -7.0)
    fill(recode, files, target)
    assert target.tolist() == [-7, 1, 2, -7]

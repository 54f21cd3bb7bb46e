"""Pages of other nodes' files: what is asked for, how often, and what is refused."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.lacking import Lacking, Wanted
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.storage import pages as pages_module
from elastic_ckpt.storage.pages import Pages

CONTENT = Random(5).randbytes(3_000_001)


def read(pages: Pages, sizes: list[int], byte_offset: int, asked: list[Wanted]) -> bytes:
    """What a read fills, which is given what it lacks; adds that to ``asked``."""
    memory = bytearray(sum(sizes))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    buffers = [memoryview(memory)[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
    while True:
        try:
            count = pages.read(1, 2, len(CONTENT), buffers, byte_offset)
            return bytes(memory[:count])
        except Lacking as lacking:
            wanted = lacking.wanted
            asked.append(wanted)
            pages.add(wanted, CONTENT[wanted.byte_offset : wanted.byte_offset + wanted.nbytes])


@given(st.lists(st.integers(0, 200_000), max_size=5), st.integers(0, 3_100_000))
def test_buffers_are_filled_like_those_of_preadv(sizes: list[int], byte_offset: int) -> None:
    assert read(Pages(), sizes, byte_offset, []) == CONTENT[byte_offset : byte_offset + sum(sizes)]


def test_a_file_that_is_read_from_its_beginning_takes_few_exchanges() -> None:
    asked: list[Wanted] = []
    pages = Pages()
    for start in range(0, len(CONTENT), 8192):
        read(pages, [8192], start, asked)
    assert len(asked) <= 8 and sum(wanted.nbytes for wanted in asked) == len(CONTENT)


def test_a_small_part_of_a_large_file_takes_little() -> None:
    asked: list[Wanted] = []
    read(Pages(), [100], 1_000_000, asked)
    assert len(asked) == 1 and asked[0].nbytes <= 1 << 16


def test_what_its_holder_could_not_read_is_its_error() -> None:
    pages = Pages()
    with pytest.raises(Lacking) as lacking:
        pages.read(0, 0, 10, [memoryview(bytearray(3))], 0)
    pages.add(lacking.value.wanted, DamagedError("gone", "file"))
    with pytest.raises(DamagedError, match="gone"):
        pages.read(0, 0, 10, [memoryview(bytearray(3))], 0)


def test_no_work_keeps_more_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_MOST_NBYTES", 1 << 10)
    with pytest.raises(UnsupportedError, match="files of other nodes"):
        read(Pages(), [len(CONTENT)], 0, [])

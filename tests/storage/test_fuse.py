"""Network file systems, played by one of user space: slow, failing, late, and with attributes that lie."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_ckpt.core.read_plan import ReadItem
from elastic_ckpt.errors import DamagedError, SavedOverError
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.storage import medium_of
from elastic_ckpt.storage.local import open_ranges, open_stream, pinned
from tests.reading import run, untouched, write
from tests.storage.fuse import FuseFolder, seen_through_fuse

VALUES = torch.arange(300_000.0)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseFolder]:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "a", VALUES)
    with seen_through_fuse(tmp_path / "source", tmp_path / "seen") as folder:
        yield folder


def read(fuse: FuseFolder) -> torch.Tensor:
    """All values, by two threads."""
    target = untouched(len(VALUES))
    half = len(VALUES) // 2
    items = [ReadItem(0, 4 * start, 0, start, half, "float32") for start in (0, half)]
    with pinned():
        run([fuse.at / "a"], [target], items, ReadOptions(threads=2, chunk_nbytes=1 << 16))
    return target


def test_it_counts_as_a_network(fuse: FuseFolder) -> None:
    assert str(medium_of(str(fuse.at / "a"), "auto")) == "network (fuse.tests)"


def test_short_reads_are_gone_on_with(fuse: FuseFolder) -> None:
    fuse.shortest = 10_007
    assert torch.equal(read(fuse), VALUES)
    assert sum(event.nbytes for event in fuse.events) == VALUES.nbytes
    assert max(event.nbytes for event in fuse.events) == fuse.shortest


def test_a_stale_handle_is_opened_anew(fuse: FuseFolder) -> None:
    fuse.errors["read a"] = [errno.ESTALE]
    assert torch.equal(read(fuse), VALUES) and fuse.errors["read a"] == []


def test_a_stale_handle_of_a_file_that_was_replaced_is_an_error(fuse: FuseFolder) -> None:
    buffer = memoryview(bytearray(8))
    with pinned():
        ranges = open_ranges(str(fuse.at / "a"))
        assert ranges.read([buffer], 0) == 8
        write(fuse.source / "b", VALUES + 1).replace(fuse.source / "a")
        fuse.errors["read a"] = [errno.ESTALE]
        with pytest.raises(SavedOverError) as caught:
            ranges.read([buffer], 0)
        ranges.close()
    assert caught.value.file == str(fuse.at / "a")


@pytest.mark.parametrize(
    ("fault", "numbers", "words"),
    [
        ("read a", [errno.EIO], "Input/output error at byte"),
        ("read a", [errno.ESTALE] * 99, "Stale file handle at byte"),
        ("open a", [errno.EIO] * 99, "Input/output error"),
    ],
)
def test_a_failure_names_the_file_and_what_to_look_at(
    fuse: FuseFolder, fault: str, numbers: list[int], words: str
) -> None:
    fuse.errors[fault] = numbers
    with pytest.raises(DamagedError) as caught:
        read(fuse)
    assert caught.value.file == str(fuse.at / "a") and words in str(caught.value.found) and caught.value.remedy


def test_a_file_that_is_not_shown_yet_is_missing_by_name(fuse: FuseFolder) -> None:
    fuse.hidden["a"] = 1
    with pytest.raises(DamagedError, match="missing") as caught:
        open_stream(str(fuse.at / "a"))
    assert caught.value.file == str(fuse.at / "a")
    assert torch.equal(read(fuse), VALUES)


@pytest.mark.parametrize("lie", [-8, 8])
def test_a_size_that_changes_its_mind_is_an_error(fuse: FuseFolder, lie: int) -> None:
    fuse.sizes["a"] = VALUES.nbytes + lie
    with pinned():
        open_stream(str(fuse.at / "a")).close()
        fuse.sizes.clear()
        with pytest.raises(SavedOverError):
            open_stream(str(fuse.at / "a"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_streams_go_on_with_a_new_handle_and_name_what_fails(fuse: FuseFolder, number: int) -> None:
    with pinned(), open_stream(str(fuse.at / "a")) as stream:
        stream.seek(400_000)
        fuse.errors["read a"] = [errno.ESTALE]
        assert stream.read(100_000) == VALUES.numpy().tobytes()[400_000:500_000]
        fuse.errors["read a"] = [number] * 2
        with pytest.raises(DamagedError) as caught:
            stream.read(100_000)
        assert caught.value.file == str(fuse.at / "a")

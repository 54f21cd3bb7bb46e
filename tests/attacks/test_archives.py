"""Hostile and damaged archives, and what is no file at all: refused, or read within the file."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy  # noqa: F401  not to be imported while the canary watches
import pytest
import torch

from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive.directory import Listing
from tests.attacks.archives import CONTENTS, FIRST, LEGACY, RECORDS, SECOND, TWO, files
from tests.attacks.assembly import legacy, packed, records_of, storage, tensor, tuple_of
from tests.attacks.guard import guarded, read


@pytest.mark.parametrize("what", CONTENTS)
def test_archives_that_lie_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(CONTENTS[what])
    file, error = read(str(path))
    assert file is None and type(error) is DamagedError
    assert error.file == str(path)


@pytest.mark.parametrize("what", LEGACY)
def test_legacy_archives_that_lie_are_refused(tmp_path: Path, what: str) -> None:
    file, error = read(legacy(tmp_path, *LEGACY[what]))
    assert file is None and type(error) is DamagedError


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    for what, path in files(tmp_path).items():
        file, error = read(path)
        assert file is None and type(error) is DamagedError, what


def test_both_assemblies_are_read_where_they_are_sound(tmp_path: Path) -> None:
    """The control of the tests above."""
    path = tmp_path / "file.pt"
    path.write_bytes(packed(RECORDS))
    keys = b"\x80\x02](X\x01\x00\x00\x000X\x01\x00\x00\x001e."
    old = legacy(tmp_path, TWO, keys, b"".join(struct.pack("<Q", 4) + raw for raw in (FIRST, SECOND)))
    for each in (str(path), old):
        file, error = read(each)
        assert error is None and file is not None
        assert [tensor.tolist() for tensor in materialise(file, file.tree)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert torch.load(path)[1].tolist() == [5, 6, 7, 8]


def test_what_is_behind_the_directory_does_not_matter(tmp_path: Path) -> None:
    """DeepSpeed's fast writer leaves a part of a block there; torch reads such files."""
    raw, path = packed(RECORDS), tmp_path / "file.pt"
    path.write_bytes(raw + bytes(1000) + raw[raw.rindex(b"PK\x05\x06") :])
    file, error = read(str(path))
    assert error is None and file is not None
    assert [tensor.tolist() for tensor in materialise(file, file.tree)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [tensor.tolist() for tensor in torch.load(path)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("offset", [-100, 1 << 70])
def test_an_empty_tensor_is_inside_of_its_file_wherever_it_says_it_is(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "file.pt"
    pickled = b"\x80\x02" + tensor(storage("0", 4), offset, [0, 3], [3, 1]) + b"."
    path.write_bytes(packed(records_of(pickled, FIRST)))
    file, error = read(str(path))
    assert error is None and file is not None and materialise(file, file.tree).shape == (0, 3)


def test_an_empty_tensor_too_large_for_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    size = tensor(storage("0", 4), 0, [0, 1 << 61, 1 << 61], [1, 1, 1])
    path.write_bytes(packed(records_of(b"\x80\x02" + tuple_of(size) + b".", FIRST)))
    _, error = read(str(path))
    assert type(error) is DamagedError and "a shape that no tensor has" in str(error)


@pytest.mark.parametrize("kept", [0, 1, 3, 100, 500])
def test_a_file_that_shrinks_while_it_is_read_is_damage(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.pt"
    find_end = Listing.__init__

    def shrinking(listing: Listing, stream: BinaryIO) -> None:
        find_end(listing, stream)
        os.truncate(path, kept)
        stream.seek(0, os.SEEK_END)  # forgets what was read ahead
        stream.read()

    monkeypatch.setattr(Listing, "__init__", shrinking)
    path.write_bytes(packed(RECORDS))
    with guarded(1 << 22), pytest.raises(DamagedError):
        open_pickled(str(path))


@pytest.mark.parametrize("change", ["shrinks", "vanishes"])
def test_a_file_that_changes_before_its_values_are_read_is_damage(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(packed(RECORDS))
    file = open_pickled(str(path))
    os.truncate(path, 200) if change == "shrinks" else path.unlink()
    with guarded(1 << 22), pytest.raises(ElasticCkptError) as caught:
        materialise(file, file.tree)
    assert caught.value.file == str(path)


def test_a_huge_sparse_file_costs_nothing(tmp_path: Path) -> None:
    """64 GiB of zeros that take no room, whose end claims that all of them are a directory."""
    path, nbytes = tmp_path / "file.pt", 64 << 30
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 9, 9, nbytes, 0)
    end += struct.pack("<4sLQL", b"PK\x06\x07", 0, nbytes, 1) + struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, 0, 0, 0
    )
    with open(path, "wb") as stream:
        stream.seek(nbytes)
        stream.write(end)
    with guarded(1 << 22), pytest.raises(DamagedError):
        open_pickled(str(path))

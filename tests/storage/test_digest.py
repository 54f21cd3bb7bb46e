"""What tells copies of a file apart."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from elastic_ckpt.storage.digest import content_digest
from elastic_ckpt.storage.local import LocalRanges

MIB = 1 << 20


def digest_of(path: Path) -> bytes:
    return content_digest(LocalRanges(str(path)), path.stat().st_size)


def save(path: Path, element: float) -> bytes:
    tensor = torch.zeros(600_000)
    tensor[400_000] = element
    torch.save({"tensor": tensor}, path)
    return digest_of(path)


def test_archives_with_one_other_element_differ(tmp_path: Path) -> None:
    digest = save(tmp_path / "file.pt", 1.0)
    (tmp_path / "copy").mkdir()
    shutil.copyfile(tmp_path / "file.pt", tmp_path / "copy" / "another name.pt")
    assert len(digest) == 16 and digest_of(tmp_path / "copy" / "another name.pt") == digest
    assert save(tmp_path / "copy" / "file.pt", 1.0) == digest
    assert save(tmp_path / "copy" / "file.pt", 2.0) != digest


@pytest.mark.parametrize("is_wide", [False, True])
def test_directories_of_both_kinds_are_found(tmp_path: Path, is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records before the one that differs: its entry is in no end of the file."""
    if is_wide:
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
    digests = set()
    for content in (b"a", b"b", b"b"):
        with zipfile.ZipFile(tmp_path / "file", "w") as archive:
            for number in range(9000):
                archive.writestr(zipfile.ZipInfo(f"{number:050}"), content if number == 4000 else b"-")
        if is_wide:  # as of a larger archive: both are in the other end
            with open(tmp_path / "file", "r+b") as stream:
                stream.seek(-10, os.SEEK_END)
                stream.write(b"\xff" * 8)
        digests.add(digest_of(tmp_path / "file"))
    assert len(digests) == 2


@pytest.mark.parametrize("has_crc32s", [True, False])
def test_a_flipped_bit_makes_no_other_file_of_an_archive_with_checksums(tmp_path: Path, has_crc32s: bool) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_crc32s)
    try:
        torch.save({"tensor": torch.zeros(5_000)}, tmp_path / "file")
    finally:
        torch.serialization.set_crc32_options(before)
    digest, data = digest_of(tmp_path / "file"), bytearray((tmp_path / "file").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "file").write_bytes(data)
    assert (digest_of(tmp_path / "file") == digest) == has_crc32s


@pytest.mark.parametrize("nbytes", [0, 1, 1000, MIB, MIB + 1, 3 * MIB])
def test_other_files_differ_by_their_ends_and_size(tmp_path: Path, nbytes: int) -> None:
    def digest(content: bytes) -> bytes:
        (tmp_path / "file").write_bytes(content)
        return digest_of(tmp_path / "file")

    places = [0, nbytes // 2, nbytes - 1] if 0 < nbytes <= MIB else [0, 65_535, nbytes - 65_536, nbytes - 1]
    changed = []
    for place in {place for place in places if 0 <= place < nbytes}:
        content = bytearray(nbytes)
        content[place] = 1
        changed.append(digest(content))
    assert len({digest(bytes(nbytes)), digest(bytes(nbytes + 1)), *changed}) == len(changed) + 2


@pytest.mark.parametrize("start", [bytes(8), b"\xff" * 8])
@pytest.mark.parametrize("end", [b"PK\x05\x06" + b"\xff" * 18, b"PK\x05\x06", b"PK\x05\x06" + bytes(18)])
def test_sizes_that_a_directory_states_are_not_trusted(
    tmp_path: Path, start: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = b"PK\x06\x06" + b"\xff" * 44 + start + b"PK\x06\x07" + b"\xff" * 16
    with open(tmp_path / "file", "wb") as stream:
        stream.truncate(1 << 34)  # of which no disk has anything
        stream.seek(-len(wide + end), os.SEEK_END)
        stream.write(wide + end)
    asked: list[int] = []
    read = LocalRanges.read
    monkeypatch.setattr(LocalRanges, "read", lambda *of: asked.append(count := read(*of)) or count)
    assert len(digest_of(tmp_path / "file")) == 16
    assert sum(asked) <= 65 * MIB and max(asked) <= MIB

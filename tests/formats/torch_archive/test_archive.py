"""The tree of a file, against torch's own readers: ``tests/formats/test_pickled.py``. Here: trusted pickles, byte order."""

from __future__ import annotations

import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.formats.torch_archive.archive import read_archive_tree
from elastic_ckpt.formats.torch_archive.calls import Call
from elastic_ckpt.formats.torch_archive.directory import ArchiveError
from elastic_ckpt.formats.torch_archive.tensors import TensorRef


@pytest.mark.parametrize("zipped", [True, False])
def test_a_trusted_pickle_is_imported_but_its_tensors_stay_in_the_file(tmp_path: Path, zipped: bool) -> None:
    tree: dict[str, Any] = {"deque": deque([1, 2]), "weight": torch.arange(5.0), "dtype": torch.bfloat16}
    torch.save(tree, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    raw = (tmp_path / "file.pt").read_bytes()
    with open(tmp_path / "file.pt", "rb") as stream:
        read = read_archive_tree(stream, "file.pt", trust_pickle=True).tree
    assert read["deque"].steps == [("items", [1, 2])]
    assert type(read["weight"]) is TensorRef
    at = read["weight"].byte_offset
    assert torch.frombuffer(bytearray(raw[at : at + 20]), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4]


def test_big_endian_tensors_are_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    with open(tmp_path / "big.pt", "rb") as stream, pytest.raises(ArchiveError, match="byte order"):
        read_archive_tree(stream, "file.pt", trust_pickle=False)


def test_a_device_is_data(tmp_path: Path) -> None:
    torch.save(torch.device("cuda", 1), tmp_path / "file.pt")
    with open(tmp_path / "file.pt", "rb") as stream:
        device = read_archive_tree(stream, "file.pt", trust_pickle=False).tree
    assert type(device) is Call and device.args == ("cuda", 1)

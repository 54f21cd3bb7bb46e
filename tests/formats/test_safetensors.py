"""Folders of safetensors, written by the library and by the export: tensors, states, and bad input."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, NotFoundError
from elastic_ckpt.formats.base import Checkpoint, MetadataOptions
from elastic_ckpt.formats.safetensors import find_safetensors, read_safetensors
from elastic_ckpt.tools.comparison import compare
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from tests.attacks.guard import guarded
from tests.formats.test_dcp import save, state_dicts, values

save_file = pytest.importorskip("safetensors.torch").save_file
CONFIG = ElasticConfig()
TENSORS = {
    "a.weight": torch.randn(3, 4),
    "b": torch.arange(5),
    "low": torch.randn(2, 2).bfloat16(),
    "empty": torch.ones(0, 3),
}


def read(folder: Path) -> Checkpoint:
    found = find_safetensors(str(folder))
    assert found is not None and found.format == "safetensors"
    return read_safetensors(found, MetadataOptions())


def test_tensors_are_where_the_library_put_them(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt", "tied": "a.weight"})
    checkpoint = read(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(values(checkpoint, name, FROZEN), tensor)
    assert checkpoint.metadata.aliases == {"tied": "a.weight"}


@pytest.mark.parametrize("shard", ["5GB", "80B"])
def test_an_export_with_states_equals_what_it_was_made_from(tmp_path: Path, shard: str) -> None:
    model, optim = state_dicts()
    source = save(tmp_path / "source", {"model": model, "optim": optim})
    elastic_ckpt.export(source, tmp_path / "out", optimizer=True, max_shard_size=shard, progress=False)
    sides = [open_folder(str(folder), None, CONFIG) for folder in (source, tmp_path / "out")]
    assert compare(*sides, threads=1, progress=False).differences == ()
    found = inspect_folder(str(tmp_path / "out"), None, CONFIG)
    assert (found.format, found.run.step, found.missing) == ("safetensors", 1, ())
    outcome = verify(str(tmp_path / "out"), None, CONFIG, full=True)
    assert not outcome.findings and {note.kind for note in outcome.notes} <= {"no-checksum", "not-checked"}


def test_values_that_are_not_finite_are_found(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors")
    assert [finding.kind for finding in verify(str(tmp_path), None, CONFIG, full=True).findings] == ["nan"]


def test_a_folder_without_any_is_none(tmp_path: Path) -> None:
    assert find_safetensors(str(tmp_path)) is None and find_safetensors(str(tmp_path / "nowhere")) is None
    with pytest.raises(NotFoundError, match="safetensors"):
        open_folder(str(tmp_path), None, CONFIG)


def test_files_that_an_index_names_and_are_not_there_are_missed(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="missing"):
        read(tmp_path)
    index["weight_map"]["c"] = "../model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="not in this folder"):
        read(tmp_path)


def test_two_files_with_a_tensor_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "other.safetensors"):
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(MismatchError, match="one name"):
        read(tmp_path)


def write(path: Path, header: Any, data: bytes = b"", nbytes: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if nbytes is None else nbytes) + raw + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "a header longer than the file": lambda path: write(path, {}, nbytes=1 << 62),
    "no JSON": lambda path: write(path, b"{"),
    "a list": lambda path: write(path, []),
    "an unknown dtype": lambda path: write(path, {"a": {**ENTRY, "dtype": "X9"}}, bytes(8)),
    "a size that is none": lambda path: write(path, {"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "a negative offset": lambda path: write(path, {"a": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
    "an overlap": lambda path: write(path, {"a": ENTRY, "b": ENTRY}, bytes(8)),
    "a hole": lambda path: write(path, {"a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)),
    "bytes missing": lambda path: write(path, {"a": ENTRY}, bytes(7)),
    "bytes too many": lambda path: write(path, {"a": ENTRY}, bytes(9)),
    "a name twice": lambda path: write(path, b'{"a": 1, "a": 2}'),
    "depth": lambda path: write(path, b"[" * 100_000),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused(tmp_path: Path, what: str) -> None:
    BAD[what](tmp_path / "model.safetensors")
    with guarded(16 << 20), pytest.raises(ElasticCkptError, match="truncated or unreadable"):
        read(tmp_path)

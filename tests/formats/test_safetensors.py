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
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, NotFoundError, UnsupportedError
from elastic_ckpt.formats.base import Checkpoint, MetadataOptions
from elastic_ckpt.formats.safetensors import find_safetensors, read_safetensors
from elastic_ckpt.tools.comparison import compare
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from tests.attacks.guard import guarded
from tests.formats.dcp_folders import save, state_dicts, values

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


@pytest.mark.parametrize("shard", ["5GB", 80])
def test_an_export_with_states_equals_what_it_was_made_from(tmp_path: Path, shard: int | str) -> None:
    model, optim = state_dicts()
    source = save(tmp_path / "source", {"model": model, "optim": optim})
    elastic_ckpt.export(source, tmp_path / "out", optimizer=True, max_shard_size=shard, progress=False)
    sides = [open_folder(str(folder), None, CONFIG) for folder in (source, tmp_path / "out")]
    assert compare(*sides, threads=1, progress=False).differences == ()
    found = inspect_folder(str(tmp_path / "out"), None, CONFIG)
    assert (found["source"]["format"], found["run"]["global_steps"], found["ok"]) == ("safetensors", 1, True)
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
    for number in (1, 2):
        save_file(TENSORS, tmp_path / f"model-0000{number}-of-00002.safetensors")
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
    "JSON in UTF-16": lambda path: write(path, json.dumps({"a": ENTRY}).encode("utf-16"), bytes(8)),
    "JSON in UTF-32": lambda path: write(path, json.dumps({"a": ENTRY}).encode("utf-32-le"), bytes(8)),
    "a list": lambda path: write(path, []),
    "a size that is no integer": lambda path: write(path, {"a": {**ENTRY, "shape": [2.9]}}, bytes(8)),
    "negative sizes": lambda path: write(path, {"a": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
    "metadata that is a list": lambda path: write(path, {"__metadata__": [1], "a": ENTRY}, bytes(8)),
    "metadata of lists": lambda path: write(path, {"__metadata__": {"b": ["a"]}, "a": ENTRY}, bytes(8)),
    "a tensor that is a list": lambda path: write(path, {"a": [1]}, bytes(8)),
    "a size that is none": lambda path: write(path, {"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "sizes that no tensor has": lambda path: write(
        path, {"a": {**ENTRY, "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}
    ),
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


def test_a_dtype_that_is_not_supported_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": {**ENTRY, "dtype": "F8_E8M0"}}, bytes(2))
    with pytest.raises(UnsupportedError, match="F8_E8M0"):
        read(tmp_path)


FACTS = {
    "param_groups without params": {"param_groups": "[{}]"},
    "param_groups that are no list": {"param_groups": "1"},
    "params that are no names": {"param_groups": '[{"params": [1]}]'},
    "a name twice": {"param_groups": '[{"params": ["a"]}, {"params": ["a"]}]'},
    "no JSON": {"param_groups": "["},
    "a deep value": {"param_groups": '[{"params": ["a"], "lr": ' + "[" * 600 + "]" * 600 + "}]"},
    "a deep dictionary": {"param_groups": '[{"params": ["a"], "lr": ' + '{"a":' * 127 + "1" + "}" * 127 + "}]"},
    "depth": {"scalars": "[" * 100_000},
    "a list of steps": {"scalars": '{"a": {"step": [3.0]}}'},
    "scalars that are a list": {"scalars": "[1]"},
}


@pytest.mark.parametrize("what", FACTS)
def test_bad_facts_about_an_optimizer_are_refused(tmp_path: Path, what: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write(tmp_path / "optimizer.safetensors", {"__metadata__": FACTS[what]})
    with pytest.raises(DamagedError, match="truncated or unreadable") as error:
        read(tmp_path)
    assert error.value.file == str(tmp_path / "optimizer.safetensors")
    assert "torch" not in str(error.value.expected)


def write_index(folder: Path, weights: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_files_that_an_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    save_file({"old": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    metadata = read(tmp_path).metadata
    assert metadata.names(FROZEN) == ["a"] and any("model.safetensors" in note for note in metadata.notes)


def test_of_several_models_the_one_of_transformers_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    save_file({"model.a": torch.ones(2)}, tmp_path / "model.safetensors")
    metadata = read(tmp_path).metadata
    assert metadata.names(FROZEN) == ["model.a"] and any("consolidated" in note for note in metadata.notes)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(MismatchError, match="several models"):
        read(tmp_path)


def test_without_an_index_all_files_must_be_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(DamagedError, match="no index"):
        read(tmp_path)
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert read(tmp_path).metadata.names(FROZEN) == ["a", "b"]


@pytest.mark.parametrize("weights", [("a", "b", "c"), ("a",)])
def test_an_index_of_another_save_is_refused(tmp_path: Path, weights: tuple[str, ...]) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"tied": "a"})
    write_index(tmp_path, dict.fromkeys(weights, "model.safetensors"))
    with pytest.raises(DamagedError, match="other tensors") as error:
        read(tmp_path)
    assert error.value.parameter == ("c" if "c" in weights else "b")
    write_index(tmp_path, dict.fromkeys(("a", "b", "tied"), "model.safetensors"))
    assert read(tmp_path).metadata.aliases == {"tied": "a"}


def test_the_name_of_the_library_is_no_tied_name(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read(tmp_path).metadata.aliases == {}


def test_a_hyperparameter_may_be_as_deep_as_in_a_pickle(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    name = next(iter(TENSORS))
    groups = f'[{{"params": ["{name}"], "lr": {"[" * 126}1{"]" * 126}}}]'
    write(tmp_path / "optimizer.safetensors", {"__metadata__": {"param_groups": groups}})
    value = read(tmp_path).metadata.groups[0]["lr"]
    while isinstance(value, (list, tuple)):
        (value,) = value
    assert value == 1

"""Which files of a folder are its weights, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.errors import DamagedError, MismatchError, NotFoundError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.pretrained import read_weights, weights_metadata

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "empty": torch.ones(0, 3)}


def write_all(folder: Path) -> None:
    """Weights in each of the forms that ``from_pretrained`` knows, under a name that tells which."""
    for suffix, save in ((".safetensors", save_file), (".bin", torch.save)):
        stem = "model" if save is save_file else "pytorch_model"
        save({f"single{suffix}": torch.ones(1)}, folder / f"{stem}{suffix}")
        save({f"sharded{suffix}": torch.ones(1)}, folder / f"{stem}-00001-of-00001{suffix}")
        index = {"weight_map": {f"sharded{suffix}": f"{stem}-00001-of-00001{suffix}"}}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


def test_files_are_chosen_as_from_pretrained_does(tmp_path: Path) -> None:
    write_all(tmp_path)
    for name, file in (
        ("single.safetensors", "model.safetensors"),
        ("sharded.safetensors", "model.safetensors.index.json"),
        ("single.bin", "pytorch_model.bin"),
        ("sharded.bin", "pytorch_model.bin.index.json"),
    ):
        assert [*read_weights(str(tmp_path), None, False)[0].tensors] == [name]
        (tmp_path / file).unlink()
    with pytest.raises(NotFoundError, match="no weights"):
        read_weights(str(tmp_path), None, False)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_tensors_are_where_the_files_have_them(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(WEIGHTS, path)
    metadata = weights_metadata(str(tmp_path), read_weights(str(tmp_path), [str(path)], False))
    assert metadata.tensors.keys() == {(name, FROZEN) for name in WEIGHTS} and not metadata.aliases
    for (name, _), tensor in metadata.tensors.items():
        expected = WEIGHTS[name].contiguous()
        start = tensor.chunks[0].byte_offset if tensor.chunks else 0
        raw = bytearray(path.read_bytes()[start : start + expected.nbytes])
        assert (tensor.shape, f"torch.{tensor.dtype}") == (tuple(expected.shape), str(expected.dtype))
        assert not raw or torch.equal(torch.frombuffer(raw, dtype=expected.dtype).view(expected.shape), expected)
    # torch.save writes checksums
    assert bool(metadata.files[0].records.offsets) == (suffix == ".bin")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([torch.ones(1)], UnsupportedError),
        ({"a": {"b": torch.ones(1)}}, UnsupportedError),
        ({1: torch.ones(1)}, UnsupportedError),
        ({"a": torch.ones(2, 3).t()}, UnsupportedError),
        ({"a": print}, UnsafePickleError),
    ],
)
def test_an_archive_of_other_things_is_refused(content: object, error: type[Exception], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(error) as raised:
        read_weights(str(tmp_path), None, False)
    assert raised.value.file == str(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"a": "../w.bin"}, "not in its folder"),
        ({"a": "/w.bin"}, "not in its folder"),
        ({"a": "w.bin", "b": "w.bin"}, "does not belong"),
        ({"a": "v.bin"}, "does not belong"),
    ],
)
def test_files_that_from_pretrained_has_chosen_are_held_against_its_index(
    index: dict[str, str], words: str, tmp_path: Path
) -> None:
    paths = [str(tmp_path / "w.bin")]
    torch.save({"a": torch.ones(1)}, paths[0])
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_weights(str(tmp_path), paths, False, index={"a": "w.bin"})
    assert read_weights(str(tmp_path), paths, False, {"b"}, {"a": "w.bin", "b": "w.bin"})
    torch.save({"a": torch.ones(1), "unlisted": torch.ones(2)}, paths[0])
    (file,) = read_weights(str(tmp_path), paths, False, index={"a": "w.bin"})
    assert file.tensors.keys() == {"a", "unlisted"}
    with pytest.raises(DamagedError, match=words) as raised:
        read_weights(str(tmp_path), paths, False, index=index)
    assert raised.value.file == str(tmp_path / "pytorch_model.bin.index.json")


def test_an_index_that_disagrees_and_a_tensor_in_two_files_are_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"a": torch.ones(1)}, tmp_path / f"part{number}.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part1.bin", "b": "part2.bin"}}))
    with pytest.raises(DamagedError, match="does not belong"):
        read_weights(str(tmp_path), None, False)
    both = read_weights(str(tmp_path), [str(tmp_path / "part1.bin"), str(tmp_path / "part2.bin")], False)
    with pytest.raises(MismatchError, match="two files"):
        weights_metadata(str(tmp_path), both)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_name_that_is_longer_than_any_modules_is_damage(suffix: str, tmp_path: Path) -> None:
    """Transformers' patterns for names would take the square of its length."""
    path = tmp_path / f"weights{suffix}"
    for name, is_damaged in (("experts." * 256, False), ("experts." * 256 + "w", True)):
        (save_file if suffix == ".safetensors" else torch.save)({name: torch.ones(1)}, path)
        if not is_damaged:
            assert [*read_weights(str(tmp_path), [str(path)], False)[0].tensors] == [name]
            continue
        with pytest.raises(DamagedError, match="a name that is too long") as caught:
            read_weights(str(tmp_path), [str(path)], False)
        assert caught.value.file == str(path) and "2049 characters" in str(caught.value.found)

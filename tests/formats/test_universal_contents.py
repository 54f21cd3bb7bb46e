"""Files of a universal checkpoint that are another parameter's, where its converter noted what tells them apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MixedSavesError
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_contents import CONTENTS, content_of, note_contents, read_contents
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.tools.verification import verify
from tests.formats.universal_folders import written

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
SHAPES = {"a": (4, 6), "b": (4, 6), "c": (5,)}
OPTIONS = MetadataOptions(with_client_state=False)


def folder(tmp_path: Path, *, is_noted: bool = True) -> Path:
    """A folder whose files all have values of their own."""
    zero = written(tmp_path, shapes=SHAPES)
    for number, (name, shape) in enumerate(SHAPES.items()):
        (zero / name / "trail.pt").unlink()
        for key in KEYS:
            value = number * len(KEYS) + KEYS.index(key) + 1.0
            # the weights beside the masters are zeros
            values = torch.zeros(shape) if key == "fp32" and not is_noted else torch.full(shape, value)
            torch.save({"param": values}, zero / name / f"{key}.pt")
    if is_noted:
        set_entry(zero, noted(zero))
    return zero


def noted(zero: Path) -> dict[str, dict[str, int]]:
    files = ((name, key, open_pickled(str(zero / name / f"{key}.pt"))) for name in SHAPES for key in KEYS)
    return note_contents((name, key, content_of(file.records)) for name, key, file in files)


def set_entry(zero: Path, entry: Any) -> None:
    path = zero / "optimizer_state.pt"
    torch.save({**torch.load(path), CONTENTS: entry}, path)


def found_of(zero: Path) -> CheckpointInfo:
    found = look_at(str(zero.parent.parent), "tag")
    assert found is not None
    return found


def refusal(zero: Path) -> ElasticCkptError:
    with pytest.raises(ElasticCkptError) as caught:
        read_checkpoint(found_of(zero), OPTIONS)
    return caught.value


def exchange(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(kept)


#: How ``exp_avg.pt``, say, of ``a`` becomes another file; the second path is that of ``b``.
WAYS: Mapping[str, Callable[[Path, Path], object]] = MappingProxyType(
    {
        "another parameter's": lambda path, other: shutil.copy(other, path),
        "exchanged": exchange,
        "saved anew": lambda path, other: torch.save({"param": torch.full((4, 6), 99.0)}, path),
    }
)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_anothers_is_named(way: str, key: str, tmp_path: Path) -> None:
    zero = folder(tmp_path)
    path, other = zero / "a" / f"{key}.pt", zero / "b" / f"{key}.pt"
    WAYS[way](path, other)
    error = refusal(zero)
    assert type(error) is DamagedError and error.file == str(path)
    assert error.problem == f"{key} of this parameter is not the file that was converted"
    assert error.parameter == ("a, b" if way == "exchanged" else "a")
    is_anothers = way != "saved anew"
    assert (error.found or "").startswith("the content of" if is_anothers else "another content")
    assert ("of b" in str(error.found)) == is_anothers
    report = verify(str(tmp_path), "tag", ElasticConfig())
    assert any(f"a/{key}.pt" in str(problem) for problem in report.problems)


def test_equal_files_are_not_told_apart(tmp_path: Path) -> None:
    zero = folder(tmp_path, is_noted=False)
    shutil.copy(zero / "a" / "fp32.pt", zero / "b" / "fp32.pt")
    set_entry(zero, noted(zero))
    exchange(zero / "a" / "fp32.pt", zero / "b" / "fp32.pt")
    assert refusal_or_none(zero) is None


def refusal_or_none(zero: Path) -> ElasticCkptError | None:
    try:
        read_checkpoint(found_of(zero), OPTIONS)
    except ElasticCkptError as error:
        return error
    return None


@pytest.mark.parametrize("has_checksums", [True, False])
def test_without_a_note_or_checksums_nothing_is_compared(has_checksums: bool, tmp_path: Path) -> None:
    zero = folder(tmp_path, is_noted=False)
    if not has_checksums:
        set_entry(zero, noted(zero))
    torch.serialization.set_crc32_options(has_checksums)
    try:
        torch.save({"param": torch.full((4, 6), 99.0)}, zero / "a" / "exp_avg.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert refusal_or_none(zero) is None


def test_a_list_of_another_conversion_accuses_no_file(tmp_path: Path) -> None:
    zero = folder(tmp_path)
    set_entry(zero, {name: {key: number + 1 for key, number in of.items()} for name, of in noted(zero).items()})
    error = refusal(zero)
    assert type(error) is MixedSavesError and error.file == str(zero / "optimizer_state.pt")


@pytest.mark.parametrize(
    "entry", [1, [], {"a": 1}, {"a": {"fp32": "x"}}, {"a": {1: 2}}, {1: {"fp32": 2}}, {"a": {"fp32": True}}]
)
def test_another_entry_is_damage(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="is damaged"):
        read_contents(entry, "optimizer_state.pt")


def test_files_without_elements_are_not_noted() -> None:
    assert note_contents([("a", "fp32", 7), ("a", "exp_avg", None), ("b", "fp32", None)]) == {"a": {"fp32": 7}}
    assert read_contents({"a": {"fp32": 7}}, "") == {("a", "fp32"): 7}
    assert read_contents(None, "") == {}

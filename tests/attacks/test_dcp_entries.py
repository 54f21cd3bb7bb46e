"""Entries of a ``torch.distributed.checkpoint`` folder that few bytes of ``.metadata`` name: work is linear in them.

Entries without elements need no chunks, and share keys and sizes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from elastic_ckpt.errors import DamagedError, ElasticCkptError, UnsupportedError
from elastic_ckpt.formats import dcp_entries, work_budget
from elastic_ckpt.formats.dcp_entries import Owners, sort_entries, unstacked
from elastic_ckpt.formats.dcp_metadata import DcpContents, StoredItem, read_dcp_metadata
from elastic_ckpt.formats.work_budget import WorkBudget
from tests.attacks.guard import counted

#: Calls for each byte of ``.metadata``.
MOST_CALLS = 20
FLOAT = TensorProperties(torch.float32)
Keys = tuple[str | int, ...]


def written(folder: Path, paths: dict[str, Keys] | None, names: Sequence[str] = ()) -> str:
    """A folder whose ``.metadata`` lists tensors without elements: by their paths, or by their names alone."""
    empty = TensorStorageMetadata(FLOAT, torch.Size((0,)), [])
    entries = dict.fromkeys(paths or names, empty)
    metadata = Metadata(entries, paths, {})  # type: ignore[arg-type]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    return str(folder)


def long_word(number: int, parts: int) -> str:
    return f"state.a.{number:x}." + ".".join(["x"] * parts)


def roots_and_words(count: int) -> dict[str, Keys]:
    """State dicts that each have the parameter of all words of a flattened optimizer."""
    found: dict[str, Keys] = {f"r{number}": (f"r{number}", "a") for number in range(count)}
    found |= {f"f{number}": (long_word(number, 500),) for number in range(count)}
    return {**found, "group": ("param_groups.a.lr",)}


def shared_word(count: int) -> dict[str, Keys]:
    """One long last key, of one parameter's state by its form."""
    word = long_word(0, 900)
    found: dict[str, Keys] = {f"f{number}": (f"f{number}", word) for number in range(count)}
    return {**found, "m": ("model", "w")}


def optimizers(count: int) -> dict[str, Keys]:
    """Optimizers of an unknown layout."""
    found: dict[str, Keys] = {f"{number}": (f"{number}", "param_groups", 0, "lr", "x") for number in range(count)}
    return {**found, "m": ("model", "w")}


def models(count: int) -> dict[str, Keys]:
    """State dicts that may all be the model's."""
    return {f"{number}": (f"{number}", "model", "w") for number in range(count)}


KINDS: dict[str, Callable[[], dict[str, Keys]]] = {
    "words of an optimizer, in each of many state dicts": lambda: roots_and_words(200),
    "a word that many entries share": lambda: shared_word(600),
    "optimizers of an unknown layout": lambda: optimizers(3000),
    "models": lambda: models(3000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_for_entries_follow_the_size_of_their_file(tmp_path: Path, kind: str) -> None:
    folder = written(tmp_path, KINDS[kind]())
    contents = read_dcp_metadata(folder)
    for with_states in (True, False):
        with counted(MOST_CALLS * os.path.getsize(tmp_path / ".metadata")), suppress(ElasticCkptError):
            sort_entries(contents, folder, with_states)


class Compared(str):
    """Text that counts how often it is compared."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str(self) == str(other)


def test_a_state_dict_is_not_compared_with_all_others(tmp_path: Path) -> None:
    contents = read_dcp_metadata(written(tmp_path, models(500)))
    dicts = {(Compared(number), "model"): {"w": str(number)} for number in range(500)}
    Compared.times = 0
    with pytest.raises(UnsupportedError, match="more than one state dict"):
        dcp_entries._refuse_copies(contents, dicts, list(dicts), "folder")
    assert Compared.times <= 20 * len(dicts)


def test_state_dicts_times_parameters_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many state dicts has all but one of many parameters."""
    monkeypatch.setattr(work_budget, "_MORE_OBJECTS", 1 << 12)
    names = [f"p{number}" for number in range(300)]
    paths: dict[str, Keys] = {f"s{name}": (f"state.{name}.x",) for name in names}
    paths |= {f"m{name}": ("model", name) for name in names}
    paths |= {f"{root}{at}": (f"r{root}", f"p{root}"[:at]) for root in range(300) for at in (1, 2)}
    paths |= {"group": ("param_groups.p0.lr",), "p": ("model", "p"), "odd": ("state.p.x",)}
    contents = read_dcp_metadata(written(tmp_path, paths))
    with suppress(ElasticCkptError):
        sort_entries(contents, str(tmp_path))
    assert contents.budget.objects <= 20 * len(paths)


@pytest.mark.parametrize("parts", [10, 900])
def test_a_word_is_cut_no_further_than_the_longest_name(parts: int) -> None:
    budget = WorkBudget("file", 0)
    owners = Owners(["a", "a.b", "x"], budget)
    word = "state.a.b." + ".".join("x" * parts)
    assert [owners.of(word) for _ in range(100)] == ["a.b"] * 100
    assert budget.objects <= 4
    assert owners.of("state.a.b") == "a" and owners.of("a.b") is None and owners.of("state.y.b") is None


def test_work_that_is_used_up_is_no_unknown_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without states, an optimizer of an unknown layout is left out; what takes too much work is not."""
    folder = written(tmp_path, optimizers(3))
    assert sort_entries(read_dcp_metadata(folder), folder, with_states=False).weights == {"w": "m"}
    contents = read_dcp_metadata(folder)
    contents.budget.objects = 1 << 40
    with pytest.raises(UnsupportedError, match="far more work"):
        sort_entries(contents, folder, with_states=False)


def test_text_that_is_made_of_shared_keys_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is named by all keys below its parameter: together they are longer than the file."""
    monkeypatch.setattr(work_budget, "_MORE_NBYTES", 1 << 16)
    keys = ("k" * 2000,) * 50
    paths: dict[str, Keys] = {f"{number}": ("optim", "state", "w", *keys, str(number)) for number in range(100)}
    paths |= {"lr": ("optim", "param_groups", 0, "lr"), "m": ("model", "w")}
    contents = read_dcp_metadata(written(tmp_path, paths))
    with pytest.raises(UnsupportedError, match="bytes to read"):
        sort_entries(contents, str(tmp_path))


@pytest.mark.parametrize("key", [1 << 64, -(10**40)])
def test_a_number_in_a_path_has_few_digits(tmp_path: Path, key: int) -> None:
    folder = written(tmp_path, {"w": ("model", key, "w")})
    with pytest.raises(DamagedError, match="truncated or unreadable") as caught:
        read_dcp_metadata(folder)
    assert "names and numbers" in str(caught.value.found)


def test_an_entry_without_a_path_has_a_short_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="longer path"):
        read_dcp_metadata(written(tmp_path, None, ["layers.x" * 1000 + "\n"]))


def colliding(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers that have one hash: the second makes up for the first."""
    first, second, both = 11400714785074694791, 14029467366897019727, 1 << 64
    inverse = pow(second, -1, both)
    found: list[tuple[int, int]] = []
    number = 0
    while len(found) < count:
        number += 1
        lane = (2870177450012600261 + number * second) % both
        lane = ((lane << 31 | lane >> 33) * first) % both
        other = (-lane * inverse) % both
        if other < 1 << 60:
            found.append((number, other))
    return found


def test_offsets_of_chunks_do_not_share_a_hash(tmp_path: Path) -> None:
    """Each would be compared with all others."""
    offsets = colliding(200)
    assert len(set(map(hash, offsets))) == 1
    chunks = [ChunkStorageMetadata(torch.Size(each), torch.Size((0, 0))) for each in offsets]
    entry = TensorStorageMetadata(FLOAT, torch.Size((1 << 60, 1 << 60)), chunks)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, None, {}), 4))
    with pytest.raises(DamagedError) as caught:
        read_dcp_metadata(str(tmp_path))
    assert "same hash" in str(caught.value.found)


def test_dimensions_of_chunks_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks that are one object, of many dimensions."""
    monkeypatch.setattr(work_budget, "_MORE_OBJECTS", 1 << 8)
    zeros = torch.Size((0,) * 25)
    entry = TensorStorageMetadata(FLOAT, zeros, [ChunkStorageMetadata(zeros, zeros)] * 1000)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, None, {}), 4))
    with pytest.raises(UnsupportedError, match="objects to look at"):
        read_dcp_metadata(str(tmp_path))


LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "a layer without elements beside a stack": {"decoder.layers.w": (1, 4), "decoder.layers.0.w": (0,)},
    "two stacks": {"layers.b.layers.5.w": (4, 1), "layers.3.b.layers.w": (6, 1)},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_in_one_entry(kind: str) -> None:
    """Megatron Core's layout: of two, one alone would be read."""
    shapes = LAYERS[kind]
    items = [
        StoredItem(name, 0, 0, (layer, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
        for name, shape in shapes.items()
        for layer in range(shape[0])
    ]
    tensors = {name: ("float32", shape) for name, shape in shapes.items()}
    paths: dict[str, Keys] = {name: (name,) for name in shapes}
    contents = DcpContents(tensors, paths, {"file": tuple(items)}, 0.0, WorkBudget("file", 0))
    with pytest.raises(DamagedError, match="are one layer's parameter") as caught:
        unstacked(contents, "folder")
    assert all(name in str(caught.value.found) for name in shapes)

"""One file has one memory budget, however many archives, hyperparameters or modules share it: counted in bytes."""

from __future__ import annotations

import collections
import io
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.dcp_metadata import DcpContents, DcpFile, StoredItem, read_dcp_file, read_dcp_metadata
from elastic_ckpt.formats.extra_states import made_extra_states
from elastic_ckpt.formats.objects import materialise, materialise_entries
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive import charges
from elastic_ckpt.formats.values import hyperparameters
from elastic_ckpt.formats.work_budget import WorkBudget

#: Of the memory budget, as these tests have it: what a small file may take.
MOST_NBYTES = 16 << 20
WORDS = "take more memory than elastic_ckpt spends"


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charges, "_MOST_NBYTES", MOST_NBYTES)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the body takes much more memory than the budget."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before <= 1.5 * MOST_NBYTES, f"{(peak - before) >> 20} MiB"


def archive(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("archive/data.pkl", pickled)
        target.writestr("archive/byteorder", b"little")
        target.writestr("archive/version", b"3\n")
    return file.getvalue()


def sets(count: int, end: bytes = b"e.") -> bytes:
    """A list of empty sets, which take a byte each."""
    return b"\x80\x04](" + b"\x8f" * count + end


def dcp_file(folder: Path, pickles: list[bytes], as_groups: bool) -> DcpFile:
    """What is read of one ``.distcp`` with an archive for each pickle."""
    raw = bytearray()
    items = []
    for number, pickled in enumerate(pickles):
        part = archive(pickled)
        items.append(StoredItem(f"x{number}", len(raw), len(part)))
        raw += part
    (folder / "__0_0.distcp").write_bytes(raw)
    names = [item.name for item in items]
    contents = DcpContents({}, {name: (name,) for name in names}, {"f": tuple(items)}, 0.0, WorkBudget("f", 0))
    path = str(folder / "__0_0.distcp")
    return read_dcp_file(path, "f", contents, names, names if as_groups else ())


@pytest.mark.parametrize("as_groups", [True, False], ids=["hyperparameters", "objects"])
def test_archives_of_a_file_share_its_memory(tmp_path: Path, as_groups: bool) -> None:
    assert len(dcp_file(tmp_path, [sets(2000)], as_groups).values) == 1
    with bounded():
        found = dcp_file(tmp_path, [sets(9000 + number) for number in range(12)], as_groups)
    errors = [value for value in found.values.values() if isinstance(value, UnsupportedError)]
    assert 6 < len(errors) < 12 and all(WORDS in error.problem for error in errors)


def test_an_archive_that_is_refused_keeps_nothing(tmp_path: Path) -> None:
    """Each ends with an integer that is too long; frames of its error would hold the sets before it."""
    end = b"e\x8b" + (2000).to_bytes(4, "little") + b"\1" * 2000 + b"."
    with bounded():
        values = dcp_file(tmp_path, [sets(6000 + number, end) for number in range(30)], False).values
    assert len(values) == 30 and all("integers of at most" in value.expected for value in values.values())


def test_tensors_of_a_file_do_not_use_up_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"x{number}": torch.ones(number, dtype=torch.uint8) for number in range(1, 400)}
    dcp.save(values, checkpoint_id=tmp_path)
    contents = read_dcp_metadata(str(tmp_path))
    (name,) = contents.files
    monkeypatch.setattr(charges, "_MOST_NBYTES", 0)
    assert min(read_dcp_file(str(tmp_path / name), name, contents, ()).byte_offsets) > 0


SHARED = [set[int]() for _ in range(4000)]
MAKERS: dict[str, Callable[[Any], Any]] = {
    "hyperparameters": lambda file: hyperparameters(file, file.tree["shared"]),
    "calls for hyperparameters": lambda file: [
        hyperparameters(file, {key: value}) for key, value in file.tree["shared"].items()
    ],
    "calls for objects": lambda file: [materialise(file, value) for value in file.tree["shared"].values()],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_that_is_made_of_a_file_shares_its_memory(tmp_path: Path, kind: str) -> None:
    """Objects that each copy one list."""
    for count in (1, 60):
        path = str(tmp_path / f"{count}.pt")
        torch.save({"shared": {f"h{number}": collections.deque([SHARED]) for number in range(count)}}, path)
        file = open_pickled(path)
        with bounded():
            if count == 1:
                MAKERS[kind](file)
            else:
                with pytest.raises(UnsupportedError, match=WORDS):
                    MAKERS[kind](file)


def test_extra_states_share_the_memory_of_their_file(tmp_path: Path) -> None:
    module = {f"m{number}._extra_state": collections.deque([SHARED]) for number in range(60)}
    torch.save({"module": module}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    with bounded():
        made = made_extra_states(file)
    errors = [value for value in made.values() if isinstance(value, ElasticCkptError)]
    assert 30 < len(errors) < 60 and all(WORDS in error.problem for error in errors)


class Unknown:
    """A class that no reader makes."""


def test_what_is_not_kept_is_given_back(tmp_path: Path) -> None:
    """An entry that is not made is found by making each by itself; the others are made once more."""
    state = {f"entry {number}": [set() for _ in range(100)] for number in range(20)}
    torch.save({"module": {}, **state, "odd": Unknown()}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    client = {key: value for key, value in file.tree.items() if key != "module"}
    used = file.memory.used
    made, errors = materialise_entries(file, client, lambda _: True)
    assert made == state and list(errors) == ["odd"]
    taken = file.memory.used - used
    del client["odd"]
    used = file.memory.used
    materialise(file, client)
    assert file.memory.used - used == taken > sys.getsizeof(set()) * 100 * 20

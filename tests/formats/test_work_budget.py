"""Work on a file is bounded by its size, whatever its parts share with each other: counted in bytes, opens, objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import LeftInFile, TensorValue
from elastic_ckpt.errors import DamagedError, ElasticCkptError, UnsupportedError
from elastic_ckpt.formats import work_budget
from elastic_ckpt.formats.dcp_metadata import read_dcp_file, read_dcp_metadata
from elastic_ckpt.formats.objects import materialise, materialise_entries
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.saved_states import read_groups, sort_states
from elastic_ckpt.formats.values import read_bytes
from elastic_ckpt.storage import local

#: Of the budget, as these tests have it: what a file of few bytes may cost. Of a walk, one reading is the metadata's.
MORE_NBYTES, MORE_OBJECTS, MORE_OPENS = 1 << 17, 1 << 12, 8
TIMES = 8 + 2
WORDS = "takes far more work to read than its size justifies"


@dataclass
class Work:
    """What was really read of files, and how often they were opened."""

    nbytes: int = 0
    opens: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work, real_open, real_read = Work(), local.open_descriptor, local._File.readinto

    def open_descriptor(path: str) -> int:
        work.opens += 1
        return real_open(path)

    def readinto(self: Any, buffer: Any) -> int:
        count = real_read(self, buffer)
        work.nbytes += count or 0
        return count

    with monkeypatch.context() as patch:
        patch.setattr(local, "open_descriptor", open_descriptor)
        patch.setattr(local._File, "readinto", readinto)
        patch.setattr(work_budget, "_MORE_NBYTES", MORE_NBYTES)
        patch.setattr(work_budget, "_MORE_OBJECTS", MORE_OBJECTS)
        patch.setattr(work_budget, "_MORE_OPENS", MORE_OPENS)
        yield work


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Many views of few storages, near or far apart, some of which repeat elements."""
    storages = [
        torch.arange(draw(st.integers(64, 40_000)), dtype=torch.float32) for _ in range(draw(st.integers(1, 3)))
    ]
    found = []
    for _ in range(draw(st.integers(1, 4))):
        base = draw(st.sampled_from(storages))
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        left = base.numel() - 1
        stride = []
        for size in shape:
            step = draw(st.integers(0, left // max(size - 1, 1)))
            stride.append(step)
            left -= step * (size - 1)
        view = torch.as_strided(base, shape, stride, draw(st.integers(0, left)))
        # so that each is an object of its own in the pickle
        found += [view.detach() for _ in range(draw(st.sampled_from([1, 30, 1000])))]
    return found


PLACES = ["bytes", "hyperparameters", "states", "client state"]


@settings(max_examples=60, deadline=None)
@given(tensors=views(), place=st.sampled_from(PLACES), split=st.integers(1, 50))
def test_views_of_few_storages_cost_what_their_file_justifies(
    tensors: list[torch.Tensor], place: str, split: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryFile() as path:
        torch.save({"all": tensors}, path)
        nbytes = path.stat().st_size
        with counted(patch) as work:
            try:
                file = open_pickled(str(path))
                refs = file.tree["all"]
                if place == "bytes":
                    assert read_bytes(file, refs) == [each.contiguous().numpy().tobytes() for each in tensors]
                elif place == "hyperparameters":
                    parts = [refs[at : at + split] for at in range(0, len(refs), split)]
                    groups = read_groups(file, [{"odd": part} for part in parts])
                    for read, each in zip([one for group in groups for one in group["odd"]], tensors, strict=True):
                        if isinstance(read, TensorValue):
                            assert read.elements == tuple(each.flatten().tolist())
                        else:
                            assert isinstance(read, LeftInFile) and each.numel() > 16
                elif place == "states":
                    for ref in refs:
                        sort_states(file, {"count": ref}, StateOptions())
                else:
                    made = materialise(file, {"all": refs})
                    assert all(map(torch.equal, made["all"], tensors))
            except UnsupportedError as error:
                assert WORDS in error.problem and error.file == str(path) and error.found and error.remedy
        assert work.nbytes <= TIMES * nbytes + MORE_NBYTES
        assert work.opens <= nbytes // work_budget._OPENED_NBYTES + MORE_OPENS + 2


@contextmanager
def TemporaryFile() -> Iterator[Path]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        yield Path(folder) / "file.pt"


def test_far_views_are_read_without_what_is_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two elements at the ends of 4 MB, a thousand times, in groups of their own."""
    base = torch.arange(1_000_000, dtype=torch.float32)
    ends = [torch.as_strided(base, (2,), (999_999,)) for _ in range(300)]
    torch.save({"groups": [{"odd": each} for each in ends]}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    with counted(monkeypatch) as work:
        groups = read_groups(file, file.tree["groups"])
    assert {group["odd"].elements for group in groups} == {(0.0, 999_999.0)}
    assert work.opens == 1 and work.nbytes <= 2 * 300 * 65_536 // 8


class Unknown:
    """A class that no reader makes."""


@pytest.mark.parametrize("entries", [3, 400])
def test_an_entry_that_is_not_made_does_not_multiply_the_work_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """To find it, each is made by itself."""
    shared = torch.arange(100_000)
    state = {f"entry {number}": shared[number:] for number in range(entries)}
    torch.save({"module": {}, **state, "odd": Unknown()}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    client = {key: value for key, value in file.tree.items() if key != "module"}
    with counted(monkeypatch) as work:
        try:
            made, errors = materialise_entries(file, client, lambda _: True)
            assert entries == 3 and list(errors) == ["odd"]
            assert all(torch.equal(made[key], value) for key, value in state.items())
        except UnsupportedError as error:
            assert entries == 400 and WORDS in error.problem
    assert work.nbytes <= TIMES * (tmp_path / "file.pt").stat().st_size + MORE_NBYTES


def test_a_list_that_all_groups_share_is_not_copied_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [list(range(10)) for _ in range(1000)]
    torch.save([{"odd": shared} for _ in range(5000)], tmp_path / "file.pt")
    with counted(monkeypatch), pytest.raises(UnsupportedError, match="objects"):
        file = open_pickled(str(tmp_path / "file.pt"))
        read_groups(file, file.tree)


def test_large_honest_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of groups, of steps without dimensions, and of tied tensors, within the bounds of small files."""
    step = torch.tensor(7.0)
    tied = torch.arange(256, dtype=torch.float32)
    tree = {
        "groups": [{"lr": torch.tensor(0.1), "betas": (0.9, 0.95), "params": [number]} for number in range(3000)],
        "own": {number: {"step": torch.tensor(float(number)), "exp_avg": torch.zeros(64)} for number in range(3000)},
        "tied": {number: {"step": step, "qmap1": tied, "state1": torch.zeros(64)} for number in range(3000)},
    }
    torch.save(tree, tmp_path / "file.pt")
    with counted(monkeypatch) as work:
        file = open_pickled(str(tmp_path / "file.pt"))
        with file.kept_open():
            assert len(read_groups(file, file.tree["groups"])) == 3000
            for number in range(3000):
                own, same = (sort_states(file, file.tree[key][number], StateOptions()) for key in ("own", "tied"))
                assert dict(own.scalars)["step"].elements == (float(number),)
                assert dict(same.scalars)["step"].elements == (7.0,)
        assert len(materialise(file, file.tree)["tied"]) == 3000
    assert work.opens <= 3


@pytest.mark.parametrize("count", [2, 500])
def test_entries_of_a_folder_that_share_bytes_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    dcp.save({f"entry{number}": list(range(1000 + number)) for number in range(count)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    largest = max(metadata.storage_data.values(), key=lambda info: info.length)
    for index in metadata.storage_data:
        metadata.storage_data[index] = largest
    path.write_bytes(pickle.dumps(metadata))
    with counted(monkeypatch) as work, pytest.raises(DamagedError, match="two entries are in the same bytes") as caught:
        contents = read_dcp_metadata(str(tmp_path))
        for name in contents.files:
            read_dcp_file(str(tmp_path / name), name, contents, set(contents.paths))
    assert "entry" in str(caught.value.expected) and "entry" in str(caught.value.found)
    assert work.nbytes <= TIMES * sum(each.stat().st_size for each in tmp_path.iterdir()) + MORE_NBYTES


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_ranges_of_a_folder_are_disjoint_or_refused(data: st.DataObject) -> None:
    """Ranges that a .metadata claims: read once, or two entries are named that share bytes."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        folder = Path(name)
        dcp.save({f"entry{number}": list(range(number)) for number in range(4)}, checkpoint_id=folder)
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        infos = list(metadata.storage_data.values())
        moved = data.draw(st.lists(st.integers(-2000, 2000), min_size=4, max_size=4))
        for info, by in zip(infos, moved, strict=True):
            object.__setattr__(info, "offset", max(info.offset + by * data.draw(st.booleans()), 0))
        path.write_bytes(pickle.dumps(metadata))
        ranges = sorted((info.offset, info.offset + info.length) for info in infos)
        overlaps = any(np.diff(np.ravel(ranges))[1::2] < 0)
        try:
            contents = read_dcp_metadata(name)
            assert not overlaps
            for each in contents.files:
                read_dcp_file(str(folder / each), each, contents, set(contents.paths))
        except ElasticCkptError as error:
            assert overlaps == ("same bytes" in error.problem), error


@pytest.mark.parametrize("threads", [1, 7])
def test_each_of_many_files_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """A folder has the sum of its files' budgets, and needs little of it."""
    values = {f"x{number}": torch.tensor(float(number)) for number in range(200)}
    dcp.save(values, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    with counted(monkeypatch) as work:
        contents = read_dcp_metadata(str(tmp_path))
        read: dict[str, Any] = {}
        for name in contents.files:
            read |= read_dcp_file(str(tmp_path / name), name, contents, set(values)).values
    assert read == {name: value.item() for name, value in values.items()}
    assert len(contents.files) == threads and work.opens == 1 + 2 * threads
    assert work.nbytes <= 5 * sum(each.stat().st_size for each in tmp_path.iterdir()) + threads * (1 << 13)


def test_a_list_of_chunks_that_all_entries_share_is_not_walked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.zeros(4000)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry, (index, info) = metadata.state_dict_metadata["w"], *metadata.storage_data.items()
    entry.chunks *= 4000
    for number in range(2000):
        metadata.state_dict_metadata[f"w{number}"] = entry
        metadata.storage_data[replace(index, fqn=f"w{number}")] = info
    path.write_bytes(pickle.dumps(metadata))
    with counted(monkeypatch), pytest.raises(UnsupportedError, match=rf"{WORDS}|most of them again and again"):
        read_dcp_metadata(str(tmp_path))

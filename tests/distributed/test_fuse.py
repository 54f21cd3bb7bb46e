"""Jobs that load from a network file system: who opens what, and what comes of its faults.

The test's own process serves the file system, counts and fails: a rank that did would wait for itself. So these are no
cells, but share their saves.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import Save, Saves
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.storage.fuse import FuseFolder, seen_through_fuse

SOURCES = [Save(Setup(stage), more={"model": "BigLM"}) for stage in (1, 3)]
RANKS = 3


@pytest.fixture(scope="module")
def saved(saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    saves.make(SOURCES)
    for save in SOURCES:
        shutil.copytree(saves.folder(save), folder / save.name)
    return folder


@pytest.fixture
def fuse(saved: Path, tmp_path: Path) -> Iterator[FuseFolder]:
    with seen_through_fuse(saved, tmp_path / "seen") as folder:
        yield folder


def cases_of(fuse: FuseFolder, setup: Setup, **section: Any) -> list[dict[str, Any]]:
    """Loads of both saves."""
    options = {"mode": "require", **section}
    folders = [{"url": str(fuse.at / save.name), "folder": str(fuse.source / save.name)} for save in SOURCES]
    return [{**folder, "setup": setup, "section": options} for folder in folders]


def test_files_are_opened_by_who_reads_from_them(fuse: FuseFolder, launch: Launch) -> None:
    """A rank begins a file with its first bytes, before its metadata, or with the tensors that it owns."""
    cases = cases_of(fuse, Setup(0))
    found = launch(RANKS, "bucket_jobs.load", cases)
    for each in found:
        assert each.differences == {}, each.where
        assert "network (fuse.tests)" in each.text
    opened, first = set(), dict[tuple[str, int], int]()
    for event in fuse.events:
        if event.name.endswith(".pt") and event.what == "open":
            opened.add((event.name, event.process))
        elif event.name.endswith("optim_states.pt") and event.what == "read":
            first.setdefault((event.name, event.process), event.start)
    assert opened == {
        (event.name, event.process) for event in fuse.events if event.name.endswith(".pt") and event.nbytes
    }
    with_metadata = [name for (name, _), start in first.items() if start == 0]
    assert sorted(with_metadata) == [path.relative_to(fuse.source).as_posix() for path in optimizer_files(fuse)]
    # what every rank owns is read by one: three times as many bytes would be read
    tensors_nbytes = sum(path.stat().st_size for path in optimizer_files(fuse))
    read_nbytes = sum(event.nbytes for event in fuse.events if event.name.endswith("optim_states.pt"))
    again_nbytes = len(cases) * RANKS << 20  # metadata, and records' padding for their checksums
    assert tensors_nbytes < read_nbytes < tensors_nbytes + again_nbytes < RANKS * tensors_nbytes


def test_late_files_stale_handles_and_short_reads_change_nothing(fuse: FuseFolder, launch: Launch) -> None:
    late, stale, *_ = files = [path.relative_to(fuse.source).as_posix() for path in optimizer_files(fuse)]
    fuse.hidden[late], fuse.shortest, fuse.seconds = 3, 100_003, 0.001
    fuse.errors[f"read {stale}"] = [0, 0, 0, 0, 0, errno.ESTALE]
    found = launch(RANKS, "bucket_jobs.load", cases_of(fuse, Setup(3), wait_for_files=60))
    for each in found:
        assert each.differences == {}, each.where
    assert (
        fuse.hidden[late] < 0
        and fuse.errors[f"read {stale}"] == []
        and len(files) == sum(save.ranks for save in SOURCES)
    )


def test_failures_and_sizes_that_are_lies_are_errors_with_the_file(fuse: FuseFolder, launch: Launch) -> None:
    failing, _, short, long = (path.relative_to(fuse.source).as_posix() for path in optimizer_files(fuse))
    fuse.errors[f"read {failing}"] = [errno.EIO] * 1000
    fuse.sizes = {short: (fuse.source / short).stat().st_size - 4096, long: 1 << 30}
    found = launch(2, "bucket_jobs.refuse", cases_of(fuse, Setup(2)))
    for each, files in zip(found, [[failing], [short, long]] * 2, strict=True):
        (text,) = each.texts
        assert "DamagedError" in each.kinds and each.changed == frozenset(), text
        assert any(str(fuse.at / file) in text for file in files), text


def optimizer_files(fuse: FuseFolder) -> list[Path]:
    """Those of the first checkpoint, then those of the second."""
    return sorted(fuse.source.rglob("*optim_states.pt"))

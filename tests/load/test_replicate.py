"""What one process of one node does when it replicates; jobs of several are in tests/distributed/test_nodes.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elastic_ckpt import replicate
from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError, UnforeseenError
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.load.copies import Copying, Original
from elastic_ckpt.storage import Entry, file_names, walk
from elastic_ckpt.storage.view import NodeListing


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder with tags 1 to 4, and replicas of another node's files of tags 1 to 3."""
    for step in range(1, 5):
        for folder in (tmp_path, tmp_path / ".replicas")[: 1 + (step < 4)]:
            path = folder / f"step{step}" / "mp_rank_00_model_states.pt"
            path.parent.mkdir(parents=True)
            path.touch()
            os.utime(path, (step, step))
    return tmp_path


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


@pytest.mark.parametrize(
    ("tag", "keep", "left", "replicas"),
    [
        ("step4", None, "1234", "123"),
        ("step4", 1, "4", ""),
        ("step4", 2, "34", "3"),
        ("step4", 9, "1234", "123"),
        ("step3", 1, "34", "3"),  # a newer one is not older, whatever is kept
        ("step3", 2, "234", "23"),
    ],
)
def test_only_older_tags_are_removed_and_only_if_asked(
    memory: Path, tag: str, keep: int | None, left: str, replicas: str
) -> None:
    replicate(memory, tag, keep=keep).wait()
    assert tags(memory) == [f"step{number}" for number in left]
    assert tags(memory / ".replicas") == [f"step{number}" for number in replicas]
    assert not [path for path in memory.iterdir() if path.name.endswith(".removed")]


def test_what_a_link_leads_to_is_never_removed(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    os.rename(memory / "step1", elsewhere / "step1")
    (memory / "step1").symlink_to(elsewhere / "step1")
    replicate(memory, "step4", keep=1).wait()
    assert tags(memory) == ["step1", "step4"]
    assert tags(elsewhere) == ["step1"] and list((elsewhere / "step1").iterdir())


@pytest.mark.parametrize("link", [".replicas/step4", ".replicas/step4/inside"])
def test_nothing_is_removed_or_written_through_a_link(memory: Path, link: str, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file.pt").touch()
    (memory / link).parent.mkdir(exist_ok=True)
    (memory / link).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="does not follow links"):
        replicate(memory, "step4").wait()
    assert [path.name for path in elsewhere.iterdir()] == ["file.pt"]


def swap(folder: Path, elsewhere: Path) -> None:
    """Put a link where a folder was."""
    folder.rename(folder.with_name("away"))
    folder.symlink_to(elsewhere)


def test_a_folder_that_becomes_a_link_does_not_lead_a_copy_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "source" / "step1" / "file.pt"
    for folder in (elsewhere, source.parent):
        folder.mkdir(parents=True)
    source.write_text("a copy")
    (elsewhere / "file.pt").write_text("precious")

    def swap_at_once(*_: Any) -> None:
        swap(tmp_path / ".replicas" / "step1", elsewhere)

    monkeypatch.setattr("elastic_ckpt.load.copies._refuse_without_space", swap_at_once)
    copying = copied(tmp_path, "step1/file.pt")
    assert copying.error is None
    assert [path.name for path in elsewhere.iterdir()] == ["file.pt"]
    assert (elsewhere / "file.pt").read_text() == "precious"
    assert (tmp_path / ".replicas" / "away" / "file.pt").read_text() == "a copy"


def test_a_folder_that_becomes_a_link_does_not_lead_a_removal_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "source" / "step1" / "file.pt"
    old = tmp_path / ".replicas" / "step1" / "old.pt"
    for path in (elsewhere / "old.pt", source, old):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def listed_then_swapped(folder: str) -> Any:
        found = [*walk(folder)]
        swap(old.parent, elsewhere)
        return found

    monkeypatch.setattr("elastic_ckpt.load.copies.walk", listed_then_swapped)
    # the look and the removal are one, or nothing is seen in between
    monkeypatch.setattr("elastic_ckpt.load.replicate.os.path.realpath", os.path.abspath)
    copying = copied(tmp_path, "step1/file.pt")
    assert isinstance(copying.error, ConfigError) and copying.error.file == str(old.parent)
    assert [path.name for path in elsewhere.iterdir()] == ["old.pt"]


def test_replicas_that_become_a_link_do_not_have_tags_removed_elsewhere(
    memory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "step1").mkdir()

    def names_then_swapped(folder: str) -> list[str]:
        if not (memory / ".replicas").is_symlink():
            swap(memory / ".replicas", elsewhere)
        return file_names(folder)

    monkeypatch.setattr("elastic_ckpt.load.replicate.file_names", names_then_swapped)
    replicate(memory, "step4", keep=1).wait()
    assert tags(elsewhere) == ["step1"]


def link(path: Path) -> None:
    path.symlink_to(path.parent / "step4")


def full(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").touch()
    (path / "link").symlink_to(path.parent / "step4")


@pytest.mark.parametrize("make", [link, Path.touch, full, lambda path: path.symlink_to("nowhere")])
def test_what_has_the_name_of_a_removed_tag_is_replaced(memory: Path, make: Any) -> None:
    make(memory / ".step1.removed")
    replicate(memory, "step4", keep=1).wait()
    assert tags(memory) == ["step4"] and list((memory / "step4").iterdir())
    assert not [path for path in memory.iterdir() if path.name.endswith(".removed")]


def test_a_tag_that_cannot_be_removed_is_an_error_that_names_it(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("elastic_ckpt.load.replicate.os.rename", fail)
    with pytest.raises(ElasticCkptError, match="an older tag could not be removed") as caught:
        replicate(memory, "step4", keep=1).wait()
    assert not isinstance(caught.value, UnforeseenError)
    assert caught.value.file == str(memory / "step3")
    assert tags(memory) == ["step1", "step2", "step3", "step4"]


@pytest.mark.parametrize("folder", [None, 5, ["run"], "run\0"], ids=repr)
def test_what_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(ConfigError, match="this is no folder"):
        replicate(folder, "step4")


def test_what_is_no_checkpoint_stays(memory: Path) -> None:
    (memory / "logs").mkdir()
    (memory / "logs" / "events").touch()
    replicate(memory, "step4", keep=1).wait()
    assert (memory / "logs" / "events").exists()


@pytest.mark.parametrize(
    "arguments",
    [{"copies": 0}, {"copies": True}, {"copies": "1"}, {"keep": 0}, {"keep": 1.0}, {"tag": "../x"}, {"tag": "/"}],
    ids=str,
)
def test_wrong_arguments_are_refused(memory: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replicate(memory, **{"tag": "step4", **arguments})
    assert tags(memory) == ["step1", "step2", "step3", "step4"]


def test_a_tag_that_is_not_there_is_refused(memory: Path) -> None:
    with pytest.raises(DamagedError, match="no files of the tag"):
        replicate(memory, "step5")


def copied(folder: Path, name: str) -> Copying:
    """What copies a file of another node, and has ended; it is given what it asks for."""
    source = folder / "source"
    status = (source / name).stat()
    entry = Entry(name, status.st_size, status.st_mtime_ns)
    listing = NodeListing("there", (str(source),), ((entry,),))
    copying = Copying(str(folder), "step1", {name: Original(0, 0, entry)}, listing, None)
    requests = copying._make_alike()
    request = copying._next(requests)
    while request is not None:
        _, piece = request
        for buffer in piece.buffers:
            copying._originals.read(piece.file, piece.byte_offset, buffer)
        request = copying._next(requests)
    return copying


MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 5, 8 * MIB, 40 * MIB, 40 * MIB + 3])
@pytest.mark.parametrize("at", [None, 0, 17 * MIB])
def test_a_copy_has_the_bytes_and_the_holes_of_its_original(tmp_path: Path, nbytes: int, at: int | None) -> None:
    source = tmp_path / "source" / "step1" / "file.pt"
    source.parent.mkdir(parents=True)
    with source.open("wb") as stream:
        stream.truncate(nbytes)
        if at is not None and at < nbytes:
            stream.seek(at)
            stream.write(b"abc")
    copying = copied(tmp_path, "step1/file.pt")
    assert copying.error is None
    copy = tmp_path / ".replicas" / "step1" / "file.pt"
    assert copy.read_bytes() == source.read_bytes() and copy.stat().st_mtime_ns == source.stat().st_mtime_ns
    assert copy.stat().st_blocks * 512 <= 9 * MIB


def test_a_file_that_is_larger_than_the_space_for_it_is_refused_at_once(tmp_path: Path) -> None:
    source = tmp_path / "source" / "step1" / "file.pt"
    source.parent.mkdir(parents=True)
    with source.open("wb") as stream:
        stream.truncate(8 << 40)
    copying = copied(tmp_path, "step1/file.pt")
    assert copying.error is not None and "free" in str(copying.error.found)
    assert not list((tmp_path / ".replicas").rglob("*.pt*"))


def test_what_no_one_has_foreseen_ends_no_thread_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes waited for its answers until the group's timeout, and never heard of the cause."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    source = tmp_path / "source" / "step1" / "file.pt"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"abc")
    copying = copied(tmp_path, "step1/file.pt")
    monkeypatch.setattr(NodeFiles, "read", fail)
    for number in (0, ~0):
        with pytest.raises(ElasticCkptError, match="for another node: MemoryError") as raised:
            copying._originals.read(number, 0, memoryview(bytearray(4)))
        assert raised.value.file == str(source)
    monkeypatch.setattr(Copying, "_make_alike", lambda _: (fail() for _ in "a"))
    copying.run()
    assert isinstance(copying.error, MemoryError) and copying.has_made_its_own.is_set()


def test_more_copies_than_nodes_are_told(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    replicate(memory, "step4", copies=3).wait()
    assert "0 other nodes, not 3" in caplog.text

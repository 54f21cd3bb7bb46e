"""Whatever is under the name of a file: opened if it is a regular file, or else an error that names it, at once."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import DamagedError, UnforeseenError, UnsupportedError
from elastic_ckpt.storage import local
from elastic_ckpt.storage.local import MOST_DEPTH, file_names, folder_names, open_descriptor, open_stream
from tests.nested_folders import nested
from tests.privileges import without_privileges


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


#: What is no regular file, and what an error says of it.
NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "a named pipe"),
    "a folder": (Path.mkdir, "a folder"),
    "a socket": (bind, "a socket"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "a terminal": (lambda path: path.symlink_to("/dev/ptmx"), "a device"),
    "nothing": (lambda path: None, "no such file"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "a link to what is not there"),
    "a loop of links": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, what: str) -> None:
    make, words = NO_FILES[what]
    make(tmp_path / "file")
    for _ in range(50):  # and no descriptor stays open
        with pytest.raises(DamagedError) as caught:
            open_stream(str(tmp_path / "file"))
        assert words in str(caught.value.found) and caught.value.file == str(tmp_path / "file")
    assert not any(os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)) for fd in open_descriptors())


def open_descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_files_are_read_through_links_and_wait_for_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    descriptor = open_descriptor(str(tmp_path / "link"))
    assert os.get_blocking(descriptor) and not os.get_inheritable(descriptor) and os.read(descriptor, 9) == b"bytes"
    os.close(descriptor)
    with pytest.raises(DamagedError, match="cannot be read"):
        open_stream(f"{tmp_path}/fi\0le")


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/self/pagemap", "/proc/kmsg", "/proc/self/environ"])
def test_no_file_of_the_kernels_is_waited_for(path: str, tmp_path: Path) -> None:
    """They count as regular files of no bytes, whatever can be read of them; not all machines let them be opened."""
    (tmp_path / "file").symlink_to(path)
    with contextlib.suppress(DamagedError), open_stream(str(tmp_path / "file")) as stream:
        assert stream.seek(0, os.SEEK_END) == 0
        stream.read(1 << 20)


def test_who_has_no_permission_learns_of_which_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(0)
    (tmp_path / "file").touch(0)
    with without_privileges():
        with pytest.raises(DamagedError, match="Permission denied"):
            open_stream(str(tmp_path / "file"))
        for list_names in (file_names, folder_names):
            with pytest.raises(DamagedError, match="Permission denied"):
                list_names(str(tmp_path / "folder"))


def test_folders_and_links_to_them_are_listed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name, target in {"link": "folder", "to a file": "file", "dangling": "nowhere", "loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    assert sorted(folder_names(str(tmp_path))) == ["folder", "link"]
    assert len(file_names(str(tmp_path))) == 6


def test_a_process_without_descriptors_does_not_accuse_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnforeseenError, match="descriptors"):
        open_stream(str(tmp_path / "file"))


@pytest.mark.parametrize("depth", [MOST_DEPTH, MOST_DEPTH + 1, 1500, 3000])
def test_a_walk_ends_where_folders_are_nested_deeper_than_in_a_checkpoint(tmp_path: Path, depth: int) -> None:
    unlisted = list[OSError]()
    scanned = list[str]()
    with nested(tmp_path, depth), mock.patch.object(local.os, "scandir", noted(os.scandir, scanned)):
        (tmp_path / "d" / "file").write_bytes(b"abc")
        files = list(local.walk(str(tmp_path), unlisted.append))
    assert [(path, version.nbytes) for path, version in files] == [(str(tmp_path / "d" / "file"), 3)]
    assert len(scanned) == MOST_DEPTH + 1
    assert [error.filename for error in unlisted] == (
        [str(tmp_path.joinpath(*["d"] * (MOST_DEPTH + 1)))] if depth > MOST_DEPTH else []
    )


def noted(real: Callable[[str], Any], calls: list[str]) -> Callable[[str], Any]:
    def note(path: str) -> Any:
        calls.append(path)
        return real(path)

    return note


def test_links_alone_are_followed_up_to_the_root(tmp_path: Path) -> None:
    """Whose real path the system looks up folder by folder."""
    (tmp_path / "x").mkdir()
    for number in range(20):
        (tmp_path / "x" / str(number)).mkdir()
        (tmp_path / "x" / str(number) / "file").touch()
    (tmp_path / "x" / "again").symlink_to("0")
    (tmp_path / "x" / "0" / "up").symlink_to("..")
    (tmp_path / "x" / "1" / "root").symlink_to("/")
    resolved = list[str]()
    with mock.patch.object(local.os.path, "realpath", noted(os.path.realpath, resolved)):
        files = [path for path, _ in local.walk(str(tmp_path / "x"))]
    assert files == sorted(str(tmp_path / "x" / str(number) / "file") for number in range(20))
    assert sorted(resolved) == sorted(str(tmp_path / "x" / name) for name in (".", "again", "0/up", "1/root"))


tree_names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.one_of(st.none(), st.lists(tree_names, max_size=3)),  # a file, or a link to this path from the top
    lambda inner: st.dictionaries(tree_names, inner, max_size=3),
    max_leaves=12,
)


def make(folder: Path, tree: dict[str, Any], top: Path) -> None:
    for name, inner in tree.items():
        if inner is None:
            (folder / name).write_bytes(b"x")
        elif isinstance(inner, list):
            (folder / name).symlink_to(top.joinpath(*inner))
        else:
            (folder / name).mkdir()
            make(folder / name, inner, top)


def by_the_systems_walk(folder: str) -> list[str]:
    """What Python's own walk finds, each folder once."""
    walked, top, found = set[str](), os.path.realpath(folder), list[str]()
    for inside, folders, names in os.walk(folder, followlinks=True):
        itself = os.path.realpath(inside)
        if itself in walked or top.startswith(os.path.join(itself, "")):
            folders.clear()
            continue
        walked.add(itself)
        folders.sort()
        found += [os.path.join(inside, name) for name in sorted(names)]
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(tree_names, trees, max_size=3))
def test_a_walk_finds_what_pythons_own_finds(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    top = tmp_path_factory.mktemp("tree")
    make(top, tree, top)
    assert [path for path, _ in local.walk(str(top))] == by_the_systems_walk(str(top))


def test_more_files_than_a_checkpoint_has_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        (tmp_path / str(number % 3)).mkdir(exist_ok=True)
        (tmp_path / str(number % 3) / str(number)).touch()
    monkeypatch.setattr(local, "MOST_ENTRIES", 12)
    assert len(list(local.walk(str(tmp_path)))) == 9
    monkeypatch.setattr(local, "MOST_ENTRIES", 11)
    with pytest.raises(UnsupportedError, match="more files than any checkpoint"):
        list(local.walk(str(tmp_path)))


def test_the_medium_of_a_path_that_is_too_long_is_that_of_a_folder_above(tmp_path: Path) -> None:
    assert local.medium_of(str(tmp_path / "/".join("d" * 5000))) == local.medium_of(str(tmp_path))

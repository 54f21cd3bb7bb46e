"""Whatever is under the name of a file: opened if it is a regular file, or else an error that names it, at once."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ckpt.errors import DamagedError, UnforeseenError
from elastic_ckpt.storage.listing import file_names, folder_names
from elastic_ckpt.storage.local import Version, open_descriptor, open_stream, version_of
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


def test_a_file_that_is_gone_has_a_version_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert version_of(str(path)) == Version(0, 0, 0)
    path.touch()
    assert version_of(str(path)) == Version.of(path.stat())


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


def test_a_process_without_descriptors_does_not_accuse_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnforeseenError, match="descriptors"):
        open_stream(str(tmp_path / "file"))

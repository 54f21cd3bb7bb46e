"""Files that are replaced, rewritten, cut or removed while they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ckpt.errors import DamagedError, SavedOverError, UnforeseenError
from elastic_ckpt.storage.local import look_again, moved, open_stream, pinned, steady

Change = Callable[[Path], None]


def replace_by_rename(path: Path) -> None:
    """Another file of the same size and time."""
    other = path.with_name("other")
    other.write_bytes(b"NEW")
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def rewrite(path: Path) -> None:
    path.write_bytes(b"NEW")
    os.utime(path, ns=(0, 5))


def cut(path: Path) -> None:
    """In place, and the time set back, as some copying does."""
    before = path.stat()
    os.truncate(path, 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange_folders(path: Path) -> None:
    path.parent.rename(path.parent.with_name("old"))
    path.parent.mkdir()
    path.write_bytes(b"old")


CHANGES: list[Change] = [replace_by_rename, rewrite, cut, exchange_folders]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tag" / "file"
    path.parent.mkdir()
    path.write_bytes(b"old")
    return path


def touch(path: Path) -> None:
    open_stream(str(path)).close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_moved_is_noticed_when_it_is_opened_again_and_at_the_end(path: Path, change: Change) -> None:
    with pinned():
        touch(path)
        touch(path)
        look_again()
        look_again(reopen=False)
        change(path)
        for look in (lambda: touch(path), look_again, lambda: look_again(reopen=False)):
            with pytest.raises(SavedOverError, match="overwritten while it was being loaded") as caught:
                look()
            assert caught.value.file == str(path)
        assert moved() is not None
    touch(path)
    look_again()  # of no load


def test_a_file_that_is_gone_has_moved(path: Path) -> None:
    with pytest.raises(SavedOverError) as caught, steady():
        touch(path)
        path.unlink()
        touch(path)
    assert isinstance(caught.value.__cause__, DamagedError)
    assert caught.value.found == "No such file or directory"


def test_a_load_within_another_has_pins_of_its_own(path: Path) -> None:
    with pinned():
        touch(path)
        rewrite(path)
        with steady():
            touch(path)
        with pytest.raises(SavedOverError):
            look_again()


def test_a_process_without_descriptors_cannot_tell_whether_files_moved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used_up(*_: object) -> int:
        raise OSError(errno.EMFILE, "used up")

    with pinned():
        touch(path)
        monkeypatch.setattr(os, "open", used_up)
        assert moved() is None
        with pytest.raises(UnforeseenError):
            look_again()

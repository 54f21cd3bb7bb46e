"""Opens files of local and network file systems, and lists folders.

A folder may have anything under the name of a file: a pipe, on which ``open`` waits for ever, a device, a loop of
links. So a file is opened without waiting, and looked at once it is open: nothing can take its place in between.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from elastic_ckpt.errors import DamagedError, refuse_used_up
from elastic_ckpt.storage.pins import see

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MISSING = (errno.ENOENT, errno.ENOTDIR)


def open_descriptor(path: str) -> int:
    """A descriptor for reading a checkpoint's file, to be closed by the caller.

    Raises :class:`DamagedError` for what is no regular file, cannot be opened, or has moved (:mod:`.pins`).
    """
    with named_os_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = (status := os.fstat(descriptor)).st_mode
        if not stat.S_ISREG(mode):
            raise _unusable(path, _KINDS.get(stat.S_IFMT(mode), "no regular file"))
        see(path, status)
    except DamagedError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def open_stream(path: str, buffering: int = -1) -> BinaryIO:
    """A checkpoint's file, open for reading; errors as of :func:`open_descriptor`."""
    return open(open_descriptor(path), "rb", buffering=buffering)


def file_names(folder: str) -> list[str]:
    """The names of all that is in a folder; :class:`DamagedError` if it cannot be listed."""
    with named_os_errors(folder, "folder"):
        return os.listdir(folder)


def folder_names(folder: str) -> list[str]:
    """The names of the folders in a folder, and of links to folders; :class:`DamagedError` if it cannot be listed."""
    with named_os_errors(folder, "folder"), os.scandir(folder) as entries:
        return [entry.name for entry in entries if _is_folder(entry)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


@contextmanager
def named_os_errors(path: str, what: str = "file") -> Iterator[None]:
    """Raises what the system says about a file, or a folder, as a :class:`DamagedError` that names it."""
    try:
        yield
    except OSError as error:
        refuse_used_up(error, path)
        if error.errno == errno.ENXIO:  # of a socket, which cannot be opened at all
            raise _unusable(path, _KINDS[stat.S_IFSOCK]) from error
        if error.errno not in _MISSING:
            raise _unusable(path, f"{type(error).__name__}: {error.strerror}", what) from error
        found = "a link to what is not there" if os.path.islink(path) else f"no such {what}"
        problem, expected = f"a {what} of the checkpoint is missing", f"a {what}, visible on every rank"
        remedy = "restore it, take another tag, or put the checkpoint on storage that all nodes share"
        raise DamagedError(problem, path, expected, found, remedy=remedy) from error
    except ValueError as error:  # a null character in a name, or text that is not UTF-8
        raise _unusable(path, str(error)) from error


def _unusable(path: str, found: str, what: str = "file") -> DamagedError:
    expected = f"a {'regular file' if what == 'file' else what} that this process may read"
    remedy = "restore it or its permissions, or take another tag"
    return DamagedError(f"a {what} of the checkpoint cannot be read", path, expected, found, remedy=remedy)

"""Opens files of local and network file systems, and pins what it opens.

A folder may have anything under the name of a file: a pipe, on which ``open`` waits for ever, a device, a loop of
links. So a file is opened without waiting, and looked at once it is open: nothing can take its place in between.

Each file must stay the one that was first looked at until all is read. A process compares what it sees with what it saw
itself, never with what other ranks see: nodes may have copies of their own, and file systems of user space number files
differently on each.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from elastic_ckpt.errors import (
    ANOTHER_TAG,
    DamagedError,
    ElasticCkptError,
    Remedy,
    SavedOverError,
    UnforeseenError,
    refuse_used_up,
)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: Most that is read of a file at a time, where less is asked for.
_MOST_BUFFERED_NBYTES = 1 << 16
_MISSING = (errno.ENOENT, errno.ENOTDIR)


def open_descriptor(path: str) -> int:
    """A descriptor for reading a file, to be closed by the caller; :class:`DamagedError` if it is not usable."""
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
    if status.st_size:  # some of the kernel's own files, which have none, wait for what is not there yet
        os.set_blocking(descriptor, True)
    return descriptor


def open_stream(path: str) -> BinaryIO:
    """A checkpoint's file, open for reading; errors as of :func:`open_descriptor`, when it is read, too."""
    descriptor = open_descriptor(path)
    block_nbytes = os.fstat(descriptor).st_blksize  # a MiB on NFS, more than most parts of a file are long
    nbytes = min(max(block_nbytes, io.DEFAULT_BUFFER_SIZE), _MOST_BUFFERED_NBYTES)
    return io.BufferedReader(_File(descriptor, path), nbytes)


class _File(io.FileIO):
    """A raw file that fails by its name."""

    def __init__(self, descriptor: int, path: str) -> None:
        super().__init__(descriptor)
        self._path = path

    def readinto(self, buffer: Any) -> int:
        with named_os_errors(self._path):
            return _again_if_stale(self._path, self.fileno(), lambda: super(_File, self).readinto(buffer) or 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with named_os_errors(self._path):  # those of the kernel's own, as /proc/self/mem, may have no end
            return super().seek(offset, whence)


def _again_if_stale(path: str, descriptor: int, read: Callable[[], int]) -> int:
    """What ``read`` returns; where an NFS server has forgotten the handle, the file is opened anew, once.

    It must still be the one that was pinned.
    """
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    renewed = open_descriptor(path)
    os.lseek(renewed, position, os.SEEK_SET)
    os.dup2(renewed, descriptor, inheritable=False)
    os.close(renewed)
    return read()


def first_bytes(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The buffers up to a number of bytes; the last may be cut short."""
    found = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        found.append(buffer[:nbytes])
        nbytes -= len(buffer)
    return found


@contextmanager
def made_whole(path: str, mtime_ns: int | None = None, folder: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which gets its name (and time) once the body has ended, and is removed if that fails.

    ``folder``: the descriptor of the folder that ``path`` is a name in, whatever is under the folder's own name by now.
    """
    partial_path = f"{path}.{secrets.token_hex(4)}.partial"

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=folder)

    try:
        with open(partial_path, "xb", opener=opener) as stream:  # never through a link that was there
            yield stream
        if mtime_ns is not None:
            os.utime(partial_path, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=folder is None)
        os.replace(partial_path, path, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(OSError):  # it has its name
            os.unlink(partial_path, dir_fd=folder)


class LocalRanges:
    """A file of which ``preadv`` reads ranges."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = open_descriptor(path)

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers in order; the kernel may fill fewer than are given."""
        read = partial(os.preadv, self._descriptor, buffers, byte_offset)
        return _again_if_stale(self._path, self._descriptor, read)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def version_of(path: str) -> Version:
    """The version of a file; zeros if it is gone, or a link to nothing."""
    try:
        return Version.of(os.stat(path))
    except OSError:
        return Version(0, 0, 0)


# See :class:`elastic_ckpt.storage.Store`, which this module is, together with that of listings.
open_ranges = LocalRanges
exists = os.path.lexists
is_folder = os.path.isdir
is_link = os.path.islink


def modified(path: str) -> float:
    """Seconds after 1970 at which a file or folder was written; 0 if it is gone."""
    return version_of(path).mtime_ns / 1e9


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
        problem = f"a {what} of the checkpoint is missing"
        expected = f"a {what}, visible on every rank"
        remedy = Remedy("restore it"), ANOTHER_TAG, Remedy("put the checkpoint on storage that all nodes share")
        raise DamagedError(problem, path, expected, found, remedy=remedy) from error
    except ValueError as error:  # a null character in a name, or text that is not UTF-8
        raise _unusable(path, str(error)) from error


def _unusable(path: str, found: str, what: str = "file") -> DamagedError:
    expected = f"a {'regular file' if what == 'file' else what} that this process may read"
    remedy = Remedy("restore it or its permissions"), ANOTHER_TAG
    return DamagedError(f"a {what} of the checkpoint cannot be read", path, expected, found, remedy=remedy)


class Version(NamedTuple):
    """What tells a file from the one that was there before, or from itself before it was written again."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Version:
        """The version that ``os.stat`` or ``os.fstat`` shows."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes written {self.mtime_ns / 1e9:.9f} s after 1970 (inode {self.inode})"


#: By path, what the load that runs in this context has seen; a thread that works for it sets the same.
PINS: ContextVar[dict[str, Version] | None] = ContextVar("pins", default=None)


@contextmanager
def pinned(pins: dict[str, Version] | None = None) -> Iterator[None]:
    """Pins each file that the body opens, in a mapping that others may add to."""
    token = PINS.set({} if pins is None else pins)
    try:
        yield
    finally:
        PINS.reset(token)


def see(path: str, status: os.stat_result) -> None:
    """Pin a file that was opened, or compare it with its pin; :class:`SavedOverError` if it is another one."""
    pins = PINS.get()
    if pins is not None and (first := pins.setdefault(path, now := Version.of(status))) != now:
        raise saved_over(path, first, now)


def look_again(reopen: bool = True) -> None:
    """Compare all files with their pins; :class:`SavedOverError` if some file is gone, or another one.

    Without ``reopen``, a network file system may answer from its cache.
    """
    for path, first in (PINS.get() or {}).items():
        try:
            if reopen:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            now = Version.of(os.stat(path))
        except OSError as error:
            refuse_used_up(error, path)
            raise saved_over(path, first, error.strerror) from error
        if now != first:
            raise saved_over(path, first, now)


def moved() -> SavedOverError | None:
    """The error of :func:`look_again`; ``None`` if nothing moved, or this process can no longer look."""
    try:
        with suppress(UnforeseenError):  # its own: descriptors or memory are used up
            look_again()
    except SavedOverError as error:
        return error
    return None


@contextmanager
def steady() -> Iterator[None]:
    """:func:`pinned`, for a body without collectives: :class:`SavedOverError` if a file moved, even if it fails."""
    with pinned():
        try:
            yield
        except ElasticCkptError as error:
            if (why := moved()) is not None:
                raise why from error
            raise
        look_again()


def saved_over(path: str, first: object, now: object) -> SavedOverError:
    """The error for a file that is another one by now. ``first``, ``now``: what was there and what is."""
    problem = "the checkpoint was overwritten while it was being loaded"
    waits = Remedy("loads again once that save has ended", config={"wait_for_files": 600})
    remedy = waits, Remedy("save each time under a new tag")
    expected = f"{first}, as when it was first opened"
    return SavedOverError(problem, path, expected, now, remedy=remedy)

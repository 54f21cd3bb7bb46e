"""Opens files of local and network file systems, lists folders, and pins what it opens.

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
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from elastic_ckpt.errors import (
    ANOTHER_TAG,
    DamagedError,
    ElasticCkptError,
    Remedy,
    SavedOverError,
    UnforeseenError,
    UnsupportedError,
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
#: Folders below a tag that are looked into: those of DeepSpeed's files are nested in five at most. And all entries.
MOST_DEPTH = 32
MOST_ENTRIES = 10_000_000
#: Types of file systems, as the kernel names them: those on which a read waits for a server, and known ones that are
#: not of these.
_NETWORK = re.compile(r"nfs\d?|lustre|gpfs|ceph|beegfs\w*|cifs|smb\d?|9p|afs|wekafs|panfs|dvs|virtiofs|fuse(\..*)?")
_LOCAL = re.compile(r"ext\d|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|ramfs|overlay|fuseblk")


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
def made_whole(path: str, mtime_ns: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which gets its name (and time) once the body has ended, and is removed if that fails."""
    partial_path = f"{path}.{secrets.token_hex(4)}.partial"
    try:
        with open(partial_path, "xb") as stream:  # never through a link that was there
            yield stream
        if mtime_ns is not None:
            os.utime(partial_path, ns=(mtime_ns, mtime_ns))
        os.replace(partial_path, path)
    finally:
        with suppress(OSError):  # it has its name
            os.unlink(partial_path)


class LocalRanges:
    """A file of which ``preadv`` reads ranges."""

    def __init__(self, path: str) -> None:
        self._path, self._descriptor = path, open_descriptor(path)

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers in order; the kernel may fill fewer than are given."""
        read = partial(os.preadv, self._descriptor, buffers, byte_offset)
        return _again_if_stale(self._path, self._descriptor, read)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def walk(folder: str, on_error: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, Version]]:
    """Every file below a folder, with its version. Links are followed.

    ``on_error`` is given what cannot be listed, and folders that are nested too deep, which are not looked into: no
    checkpoint has such. Raises :class:`UnsupportedError` for more files and folders than a checkpoint has.
    """
    top = os.path.realpath(folder)
    walked = set[str]()
    waiting = [_Folder(folder, top, 0)]
    entries = 0
    while waiting:
        inside = waiting.pop()
        if inside.itself in walked or top.startswith(os.path.join(inside.itself, "")):
            continue  # links may form a circle, or lead far up
        try:
            if inside.depth > MOST_DEPTH:
                raise OSError(errno.ENAMETOOLONG, f"nested in more than {MOST_DEPTH} folders", inside.path)
            names, folders = _listed(inside)
        except OSError as error:
            if on_error is not None:
                on_error(error)
            continue
        walked.add(inside.itself)
        entries += len(names) + len(folders)
        if entries > MOST_ENTRIES:
            problem, expected = "this folder has more files than any checkpoint", f"at most {MOST_ENTRIES} below it"
            raise UnsupportedError(
                problem, folder, expected, f"{entries} and more", remedy="move what is no part of it"
            )
        yield from ((path, version_of(path)) for path in (os.path.join(inside.path, name) for name in sorted(names)))
        waiting += sorted(folders, reverse=True)


class _Folder(NamedTuple):
    """A folder to walk through."""

    path: str  # as it was reached
    itself: str  # its path without links
    depth: int  # folders between it and the first


def _listed(folder: _Folder) -> tuple[list[str], list[_Folder]]:
    """The names of files in a folder, and the folders in it; OSError if it cannot be listed."""
    names: list[str] = []
    folders: list[_Folder] = []
    with os.scandir(folder.path) as entries:
        for entry in entries:
            try:
                is_folder, is_link = entry.is_dir(), entry.is_symlink()
            except OSError:  # a loop of links
                is_folder = is_link = False
            if not is_folder:
                names.append(entry.name)
                continue
            # of a link alone: each looks at all the folders above
            itself = os.path.realpath(entry.path) if is_link else os.path.join(folder.itself, entry.name)
            folders.append(_Folder(entry.path, itself, folder.depth + 1))
    return names, folders


def version_of(path: str) -> Version:
    """The version of a file; zeros if it is gone, or a link to nothing."""
    try:
        return Version.of(os.stat(path))
    except OSError:
        return Version(0, 0, 0)


#: See :class:`elastic_ckpt.storage.Store`, which this module is.
open_ranges, exists, is_folder, is_link = LocalRanges, os.path.lexists, os.path.isdir, os.path.islink


def modified(path: str) -> float:
    """Seconds after 1970 at which a file or folder was written; 0 if it is gone."""
    return version_of(path).mtime_ns / 1e9


def file_names(folder: str) -> list[str]:
    """The names of all that is in a folder; :class:`DamagedError` if it cannot be listed."""
    with named_os_errors(folder, "folder"):
        return os.listdir(folder)


def folder_names(folder: str) -> list[str]:
    """The names of the folders in a folder, and of links to folders; :class:`DamagedError` if it cannot be listed."""
    with named_os_errors(folder, "folder"), os.scandir(folder) as entries:
        # unlike its entry's is_dir, isdir takes a loop of links
        return [each.name for each in entries if (os.path.isdir(each.path) if each.is_symlink() else each.is_dir())]


class Medium(NamedTuple):
    """Where files are. The greatest of the media that ranks see is that of the job: a network's, if any is."""

    kind: Literal["local", "network"]
    name: str  # of the type of file system

    def __str__(self) -> str:
        return f"{self.kind} ({self.name})"


UNKNOWN, OBJECT_STORE = Medium("local", "unknown"), Medium("network", "object store")


def medium_of(path: str) -> Medium:
    """Where a file or folder is; of one that is not there, where it would be."""
    path = os.path.abspath(path)
    while True:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            if (parent := os.path.dirname(path)) == path:
                return UNKNOWN
            path = parent
        else:
            break
    try:
        about, mounts = (Path(f"/proc/self/{name}").read_bytes() for name in (f"fdinfo/{descriptor}", "mountinfo"))
    except OSError:
        return UNKNOWN
    finally:
        os.close(descriptor)
    mount = re.search(rb"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    return medium_in(mounts.decode(errors="replace"), "" if mount is None else mount[1].decode())


def medium_in(mounts: str, mount: str) -> Medium:
    """The medium of a mount, by its number in the text of ``/proc/self/mountinfo``."""
    of_each = (line.partition(" - ") for line in mounts.split("\n"))
    name = next((about.split(" ")[0] for place, _, about in of_each if about and place.split(" ")[0] == mount), None)
    if name is None:
        return UNKNOWN
    if _NETWORK.fullmatch(name):
        return Medium("network", name)
    return Medium("local", name if _LOCAL.fullmatch(name) else f"{name}, taken for a disk")


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
        raise _saved_over(path, first, now)


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
            raise _saved_over(path, first, error.strerror) from error
        if now != first:
            raise _saved_over(path, first, now)


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


def _saved_over(path: str, first: Version, now: object) -> SavedOverError:
    problem = "the checkpoint was saved over while it was being loaded"
    waits = Remedy("loads again once that save has ended", config={"wait_for_files": 600})
    remedy = waits, Remedy("save under a tag of its own each time")
    expected = f"{first}, as when it was first opened"
    return SavedOverError(problem, path, expected, now, remedy=remedy)

"""Lists folders of local and network file systems, in a bounded number of entries.

A checkpoint's folder is untrusted, too: it may have millions of entries, and links that lead to folders of others, or
in circles. Links to folders are followed, since users keep parts of a run on other disks, but for those that lead up to
a folder around them, or into the kernel's own file systems.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.storage.local import Version, named_os_errors, version_of
from elastic_ckpt.storage.media import medium_of

#: Folders below a tag that are looked into: those of DeepSpeed's files are nested in five at most.
MOST_DEPTH = 32
#: Entries of one folder, and of a tag's folder with all that is below it: as many as objects of a bucket's listing.
MOST_ENTRIES = 1 << 20
#: Entries of all folders that one search lists, such as those of a run's tags.
MOST_SEARCHED = 1 << 22
#: For how many entries of a search a link to a folder counts: the system looks at each folder on its way.
_WEIGHT_OF_LINK = 16
#: File systems in which there are no checkpoints, but any number of files.
_KERNELS = frozenset({"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs"})


@dataclass
class EntryCount:
    """The entries seen so far of a folder that may have so many."""

    folder: str
    most: int
    entries: int = 0

    def add(self, entries: int) -> None:
        """Raise :class:`UnsupportedError` for one too many."""
        self.entries += entries
        self.refuse_if_used_up()

    def refuse_if_used_up(self) -> None:
        """Raise it also where an earlier one was caught."""
        if self.entries > self.most:
            problem = "this folder has more files than any checkpoint"
            expected = f"at most {self.most} below it"
            found = f"{self.entries} and more"
            remedy = "move what is no part of it, or give the folder of one tag"
            raise UnsupportedError(problem, self.folder, expected, found, remedy=remedy)


_SEARCH: ContextVar[EntryCount | None] = ContextVar("search", default=None)


@contextmanager
def search(folder: str) -> Iterator[EntryCount]:
    """Bounds the entries of all folders that the body lists; a search within another is a part of that."""
    count = _SEARCH.get() or EntryCount(folder, MOST_SEARCHED)
    token = _SEARCH.set(count)
    try:
        yield count
    finally:
        _SEARCH.reset(token)


def file_names(folder: str) -> list[str]:
    """The names of all that is in a folder.

    :class:`DamagedError` if it cannot be listed, :class:`UnsupportedError` if it has too many.
    """
    with named_os_errors(folder, "folder"):
        return [entry.name for entry in _entries(folder)]


def folder_names(folder: str) -> list[str]:
    """The names of the folders in a folder, and of links to folders, but for those that lead up; errors as above."""
    names = list[str]()
    with named_os_errors(folder, "folder"):
        above = os.path.realpath(folder)
        for entry in _entries(folder):
            if not entry.is_symlink():
                is_folder = entry.is_dir()
            else:
                if (count := _SEARCH.get()) is not None:
                    count.add(_WEIGHT_OF_LINK)
                # unlike its entry's is_dir, isdir takes a loop of links
                is_folder = os.path.isdir(entry.path) and not _leads_up(os.path.realpath(entry.path), above)
            if is_folder:
                names.append(entry.name)
    return names


def _leads_up(itself: str, below: str) -> bool:
    """Whether a folder, by its path without links, is another one or around it."""
    return os.path.join(below, "").startswith(os.path.join(itself, ""))


def _entries(folder: str, of_walk: EntryCount | None = None) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder, which are counted."""
    counts = [of_walk or EntryCount(folder, MOST_ENTRIES)]
    if (of_search := _SEARCH.get()) is not None:
        counts.append(of_search)
    with os.scandir(folder) as entries:
        for entry in entries:
            for count in counts:
                count.add(1)
            yield entry


class _Folder(NamedTuple):
    """A folder to walk through."""

    path: str  # as it was reached
    itself: str  # its path without links
    depth: int  # folders between it and the first


def walk(folder: str, on_error: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, Version]]:
    """Every file below a folder, with its version. Links are followed.

    ``on_error`` is given what is not looked into: what cannot be listed, and what no checkpoint has, folders that are
    nested too deep, and links to the kernel's own. Raises :class:`UnsupportedError` for more files and folders than a
    checkpoint has.
    """
    top = os.path.realpath(folder)
    walked = set[str]()
    waiting = [_Folder(folder, top, 0)]
    count = EntryCount(folder, MOST_ENTRIES)
    while waiting:
        inside = waiting.pop()
        if inside.itself in walked or (inside.depth and _leads_up(inside.itself, top)):
            continue  # links may form a circle, or lead far up
        try:
            _refuse_foreign(inside, top)
            names, folders = _listed(inside, count)
        except OSError as error:
            if on_error is not None:
                on_error(error)
            continue
        walked.add(inside.itself)
        yield from ((path, version_of(path)) for path in (os.path.join(inside.path, name) for name in sorted(names)))
        waiting += sorted(folders, reverse=True)


def _refuse_foreign(folder: _Folder, top: str) -> None:
    """Raise OSError for a folder that no checkpoint has."""
    if folder.depth > MOST_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"nested in more than {MOST_DEPTH} folders", folder.path)
    if not folder.itself.startswith(os.path.join(top, "")) and folder.itself != top:
        name = medium_of(folder.path).name.partition(",")[0]
        if name in _KERNELS:
            raise OSError(errno.EXDEV, f"a link to the kernel's own file system {name}", folder.path)


def _listed(folder: _Folder, count: EntryCount) -> tuple[list[str], list[_Folder]]:
    """The names of files in a folder, and the folders in it; OSError if it cannot be listed."""
    names: list[str] = []
    folders: list[_Folder] = []
    for entry in _entries(folder.path, count):
        try:
            is_folder = entry.is_dir()
            is_link = entry.is_symlink()
        except OSError:  # a loop of links
            is_folder = is_link = False
        if not is_folder:
            names.append(entry.name)
            continue
        # of a link alone: each looks at all the folders above
        itself = os.path.realpath(entry.path) if is_link else os.path.join(folder.itself, entry.name)
        folders.append(_Folder(entry.path, itself, folder.depth + 1))
    return names, folders

"""Folders that are opened once and used by descriptor, so that no link that takes their place leads elsewhere.

A path is looked up again by each call, so that a look at it says nothing about the next one. Here a folder is opened
part by part, through no link, and names of files are looked up in what was opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.storage.local import Version

_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenedFolder(NamedTuple):
    """A folder that is open, and the path by which it was opened."""

    path: str
    descriptor: int


@contextmanager
def opened_root(path: str) -> Iterator[OpenedFolder]:
    """The folder at a path, whose links are followed."""
    descriptor = os.open(path, _OPENED)
    try:
        yield OpenedFolder(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened_below(root: OpenedFolder, name: str, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``name`` below ``root``; :class:`ConfigError` if a part of it is a link.

    ``make``: make what is not there. ``name`` may be empty: ``root`` itself.
    """
    descriptor = os.dup(root.descriptor)
    path = root.path
    try:
        for part in filter(None, name.split(os.sep)):
            path = os.path.join(path, part)
            if part in (os.curdir, os.pardir):
                raise ConfigError("a folder is not below the one that it is to be in", path)
            inner = _opened(descriptor, part, path, make)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(folder: int, part: str, path: str, make: bool) -> int:
    """A descriptor of a folder in another one; ``path``: for errors alone."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=folder)
    try:
        return os.open(part, _OPENED | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        if not is_link_in(folder, part):
            raise
    raise ConfigError("replicate does not follow links", path, "a folder", "a link", remedy="remove it")


def version_in(folder: int, name: str) -> Version:
    """The version of a file in an opened folder, or of the link there; zeros if there is none."""
    try:
        return Version.of(os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError:
        return Version(0, 0, 0)


def is_link_in(folder: int, name: str) -> bool:
    """Whether a name in an opened folder is that of a link."""
    return _has_kind(folder, name, stat.S_IFLNK)


def is_folder_in(folder: int, name: str) -> bool:
    """Whether a name in an opened folder is that of a folder, and not of a link to one."""
    return _has_kind(folder, name, stat.S_IFDIR)


def _has_kind(folder: int, name: str, kind: int) -> bool:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) == kind
    except OSError:
        return False


def remove_in(folder: int, name: str) -> None:
    """Remove what has a name in an opened folder, if anything has: of a link, the link alone."""
    if not is_folder_in(folder, name):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return
    # not shutil.rmtree, whose dir_fd Python 3.10 lacks; links are among the folders' names
    for _, folders, files, inside in os.fwalk(name, topdown=False, dir_fd=folder):
        for each in files:
            os.unlink(each, dir_fd=inside)
        for each in folders:
            if is_folder_in(inside, each):
                os.rmdir(each, dir_fd=inside)
            else:
                os.unlink(each, dir_fd=inside)
    os.rmdir(name, dir_fd=folder)

"""The one door to a checkpoint's bytes: lists folders, opens files and reads ranges, wherever they are.

Everything else has paths and asks here. A path is that of a file which this process sees, unless a view is in place
(:mod:`elastic_ckpt.storage.view`): below the view's root, files of several folders and nodes are seen as one folder's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import BinaryIO, Literal, NamedTuple, Protocol

from elastic_ckpt.report import Requests
from elastic_ckpt.storage import local


class Entry(NamedTuple):
    """A file in a listing of a folder."""

    name: str  # path relative to the folder
    nbytes: int
    mtime_ns: int
    version: str = ""  # of an object in a store: it is another one once it was overwritten


class Ranges(Protocol):
    """An open file of which ranges are read, by one thread at a time."""

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers in order, as ``preadv`` does, and return how many bytes; 0 at the end of the file."""

    def close(self) -> None:
        """Close the file."""


class Store(Protocol):
    """What has folders and files. Each function raises :class:`DamagedError` that names what cannot be read."""

    def open_stream(self, path: str) -> BinaryIO:
        """A file, open for reading; it can be sought."""

    def open_ranges(self, path: str) -> Ranges:
        """A file, open for reads into live memory."""

    def file_names(self, folder: str) -> list[str]:
        """The names of all that is in a folder."""

    def folder_names(self, folder: str) -> list[str]:
        """The names of the folders in a folder, and of links to folders."""

    def exists(self, path: str) -> bool:
        """Whether something has this path, be it a link to what is not there."""

    def is_folder(self, path: str) -> bool:
        """Whether it is a folder, or a link to one."""

    def modified(self, path: str) -> float:
        """Seconds after 1970 at which it was written; 0 if it is gone."""

    def walk(self, folder: str) -> Iterator[tuple[str, local.Version]]:
        """Every file below a folder, with its version."""


class View(Store, Protocol):
    """A store of all that is below one folder."""

    root: str
    outer: View | None  # that was in place when this was made, which paths elsewhere are looked up in
    notes: list[str]  # what a user should know of the files that were opened so far

    @property
    def requests(self) -> Requests | None:
        """What this process has asked of object stores; ``None`` if no folder is in one."""

    def copies_of(self, path: str) -> list[str]:
        """See :func:`copies_of`."""

    def compare_copies(self, paths: Iterable[str]) -> None:
        """Look at some files; :class:`ConflictingCopiesError` for one of which copies differ."""

    def summary(self, folder: str) -> str:
        """How many files of a folder are where."""


#: The view that this context reads through; a thread that works for it sets the same.
VIEW: ContextVar[View | None] = ContextVar("view", default=None)


@contextmanager
def seen_through(view: View | None) -> Iterator[None]:
    """Puts a view in place while the body runs; ``None``: only what this process sees itself."""
    token = VIEW.set(view)
    try:
        yield
    finally:
        VIEW.reset(token)


def inherited() -> tuple[Callable[[], None], tuple[()]]:
    """Initializer and arguments for a pool of threads that read as this context does."""
    view, pins = VIEW.get(), local.PINS.get()

    def inherit() -> None:
        VIEW.set(view)
        local.PINS.set(pins)

    return inherit, ()


def _store_of(path: str) -> Store:
    return _view_of(path) or local


def _view_of(path: str) -> View | None:
    view = VIEW.get()
    while view is not None:
        path = absolute(path)
        if path == view.root or path.startswith(view.root.rstrip(os.sep) + os.sep):
            return view
        view = view.outer
    return None


def is_url(path: str) -> bool:
    """Whether a path is that of an object store (``s3://bucket/run``)."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def absolute(path: str) -> str:
    """``os.path.abspath``, also of a URL."""
    if not is_url(path):
        return os.path.abspath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}"


def open_stream(path: str) -> BinaryIO:
    """See :meth:`Store.open_stream`."""
    return _store_of(path).open_stream(path)


def open_ranges(path: str) -> Ranges:
    """See :meth:`Store.open_ranges`."""
    return _store_of(path).open_ranges(path)


def file_names(folder: str) -> list[str]:
    """See :meth:`Store.file_names`."""
    return _store_of(folder).file_names(folder)


def folder_names(folder: str) -> list[str]:
    """See :meth:`Store.folder_names`."""
    return _store_of(folder).folder_names(folder)


def exists(path: str) -> bool:
    """See :meth:`Store.exists`."""
    return _store_of(path).exists(path)


def is_folder(path: str) -> bool:
    """See :meth:`Store.is_folder`."""
    return _store_of(path).is_folder(path)


def modified(path: str) -> float:
    """See :meth:`Store.modified`."""
    return _store_of(path).modified(path)


def walk(folder: str) -> Iterator[tuple[str, local.Version]]:
    """See :meth:`Store.walk`."""
    return _store_of(folder).walk(folder)


def copies_of(path: str) -> list[str]:
    """Where a file really is: the path of the copy that is read, then of others; the path itself if it has none."""
    view = _view_of(path)
    return [path] if view is None else view.copies_of(path)


def medium_of(path: str, asked: Literal["auto", "local", "network"]) -> local.Medium:
    """Where a file or folder is: behind a network if it is in an object store, else as asked, or as the system says."""
    view = _view_of(path)
    if view is not None and view.requests is not None:
        return local.OBJECT_STORE
    return local.medium_of(path) if asked == "auto" else local.Medium(asked, "as configured")


def size_of(stream: BinaryIO) -> int:
    """The bytes of an open file; its position stays."""
    position = stream.tell()
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(position)
    return nbytes

"""The one door to a checkpoint's bytes: lists folders, opens files and reads ranges, wherever they are.

Everything else has paths and asks here. A path is that of a file which this process sees, unless a view is in place
(:mod:`elastic_ckpt.storage.view`): below the view's root, files of several folders and nodes are seen as one folder's.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Protocol, TypeVar

from elastic_ckpt.storage import listing, local, media

if TYPE_CHECKING:
    from elastic_ckpt.storage.view import FolderView

T = TypeVar("T")


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


class PartStream(io.RawIOBase):
    """So many bytes, which ``read`` puts into memory from an offset on, as a raw stream."""

    def __init__(self, read: Callable[[memoryview, int], int], nbytes: int) -> None:
        self._read = read
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._at, 0)]
        count = self._read(view, self._at) if view else 0
        self._at += count
        return count


#: The view that this context reads through; a thread that works for it sets the same.
VIEW: ContextVar[FolderView | None] = ContextVar("view", default=None)


@contextmanager
def seen_through(view: FolderView | None) -> Iterator[None]:
    """Puts a view in place while the body runs; ``None``: only what this process sees itself."""
    token = VIEW.set(view)
    try:
        yield
    finally:
        VIEW.reset(token)


def inherited() -> tuple[Callable[[], None], tuple[()]]:
    """Initializer and arguments for a pool of threads that read as this context does."""
    view = VIEW.get()
    pins = local.PINS.get()

    def inherit() -> None:
        VIEW.set(view)
        local.PINS.set(pins)

    return inherit, ()


def _view_of(path: str) -> FolderView | None:
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


def was_url(path: PurePath) -> bool:
    """Whether it is a URL that was taken for the path of a folder, which would get a folder ``s3:``."""
    return any(re.fullmatch(r"(s3a?|gs|az|abfss?|https?):", part) for part in path.parts)


def absolute(path: str) -> str:
    """``os.path.abspath``, also of a URL."""
    if not is_url(path):
        return os.path.abspath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}"


def _of_store(method: Callable[[Any, str], T], here: Any = local) -> Callable[[str], T]:
    """A method of :class:`Store` as a function of a path: of the view that it is in, or of what this process sees."""
    return lambda path: getattr(_view_of(path) or here, method.__name__)(path)


open_stream = _of_store(Store.open_stream)
open_ranges = _of_store(Store.open_ranges)
file_names = _of_store(Store.file_names, listing)
folder_names = _of_store(Store.folder_names, listing)
exists = _of_store(Store.exists)
is_folder = _of_store(Store.is_folder)
modified = _of_store(Store.modified)


def walk(folder: str, on_error: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, local.Version]]:
    """Every file below a folder, with its version; ``on_error`` as of ``listing.walk``, where there is no view."""
    view = _view_of(folder)
    return listing.walk(folder, on_error) if view is None else view.walk(folder)


def readers_of(path: str) -> Sequence[int] | None:
    """The ranks of the job that see a file themselves; ``None``: all do. The same on all ranks."""
    view = _view_of(path)
    return None if view is None else view.readers(path)


def holder_of(path: str) -> tuple[int, int] | None:
    """The rank that reads a file for this one, and the file's number on its node; ``None``: this one sees it."""
    view = _view_of(path)
    return None if view is None else view.holder_of(path)


def copies_of(path: str) -> list[str]:
    """Where a file really is: the path of the copy that is read, then of others; the path itself if it has none."""
    view = _view_of(path)
    return [path] if view is None else view.copies_of(path)


def medium_of(path: str, asked: Literal["auto", "local", "network"]) -> media.Medium:
    """Where a file or folder is: behind a network if it is in an object store, else as asked, or as the system says."""
    view = _view_of(path)
    if view is not None and view.requests is not None:
        return media.OBJECT_STORE
    return media.medium_of(path) if asked == "auto" else media.Medium(asked, "as configured")


def size_of(stream: BinaryIO) -> int:
    """The bytes of an open file; its position stays."""
    position = stream.tell()
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(position)
    return nbytes

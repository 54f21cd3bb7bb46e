"""Pins the files of a checkpoint: each must stay the file that was first looked at until all is read.

A process compares what it sees with what it saw itself, never with what other ranks see: nodes may have copies of their
own, and file systems of user space number files differently on each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from elastic_ckpt.errors import ElasticCkptError, SavedOverError, UnforeseenError, refuse_used_up


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


#: By path, what the load that runs in this context has seen.
Pins = dict[str, Version]
_current: ContextVar[Pins | None] = ContextVar("pins", default=None)


@contextmanager
def pinned() -> Iterator[None]:
    """Pins each file that the body opens."""
    token = _current.set({})
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Pins | None:
    """The pins of this context, for a thread that works for it."""
    return _current.get()


def adopt(pins: Pins | None) -> None:
    """Pin what this thread opens with these."""
    _current.set(pins)


def see(path: str, status: os.stat_result) -> None:
    """Pin a file that was opened, or compare it with its pin; :class:`SavedOverError` if it is another one."""
    pins = current()
    if pins is not None and (first := pins.setdefault(path, now := Version.of(status))) != now:
        raise _saved_over(path, first, now)


def look_again(reopen: bool = True) -> None:
    """Compare all files with their pins; without ``reopen``, a network file system may answer from its cache.

    Raises:
        SavedOverError: some file is gone, or another one.
    """
    for path, first in (current() or {}).items():
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
        look_again()
    except SavedOverError as error:
        return error
    except UnforeseenError:  # its own: descriptors or memory are used up
        return None
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
    remedy = 'load again once that save has ended, as "elastic_checkpoint": {"wait_for_files": 600} does; a tag of its '
    expected = f"{first}, as when it was first opened"
    return SavedOverError(problem, path, expected, now, remedy=f"{remedy}own for each save avoids it")

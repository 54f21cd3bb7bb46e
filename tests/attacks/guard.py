"""Watches over the reader while it reads what is hostile: nothing runs, or takes work or memory without measure.

Work is counted in calls, which are the same on every machine. What hangs without any is ended by the tests' time limit.
"""

from __future__ import annotations

import codecs
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.torch_archive.calls import Call
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

#: What Python's audit hooks report of code that a reader has no reason to run.
FORBIDDEN = ("exec", "compile", "import", "marshal.", "code.__new__", "pickle.find_class", "ctypes.", "socket.")
FORBIDDEN += ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.putenv", "subprocess.Popen", "pty.")
FORBIDDEN += ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.", "glob.")
#: Calls that one file may take, of Python and of C: for each of its bytes, and in addition.
MOST_CALLS, MOST_MORE_CALLS = 400, 4_000_000
#: Memory that a file may cost: 4 times its size, and what the interpreter takes for a small tree and an error.
MOST_COPIES, MOST_MORE_NBYTES = 4, 2 << 20

for codec in ("cp437", "unicode_escape", "raw_unicode_escape", "latin-1"):
    codecs.lookup(codec)  # imported at first use, which is not what the canary is for

_ran: list[str] = []
_is_armed = False


class TooMuchWork(BaseException):
    """A file takes more calls than it may; no ``except Exception`` hides it."""


def _canary(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_armed and event.startswith(FORBIDDEN):
        _ran.append(f"{event}{arguments!r}"[:200])


sys.addaudithook(_canary)  # there is no way to remove one: it is deaf outside of `guarded`


@contextmanager
def counted(most: int) -> Iterator[None]:
    """Raise :class:`TooMuchWork` once the block has made more than ``most`` calls."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls > most:
            sys.setprofile(before)
            raise TooMuchWork(f"more than {most} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def guarded(most_nbytes: int, file_nbytes: int = 0) -> Iterator[None]:
    """Fail if the block runs code, takes more memory than ``most_nbytes``, or more calls than such a file may."""
    global _is_armed  # noqa: PLW0603  the hook is global too
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    _is_armed = True
    try:
        with counted(MOST_CALLS * file_nbytes + MOST_MORE_CALLS):
            yield
    finally:
        _is_armed = False
        _, peak = tracemalloc.get_traced_memory()
        if not was_tracing:
            tracemalloc.stop()
        ran = [*_ran]
        _ran.clear()
    assert ran == [], f"code ran: {ran}"
    assert peak - start <= most_nbytes, f"{peak - start} bytes, where {most_nbytes} are allowed"


def read(path: str, copies: int = MOST_COPIES) -> tuple[PickledFile | None, ElasticCkptError | None]:
    """What becomes of a file: the file, whose tensors are inside of it and whose values can be had, or an error."""
    nbytes = os.path.getsize(path) if os.path.isfile(path) else 0
    with guarded(copies * nbytes + MOST_MORE_NBYTES, nbytes):
        try:
            file = open_pickled(path)
        except ElasticCkptError as error:
            str(error)
            return None, error
        for ref in tensors(file.tree, set()):
            assert type(ref.byte_offset) is int and ref.byte_offset >= 0, ref
            assert ref.byte_offset + ref.reach * ITEMSIZE[ref.dtype] <= max(nbytes, ref.byte_offset), ref
            assert ref.numel == 0 or ref.byte_offset + ref.reach * ITEMSIZE[ref.dtype] <= nbytes, ref
    with guarded(2 * copies * nbytes + 2 * MOST_MORE_NBYTES, nbytes):  # of which tensors may have half
        try:
            materialise(file, file.tree)
        except ElasticCkptError as error:
            str(error)
            return None, error
    return file, None


def tensors(node: Any, met: set[int]) -> Iterator[TensorRef]:
    """Every tensor of a tree."""
    if isinstance(node, TensorRef):
        yield node
    if id(node) in met:
        return
    met.add(id(node))
    parts: list[Any] = []
    if isinstance(node, dict):
        parts += [*node, *node.values()]
    elif isinstance(node, (list, tuple, set, frozenset)):
        parts += node
    elif isinstance(node, Call):
        parts += [*node.args, *(each for _, values in node.steps for each in values)]
    if hasattr(node, "__dict__"):
        parts += vars(node).values()
    for part in parts:
        yield from tensors(part, met)

"""Watches over the reader while it reads what is hostile: nothing runs, hangs, or takes memory without measure."""

from __future__ import annotations

import codecs
import faulthandler
import os
import signal
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
#: Seconds that one file may take on a busy machine.
MOST_SECONDS = 30
#: Memory that a file may cost: 4 times its size, and what the interpreter takes for a small tree and an error.
MOST_COPIES, MOST_MORE_NBYTES = 4, 2 << 20

for codec in ("cp437", "unicode_escape", "raw_unicode_escape", "latin-1"):
    codecs.lookup(codec)  # imported at first use, which is not what the canary is for

_ran: list[str] = []
_is_armed = False


class Hanging(BaseException):
    """A file took too long; no ``except Exception`` hides it."""


def _canary(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_armed and event.startswith(FORBIDDEN):
        _ran.append(f"{event}{arguments!r}"[:200])


sys.addaudithook(_canary)  # there is no way to remove one: it is deaf outside of `guarded`


def _hangs(_number: int, _frame: Any) -> None:
    raise Hanging(f"more than {MOST_SECONDS} seconds")


@contextmanager
def guarded(most_nbytes: int) -> Iterator[None]:
    """Fail if the block runs code, hangs, or takes more memory than ``most_nbytes``."""
    global _is_armed  # noqa: PLW0603  the hook is global too
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    faulthandler.dump_traceback_later(4 * MOST_SECONDS, exit=True)  # C code cannot be interrupted
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    _is_armed = True
    try:
        yield
    finally:
        _is_armed = False
        _, peak = tracemalloc.get_traced_memory()
        if not was_tracing:
            tracemalloc.stop()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ran = [*_ran]
        _ran.clear()
    assert ran == [], f"code ran: {ran}"
    assert peak - start <= most_nbytes, f"{peak - start} bytes, where {most_nbytes} are allowed"


def read(path: str, copies: int = MOST_COPIES) -> tuple[PickledFile | None, ElasticCkptError | None]:
    """What becomes of a file: the file, whose tensors are inside of it and whose values can be had, or an error."""
    nbytes = os.path.getsize(path) if os.path.isfile(path) else 0
    with guarded(copies * nbytes + MOST_MORE_NBYTES):
        try:
            file = open_pickled(path)
        except ElasticCkptError as error:
            str(error)
            return None, error
        for ref in tensors(file.tree, set()):
            assert type(ref.byte_offset) is int and ref.byte_offset >= 0, ref
            assert ref.byte_offset + ref.reach * ITEMSIZE[ref.dtype] <= max(nbytes, ref.byte_offset), ref
            assert ref.numel == 0 or ref.byte_offset + ref.reach * ITEMSIZE[ref.dtype] <= nbytes, ref
    with guarded(2 * copies * nbytes + 2 * MOST_MORE_NBYTES):  # of which tensors may have half
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

"""Has the kernel map the pages of fresh memory before bytes are read into them.

A read into untouched memory faults page by page. One ``MADV_POPULATE_WRITE`` (Linux 5.14) maps all pages at once. Huge
pages are several times faster if free ones are ready, and much slower if the kernel must compact memory or a virtual
machine must get them from its host. This cannot be known beforehand, so each huge page is timed, and the first slow one
is the last.

All of this is advice: if the kernel rejects it, the read faults the pages in.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

_PAGE_NBYTES = mmap.PAGESIZE
_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
#: Smaller buffers are not worth a system call.
_LEAST_NBYTES = 1 << 18
#: CPU time to map a huge page: 0.2 ms if one is ready, 1 ms for as many small pages, 4 ms and more otherwise.
_SLOW_SECONDS = 0.8e-3


class Prefault:
    """Maps buffers that are about to be written, in huge pages if ``huge``. One object per load; thread-safe."""

    def __init__(self, huge: bool = True) -> None:
        self._libc = _libc()
        self._works = self._libc is not None  # a flag, so that no thread finds the library gone between two lines
        self._huge = huge

    def __call__(self, buffers: Iterable[memoryview]) -> None:
        """Map large buffers that are not mapped yet; their contents stay."""
        for buffer in buffers:
            if not self._works:
                return
            if len(buffer) < _LEAST_NBYTES:
                continue
            start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            if not self._is_mapped(start + len(buffer) // 2):
                self._map(start, start + len(buffer))

    def _map(self, start: int, stop: int) -> None:
        first, last = -(-start // _HUGE_NBYTES), stop // _HUGE_NBYTES
        here = start
        for number in range(first, last):
            if not self._huge:
                break
            page = number * _HUGE_NBYTES
            self._populate(here, page)
            here = page + _HUGE_NBYTES
            self._map_huge(page)
        self._populate(here, stop)

    def _map_huge(self, page: int) -> None:
        if self._is_mapped(page + _HUGE_NBYTES // 2):
            return
        before = time.thread_time()
        self._advise(page, _HUGE_NBYTES, _MADV_HUGEPAGE)
        self._populate(page, page + _HUGE_NBYTES)
        if time.thread_time() - before > _SLOW_SECONDS:
            self._huge = False

    def _populate(self, start: int, stop: int) -> None:
        if start < stop:
            page = start // _PAGE_NBYTES * _PAGE_NBYTES
            self._advise(page, stop - page, _MADV_POPULATE_WRITE)

    def _advise(self, start: int, nbytes: int, advice: int) -> None:
        if self._works and self._libc.madvise(start, nbytes, advice) != 0 and advice == _MADV_POPULATE_WRITE:
            self._works = False  # an old kernel, or out of memory, which the read itself reports

    def _is_mapped(self, address: int) -> bool:
        found = ctypes.c_ubyte(0)
        page = address // _PAGE_NBYTES * _PAGE_NBYTES
        return self._libc.mincore(page, _PAGE_NBYTES, ctypes.byref(found)) == 0 and bool(found.value & 1)


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    for function in (libc.madvise, libc.mincore):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc

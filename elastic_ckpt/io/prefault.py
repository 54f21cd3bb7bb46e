"""Has the kernel map the pages of fresh memory before bytes are read into them.

A read into untouched memory faults page by page. Huge pages are several times faster if free ones are ready, and much
slower if the kernel must compact memory or a virtual machine must get them from its host. This cannot be known
beforehand, so each huge page is timed, and the first slow one is the last. All of this is advice: if the kernel rejects
it, the read faults the pages in.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
#: Smaller buffers are not worth a system call.
_LEAST_NBYTES = 1 << 18
#: CPU time to map a huge page: 0.2 ms if one is ready, 1 ms for as many small pages, 4 ms and more otherwise.
_SLOW_SECONDS = 0.8e-3


class Prefault:
    """Maps buffers that are about to be written. One object per load; thread-safe."""

    def __init__(self) -> None:
        self._huge = True

    def __call__(self, buffers: Iterable[memoryview]) -> None:
        """Map large buffers that are not mapped yet; their contents stay."""
        libc = _libc()
        for buffer in buffers if libc is not None else ():
            if len(buffer) < _LEAST_NBYTES:
                continue
            start, mapped = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), ctypes.c_ubyte(0)
            stop, middle = start + len(buffer), (start + len(buffer) // 2) // mmap.PAGESIZE * mmap.PAGESIZE
            if libc.mincore(middle, mmap.PAGESIZE, ctypes.byref(mapped)) == 0 and mapped.value & 1:
                continue
            for page in range(start // _HUGE_NBYTES * _HUGE_NBYTES, stop, _HUGE_NBYTES):
                first = max(start // mmap.PAGESIZE * mmap.PAGESIZE, page)
                nbytes, before = min(stop, page + _HUGE_NBYTES) - first, time.thread_time()
                is_huge = self._huge and nbytes == _HUGE_NBYTES
                if is_huge:
                    libc.madvise(first, nbytes, _MADV_HUGEPAGE)
                libc.madvise(first, nbytes, _MADV_POPULATE_WRITE)
                if is_huge and time.thread_time() - before > _SLOW_SECONDS:
                    self._huge = False


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    for function in (libc.madvise, libc.mincore):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc

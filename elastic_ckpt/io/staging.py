"""The memory that is read into: pages of fresh tensors, mapped beforehand, and staging buffers for all others.

A read into a staging buffer takes one of two: while it is read into, the other is copied into its target. For an
accelerator the copy is asynchronous, from pinned memory on a stream of its own, so that disk and bus overlap. Memory is
bounded, whatever the size of the plan.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import torch

_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
#: Smaller buffers are not worth a system call.
_LEAST_NBYTES = 1 << 18
#: CPU time to map a huge page: 0.2 ms if one is ready, 1 ms for as many small pages, 4 ms and more otherwise.
_SLOW_SECONDS = 0.8e-3


class Prefault:
    """Has the kernel map buffers that are about to be written. One object per load; thread-safe.

    A read into untouched memory faults page by page. Huge pages are several times faster if free ones are ready, and
    much slower if the kernel must compact memory or a virtual machine must get them from its host. This cannot be known
    beforehand, so each huge page is timed, and the first slow one is the last. All of this is advice: if the kernel
    rejects it, the read faults the pages in.
    """

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


class StagingBuffers:
    """Two host buffers in turn, for one thread at a time and targets on some devices.

    Into an accelerator, values travel on a stream beside the computation's, in the file's dtype, and are converted
    there, which halves the traffic if 16-bit values become 32-bit ones. Into host memory they are copied at once.
    Create it on the thread that prepared the targets: its stream is waited for, its device has the pinned memory.
    """

    def __init__(self, buffer_nbytes: int, devices: Collection[torch.device]) -> None:
        accelerators = [device for device in devices if device.type != "cpu"]
        pinned = bool(accelerators)
        self._buffers = [torch.empty(buffer_nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._free: list[Callable[[], None] | None] = [None, None]
        self._turn = 0
        self._streams = {device: torch.Stream(device=device) for device in accelerators}
        for device, stream in self._streams.items():
            # targets were allocated, and their gaps filled, on the stream of the computation
            stream.wait_stream(torch.get_device_module(device).current_stream(device))

    def buffer(self, nbytes: int) -> memoryview:
        """The next buffer, once its previous content is copied."""
        if (wait := self._free[self._turn]) is not None:
            wait()
        return self._buffers[self._turn][:nbytes].numpy().data

    def deliver(self, nbytes: int, dtype: str, target: torch.Tensor, offset: int) -> None:
        """Start to copy the buffer's content into ``target[offset:]``, in elements."""
        values = self._buffers[self._turn][:nbytes].view(getattr(torch, dtype))
        self._free[self._turn] = self.start(values, target, offset)
        self._turn = 1 - self._turn

    def start(self, values: torch.Tensor, target: torch.Tensor, offset: int) -> Callable[[], None] | None:
        """Start to copy 1-D ``values``; returns what waits until they may be overwritten, ``None``: at once."""
        if (stream := self._streams.get(target.device)) is None:
            write_flat(target, offset, values)
            return None
        with stream:
            write_flat(target, offset, values.to(target.device, non_blocking=True))
            return stream.record_event().synchronize

    def finish(self) -> None:
        """Wait until everything delivered is in its targets, which may then be used on any stream."""
        for stream in self._streams.values():
            stream.synchronize()


def write_flat(target: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write 1-D ``values`` into ``target`` from element ``offset``, in row-major order."""
    if target.is_contiguous():
        target.view(-1)[offset : offset + values.numel()].copy_(values)
        return
    positions = torch.arange(offset, offset + values.numel())
    target[torch.unravel_index(positions, target.shape)] = values.to(target.dtype).to(target.device)

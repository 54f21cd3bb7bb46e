"""What one load costs one rank: seconds, bytes, files, memory. Linux only."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import meminfo

_CHUNK = 16 << 20
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Cost:
    """What one rank measured.

    Attributes:
        seconds: from the barrier before to the barrier after.
        own_seconds: until this rank had done its part.
        read_nbytes: bytes that its system calls read (``rchar`` of ``/proc/self/io``).
        disk_nbytes: those that came from the disk and not from the page cache (``read_bytes``).
        peak_nbytes: how far its resident memory rose above where it was before.
        opens: times that a file of the checkpoint was opened.
        files: how many files that were.
        system_seconds: CPU time in the kernel: reading, and mapping memory.
        faults: pages that had to be mapped.
        lent_nbytes: memory that was touched and freed just before.
    """

    seconds: float
    own_seconds: float
    read_nbytes: int
    disk_nbytes: int
    peak_nbytes: int
    opens: int
    files: int
    system_seconds: float
    faults: int
    lent_nbytes: int


class Opens:
    """Counts what this process opens below a folder. An audit hook cannot be removed: make one a process."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._paths: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._folder is not None and isinstance(arguments[0], (str, os.PathLike)):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(self._folder):
                self._paths.append(path)

    def start(self, folder: Path) -> None:
        """Count from now on."""
        self._paths = []
        self._folder = f"{folder}{os.sep}"

    def stop(self) -> list[str]:
        """The paths that were opened since, each as often as it was."""
        self._folder = None
        return self._paths


class Meter:
    """Measures loads, one after the other.

    Args:
        cold: whether the page cache holds nothing of the files when a load starts.
    """

    def __init__(self, cold: bool) -> None:
        self._cold = cold
        self._opens = Opens()

    def measure(self, load: Callable[[], None], folder: Path, used_nbytes: int) -> Cost:
        """Run a load. Collective.

        Args:
            load: what to measure.
            folder: what it reads.
            used_nbytes: memory that it is expected to take: so much is touched and freed just before, so that every
                load finds pages that this process had until a moment ago.
        """
        set_pages(folder, self._cold)
        settle()
        lent_nbytes = lend_memory(used_nbytes, folder)
        before = resident()
        reset_peak()
        self._opens.start(folder)
        reads, usage = _reads(), resource.getrusage(resource.RUSAGE_SELF)
        dist.barrier()
        start = time.perf_counter()
        load()
        own = time.perf_counter()
        dist.barrier()
        end = time.perf_counter()
        after, used = _reads(), resource.getrusage(resource.RUSAGE_SELF)
        paths = self._opens.stop()
        return Cost(
            seconds=end - start,
            own_seconds=own - start,
            read_nbytes=after[0] - reads[0],
            disk_nbytes=after[1] - reads[1],
            peak_nbytes=max(peak() - before, 0),
            opens=len(paths),
            files=len(set(paths)),
            system_seconds=used.ru_stime - usage.ru_stime,
            faults=used.ru_minflt - usage.ru_minflt,
            lent_nbytes=lent_nbytes,
        )


def settle() -> None:
    """Give back what Python and the C library still hold of memory that is no longer used. Local."""
    gc.collect()
    _LIBC.malloc_trim(0)


def lend_memory(nbytes: int, folder: Path) -> int:
    """Touch so much memory, as far as there is any beside the files' pages, and free it again. Collective.

    Returns:
        How much that was.
    """
    spare = meminfo("MemAvailable") - sum(path.stat().st_size for path in files_below(folder))
    nbytes = min(nbytes, max(int(0.8 * spare) // dist.get_world_size(), 0))
    dist.barrier()
    if nbytes:
        # mapped, not allocated: the C library would keep the pages, and the next load would find them there
        with mmap.mmap(-1, nbytes) as lent:
            view = torch.frombuffer(lent, dtype=torch.uint8)
            view.fill_(1)
            del view
    dist.barrier()
    return nbytes


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def set_pages(folder: Path, cold: bool) -> None:
    """Read all files through, ranks sharing them; or have the kernel forget them. Collective."""
    paths = files_below(folder)
    if cold:
        if dist.get_rank() == 0:
            _forget(paths)
    else:
        _read_through(paths[dist.get_rank() :: dist.get_world_size()])
    dist.barrier()


def _forget(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_through(paths: Sequence[Path]) -> None:
    buffer = bytearray(_CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _reads() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters["rchar"]), int(counters["read_bytes"])


def _status(key: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return _status("VmRSS")


def peak() -> int:
    """The most that :func:`resident` was since :func:`reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Begin a new measurement of :func:`peak`."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

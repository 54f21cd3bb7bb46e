"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def _first(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def meminfo(key: str) -> int:
    """A line of ``/proc/meminfo``, in bytes."""
    return int(_first("/proc/meminfo", key).split()[0]) * 1024


def describe() -> dict[str, str | int]:
    """Processor, memory, kernel, and versions of what was measured."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": meminfo("MemTotal"),
        "kernel": platform.release(),
        "transparent_hugepages": huge.read_text(encoding="utf-8").strip() if huge.exists() else "",
        "python": platform.python_version(),
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
        "elastic_ckpt": version("elastic_ckpt"),
    }

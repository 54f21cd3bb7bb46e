"""What the figures were measured on."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


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
    """Processor, memory, kernel, versions of what was measured, and when."""
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
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write_document(folder: Path, name: str, points: Sequence[Any], **facts: Any) -> None:
    """Write what was measured, with the machine, to ``<name>.json`` of a folder."""
    document = {"machine": describe(), **facts, "points": list(points)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1), encoding="utf-8")

"""The accelerator that DeepSpeed chooses in this environment, asked in a process of its own.

Choosing imports DeepSpeed, which takes seconds, logs to standard output, and may fail or hang where a driver does not
fit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from elastic_ckpt.config import VARIABLE
from elastic_ckpt.core.text import one_line

_SCRIPT = """
import json
import torch
from deepspeed.accelerator import get_accelerator
chosen = get_accelerator()
name = chosen.device_name()
get_device_name = getattr(getattr(torch, name, None), "get_device_name", None)
devices = [get_device_name(index) if get_device_name else "" for index in range(chosen.device_count())]
print(json.dumps([name, [] if name == "cpu" else devices]))
"""
#: Seconds after which DeepSpeed has not been imported, as on a slow network file system.
_TIMEOUT = 120


@dataclass(frozen=True)
class Accelerator:
    """What DeepSpeed trains on, or why that is not known."""

    name: str | None  # "cuda", "cpu"
    devices: tuple[str, ...] = ()  # the name of each device, empty where torch knows none
    problem: str | None = None  # why it is not known
    is_broken: bool = False  # DeepSpeed cannot be imported, or refuses the accelerator

    def __str__(self) -> str:
        if self.name is None:
            return f"not known: {self.problem}"
        counts = {each: self.devices.count(each) for each in self.devices}
        return ", ".join([self.name, *(f"{count} x {each or 'device'}" for each, count in counts.items())])


def find_accelerator() -> Accelerator:
    """Ask DeepSpeed, which must be installed."""
    environment = {**os.environ, VARIABLE: "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Accelerator(None, problem=f"DeepSpeed was not imported within {_TIMEOUT} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Accelerator(None, problem=f"DeepSpeed fails with {one_line(lines[-1])}", is_broken=True)
    name, devices = json.loads(done.stdout.splitlines()[-1])
    return Accelerator(name, tuple(devices))

"""The runner of cells: what raises, dies or hangs fails alone."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.cells import Failed, Launcher, Task

JOB = "test_cells.misbehave"


def misbehave(case: dict[str, Any]) -> list[tuple[int, float]]:
    """One rank of two does what the case says; then both add up their numbers."""
    if dist.get_rank() == 1:
        if case["how"] == "raises":
            raise ValueError("of the second rank")
        if case["how"] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if case["how"] == "hangs":
            time.sleep(10_000)
    if case["how"] == "leaves traces":
        os.environ["LEFT_BEHIND"] = "1"
        os.chdir("/")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return [(dist.get_rank(), total.item() if os.getcwd() != "/" or "LEFT_BEHIND" in os.environ else -1.0)]


def test_a_task_that_raises_dies_or_hangs_fails_alone(extensions_dir: str) -> None:
    ways = ["well", "raises", "leaves traces", "well", "dies", "hangs", "well"]
    tasks = [Task(f"{number}: {how}", JOB, {"how": how}) for number, how in enumerate(ways)]
    # the limit ends what hangs; all else is over in a fraction of it
    found = Launcher(extensions_dir).run(2, tasks, seconds=30)
    for how, result in zip(ways, found, strict=True):
        if how in ("raises", "dies", "hangs"):
            assert isinstance(result, Failed), how
            assert {"raises": "of the second rank", "dies": "exit -9", "hangs": "exit None"}[how] in result.text
        else:
            assert result == [(0, 3.0), (1, 3.0)], how

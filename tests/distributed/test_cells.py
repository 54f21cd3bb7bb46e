"""The runner of cells: what raises, dies or hangs fails alone."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cells import Cell, Failed, Launcher, Packs, Save, Saves, Task
from tests.distributed.conftest import made_once

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


def test_a_folder_is_made_by_one_of_many_workers(tmp_path: Path) -> None:
    """The rest wait until it is whole; where one has failed, the next makes it anew."""
    folder = tmp_path / "saves"
    made: list[int] = []

    def want(number: int) -> list[str]:
        with suppress(ValueError), made_once(folder) as is_missing:
            if is_missing:
                made.append(number)
                (folder / f"half {number}").touch()
                if len(made) < 3:
                    raise ValueError("a worker whose job fails")
                (folder / "whole").touch()
        return sorted(path.name for path in folder.iterdir()) if number not in made[:2] else []

    with ThreadPoolExecutor(8) as workers:
        found = list(workers.map(want, range(8)))
    assert len(made) == 3
    assert [names for names in found if names] == [[f"half {made[2]}", "whole"]] * 6


def test_a_cell_whose_save_fails_does_so_alone(extensions_dir: str, tmp_path: Path) -> None:
    launcher = Launcher(extensions_dir)
    saves = Saves(tmp_path / "saves", launcher)
    broken, whole = (Save(None, job=JOB, more={"how": how}) for how in ("raises", "well"))
    table = [
        Cell("broken", broken, JOB, 2, {"how": "well"}),
        Cell("converted", Save(None, job=JOB, more={"how": "raises"}, converted=True), JOB, 2, {"how": "well"}),
        Cell("goes on", Save(None, job=JOB, more={"how": "well"}, source=broken), JOB, 2, {"how": "well"}),
        Cell("whole", whole, JOB, 2, {"how": "well"}),
    ]
    items: list[Any] = [
        SimpleNamespace(
            path=tmp_path, callspec=SimpleNamespace(params={"cell": each}), iter_markers=lambda name: iter(())
        )
        for each in table
    ]
    packs = Packs(saves, launcher, tmp_path / "changed", items)
    assert packs.facts(tmp_path, table[-1]) == [(0, 3.0), (1, 3.0)]
    for each in table[:-1]:
        with pytest.raises(pytest.fail.Exception, match="of the second rank"):
            packs.facts(tmp_path, each)

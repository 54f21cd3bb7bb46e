"""Loads in which one rank fails, dies or stops. Each cell has processes of its own, several cells run at a time."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt import distributed
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed import zygote
from tests.distributed.jobs import truth_of
from tests.distributed.launch import free_port
from tests.distributed.model import Setup, build_engine

#: Seconds after which gloo gives up on a rank, which a rank lives on after it has failed, and after which a cell's
#: processes are ended.
GROUP_SECONDS, LINGER_SECONDS, CELL_SECONDS = 10, 6, 100
#: Longer than a launch may take.
LONG_SECONDS = 3600
#: Cells in which ranks wait for each other most of the time, and how many cells run at a time.
_MOSTLY_WAIT, _AT_A_TIME, _WAITING_AT_A_TIME = ("SIGSTOP", "MemoryError"), 4, 8


@dataclass(frozen=True)
class Cell:
    """A load on three ranks.

    Attributes:
        folder, setup: the checkpoint, and what it is loaded into.
        fault: a key of :data:`FAULTS`; empty: none.
        at: the round before whose collectives it happens: what the ranks do in it, and how many of that name came before.
        rank: whose.
        config: of elastic_ckpt.
    """

    folder: str
    setup: Setup
    fault: str = ""
    at: tuple[str, int] = ("", 0)
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.rank} before {self.at} into {self.setup.name}"


@dataclass(frozen=True)
class Outcome:
    """What a rank made of a load.

    Attributes:
        cell, rank: which.
        kinds: class and base classes of the error, by name; empty: there was none.
        text: of the error.
        is_changed: whether anything of the engine is not as before.
        differences: from what was saved, after a load without an error.
        rounds: what the ranks did together, in order.
    """

    cell: Cell
    rank: int
    kinds: tuple[str, ...]
    text: str
    is_changed: bool
    differences: dict[str, str]
    rounds: tuple[tuple[str, int], ...]


def load(cell: Cell) -> Outcome:
    """One rank of a cell."""
    torch.set_num_threads(1)
    # a busy machine may need long to connect; DeepSpeed's groups take the default, not the timeout of the first one
    patient = timedelta(seconds=LONG_SECONDS)
    dist.distributed_c10d._get_default_timeout = lambda backend: patient
    deepspeed.init_distributed(dist_backend="gloo", timeout=patient)
    elastic_ckpt.install()
    engine = build_engine(cell.setup, models.BigLM(seed=8))
    before = oracle.fingerprint(engine)
    dist.barrier()
    if cell.fault not in ("SIGKILL", "MemoryError"):  # where a connection or a message tells of it, no timeout does
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_SECONDS), group)
    rounds: list[tuple[str, int]] = []
    _watch(rounds, cell.at, FAULTS[cell.fault] if cell.fault and dist.get_rank() == cell.rank else _nothing)
    error = None
    try:
        engine.load_checkpoint(cell.folder)
    except Exception as raised:
        error = raised
    if cell.fault == "MemoryError" and dist.get_rank() == cell.rank:
        time.sleep(LINGER_SECONDS)  # the others hear of it, though this rank does not end
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    is_changed = oracle.fingerprint(engine) != before
    kinds = tuple(kind.__name__ for kind in type(error).__mro__) if error else ()
    differences = {} if error else oracle.differences(engine, truth_of(cell.folder))
    return Outcome(cell, dist.get_rank(), kinds, str(error), is_changed, differences, tuple(rounds))


def _nothing() -> None:
    pass


def _watch(rounds: list[tuple[str, int]], at: tuple[str, int], act: Callable[[], None]) -> None:
    """Note the rounds of a load, and act before the collectives of one of them."""
    together = distributed.together

    @contextmanager
    def noted(doing: str) -> Iterator[None]:
        rounds.append((doing, sum(doing == other for other, _ in rounds)))
        with together(doing):
            if rounds[-1] == at:
                act()
            yield

    distributed.together = noted


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise MemoryError("this rank has no memory left")


def _no_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize())


def _no_descriptors() -> None:
    _limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1)


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def _no_disk() -> None:
    def preadv(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.preadv = preadv


def _short_reads() -> None:
    preadv = os.preadv

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][: max(len(buffers[0]) // 3, 1)]], offset)

    os.preadv = short


def _short_file() -> None:
    os.preadv = lambda *_: 0


FAULTS = {
    "SIGKILL": _die,
    "SIGSTOP": _stop,
    "MemoryError": _fail,
    "RLIMIT_AS": _no_memory,
    "RLIMIT_NOFILE": _no_descriptors,
    "EIO": _no_disk,
    "short reads": _short_reads,
    "end of file": _short_file,
}


def run(arguments: dict[str, Any]) -> list[tuple[Cell, list[Outcome | int | None], str]]:
    """Run cells: of each, what its ranks made of it, or their exit codes, and what they printed.

    It forks, so its process must not have started a thread.
    """
    waiting, found = list(enumerate(arguments["cells"])), []
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < (_WAITING_AT_A_TIME if waiting[0][1].fault in _MOSTLY_WAIT else _AT_A_TIME):
            number, cell = waiting.pop(0)
            running.append(_Running(Path(arguments["folder"]) / str(number), cell))
        for each in [each for each in running if each.is_over()]:
            running.remove(each)
            found.append((each.cell, each.outcomes(), each.printed()))
        time.sleep(0.05)
    return found


class _Running:
    """The processes of a cell."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        folder.mkdir(parents=True)
        port, self.cell, self._folder = free_port(), cell, folder
        self._codes: dict[int, int] = {}
        self._limit = time.monotonic() + CELL_SECONDS
        self._pids = []
        for rank in range(3):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
            env = {key: str(value) for key, value in place.items()}
            files = {"log": str(folder / f"{rank}.log"), "facts": str(folder / f"{rank}.facts")}
            self._pids.append(zygote.fork({"env": env, **files}, f"{__name__}:load", pickle.dumps(cell).hex()))

    def is_over(self) -> bool:
        """Whether all ranks have ended, but for one that was stopped; ends them at the time limit."""
        for pid in set(self._pids) - set(self._codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        left = set(self._pids) - set(self._codes)
        stopped = {self._pids[self.cell.rank]} if self.cell.fault == "SIGSTOP" else set()
        if left - stopped and time.monotonic() < self._limit:
            return False
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return True

    def outcomes(self) -> list[Outcome | int | None]:
        """By rank; exit codes of those that found out nothing, ``None`` if it was ended here."""
        facts = [self._folder / f"{rank}.facts" for rank in range(3)]
        return [
            pickle.loads(path.read_bytes()) if path.exists() and path.stat().st_size else self._codes.get(pid)
            for path, pid in zip(facts, self._pids, strict=True)
        ]

    def printed(self) -> str:
        """The end of what its ranks printed."""
        return "\n".join((self._folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(3))

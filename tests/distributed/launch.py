"""Start real gloo processes for a test, with a time limit, and stop just those."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
#: Of ``prctl`` (linux/prctl.h): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "FusedAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load()
"""
#: Begins a line of the zygote that answers a request; DeepSpeed until 0.16 logs to standard output too.
ANSWER = "answer: "


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on.

    The kernel hands out none of these by itself, so that between now and its use no connection of another job takes it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(extensions_dir: str, deepspeed: str = "") -> dict[str, str]:
    """What every test process gets: one thread, CPU accelerator, its own place for DeepSpeed's JIT builds.

    ``deepspeed`` is a folder with another version of DeepSpeed, as ``launch/matrix.sh`` installs them.
    """
    return {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": extensions_dir,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        # More than any job has ranks. A job of just so many would use DeepSpeed's shared-memory all-reduce, which is not
        # gloo and leaves 66 MiB in /dev/shm for every rank: a few hundred jobs fill the machine's memory.
        "LOCAL_SIZE": "64",
        "PYTHONPATH": os.pathsep.join(filter(None, [deepspeed, str(REPO), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # Muon's kernel: compiling it takes longer than all its tests
    }


def build_ops(extensions_dir: str) -> None:
    """Build the ops that DeepSpeed compiles when it first starts, by one of the processes that share a folder.

    The others wait for it here, where no launch has a time limit: one that ends in the middle leaves torch's lock behind.
    """
    folder = Path(extensions_dir)
    is_built = folder / "is_built"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built.exists():
            subprocess.run([sys.executable, "-c", _BUILD], env=environment(extensions_dir), check=True, timeout=1800)
            is_built.touch()


def remove_shared_memory(port: int) -> None:
    """Remove what DeepSpeed's shared-memory all-reduce left behind of the job with this master port."""
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        leftover.unlink()


def start(command: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that its children can be ended with it."""
    with log.open("wb") as stream:
        return subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)


def end_with_parent() -> None:
    """Have this process killed when its parent ends: torchrun puts ranks in sessions of their own, which :func:`end` misses."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process started by :func:`start`, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Zygote:
    """A process that forks the ranks of test jobs; see :mod:`tests.distributed.zygote`.

    Args:
        extensions_dir, deepspeed: where DeepSpeed may build its extensions; see :func:`environment`.
    """

    def __init__(self, extensions_dir: str, deepspeed: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.zygote"],
            env=environment(extensions_dir, deepspeed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(
        self, ranks: Sequence[dict[str, Any]], job: str, arguments: Any, timeout: float, imports: Sequence[str] = ()
    ) -> list[int | None]:
        """Run a job; see :func:`tests.distributed.zygote.run`. ``imports`` names the jobs that it runs in turn, if any."""
        assert self._process.stdin is not None and self._process.stdout is not None
        arguments = pickle.dumps(arguments).hex()
        request = {"ranks": list(ranks), "job": job, "arguments": arguments, "timeout": timeout}
        request["imports"] = list(imports)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = next((line for line in self._process.stdout if line.startswith(ANSWER)), None)
        except BaseException:  # a test's time limit: the answer, when it came, would be taken for the next job's
            self.close()
            raise
        assert answer, "the process that forks test ranks has died"
        return json.loads(answer.removeprefix(ANSWER))

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; it has no children between jobs."""
        end(self._process)


_zygotes: dict[tuple[str, str], Zygote] = {}


def zygote_of(extensions_dir: str, deepspeed: str = "") -> Zygote:
    """The process that forks test ranks; starts it if there is none."""
    zygote = _zygotes.get((extensions_dir, deepspeed))
    if zygote is None or not zygote.is_alive:
        zygote = _zygotes[extensions_dir, deepspeed] = Zygote(extensions_dir, deepspeed)
    return zygote


def close_zygotes() -> None:
    """End all of them."""
    while _zygotes:
        _zygotes.popitem()[1].close()


@dataclass(frozen=True)
class Ranks:
    """What is left of the processes of one launch.

    Attributes:
        codes: exit codes; ``None`` where a rank still ran at the time limit.
        outputs: what each printed, with its traceback.
        facts: what each wrote down: one pickle behind the other.
    """

    codes: list[int | None]
    outputs: list[str]
    facts: list[list[Any]]

    def __str__(self) -> str:
        ranks = enumerate(zip(self.codes, self.outputs, strict=True))
        return "\n".join(f"--- rank {rank}, exit {code}\n{output[-6000:]}" for rank, (code, output) in ranks)


def launch_ranks(
    world_size: int,
    job: str,
    arguments: Any,
    extensions_dir: str,
    timeout: float = 300,
    deepspeed: str = "",
    places: Sequence[tuple[int, dict[str, str]]] = (),
    imports: Sequence[str] = (),
) -> Ranks:
    """Run a job on ``world_size`` processes, however they end; see :func:`run_ranks`.

    ``imports`` are the jobs that it runs in turn, for what they import.
    """
    port, zygote = free_port(), zygote_of(extensions_dir, deepspeed)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            env = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            holder, more = places[rank] if places else (None, {})
            files = {"log": str(log), "facts": str(log.with_suffix(".facts"))}
            ranks.append({"env": env | more, "holder": holder, **files})
        try:
            codes = zygote.run(ranks, job, arguments, timeout, imports)
        finally:
            remove_shared_memory(port)
        outputs = [log.read_text(errors="replace") for log in logs]
        return Ranks(codes, outputs, [pickles(Path(rank["facts"])) for rank in ranks])


def pickles(path: Path) -> list[Any]:
    """All whole ones of a file: a rank may have been ended while it wrote the last one."""
    found: list[Any] = []
    if not path.exists():
        return found
    with path.open("rb") as stream:
        while True:
            try:
                found.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):
                return found


def run_ranks(
    world_size: int,
    job: str,
    arguments: Any,
    extensions_dir: str,
    timeout: float = 300,
    deepspeed: str = "",
    places: Sequence[tuple[int, dict[str, str]]] = (),
    killed: int | None = None,
) -> list[Any]:
    """Run ``job`` of :mod:`tests.distributed.jobs` on ``world_size`` processes; fail with their output.

    Args:
        world_size: number of gloo processes.
        job: name of a function in ``jobs.py``, or ``module.function``, called as ``job(arguments)`` on every rank. It
            returns a list of facts, or ``None``.
        arguments: anything that can be pickled.
        extensions_dir: where DeepSpeed may build its extensions.
        timeout: seconds until all of them are ended.
        deepspeed: a folder with another version of DeepSpeed.
        places: of each rank, the process that holds its node (:mod:`tests.distributed.namespaces`), and more of its
            environment.
        killed: a rank that does not live to find anything out.

    Returns:
        The facts of all ranks, in the order of ranks. A job that returns facts has some on every rank.
    """
    ranks = launch_ranks(world_size, job, arguments, extensions_dir, timeout, deepspeed, places)
    if any(code != (-signal.SIGKILL if rank == killed else 0) for rank, code in enumerate(ranks.codes)):
        raise AssertionError(f"{job} on {world_size} ranks failed (None: still running at the time limit)\n{ranks}")
    facts = [found[0] for rank, found in enumerate(ranks.facts) if rank != killed]
    assert [] not in facts, f"{job}: nothing was found out"
    return list(chain.from_iterable(of_rank or () for of_rank in facts))

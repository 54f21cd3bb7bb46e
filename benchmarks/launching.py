"""Starts jobs of real processes, with a time limit, and ends just those."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpuinfo

#: DeepSpeed asks for it several times a rank, and each time takes a process of a second or two.
CPU_INFO = "BENCHMARKS_CPU_INFO"
REPO = Path(__file__).resolve().parents[1]


class JobFailed(RuntimeError):
    """A job ended badly, or had to be ended."""


@dataclass(frozen=True)
class Launcher:
    """Where jobs work.

    Attributes:
        logs: folder for what their processes print.
        extensions: ``TORCH_EXTENSIONS_DIR``: where DeepSpeed builds its extensions.
    """

    logs: Path
    extensions: Path

    def run(self, world_size: int, job: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        """Run ``job`` of :mod:`benchmarks.job` on so many gloo processes.

        Raises:
            JobFailed: with the end of what they printed; all of them have ended.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        name = f"{time.strftime('%H%M%S')}-{job}-{port}"
        own_log = self.logs / f"{name}.log"
        logs = [self.logs / f"{name}-rank{rank}.log" for rank in range(world_size)]
        paths = json.dumps([str(log.resolve()) for log in logs])
        command = [sys.executable, "-m", "benchmarks.job", job, json.dumps(arguments), paths]
        process = _start(command, self._environment(port), own_log)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            _remove_shared_memory(port)
        if code != 0:
            what = f"ran past {timeout_s:.0f} s" if code is None else f"failed with exit code {code}"
            raise JobFailed(f"{job} on {world_size} ranks {what}\n{_tails([own_log, *logs])}")

    def _environment(self, port: int) -> dict[str, str]:
        return {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            # More than any job has ranks: DeepSpeed's shared-memory all-reduce would take 66 MiB a rank in /dev/shm.
            "LOCAL_SIZE": "64",
            "TORCH_EXTENSIONS_DIR": str(self.extensions.resolve()),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            CPU_INFO: _cpu_info(),
        }


@functools.cache
def _cpu_info() -> str:
    return json.dumps(cpuinfo.get_cpu_info())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            env=dict(env),
            cwd=REPO,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _tails(logs: Sequence[Path]) -> str:
    """The end of what each process printed."""
    texts = {log: log.read_text(errors="replace") for log in logs if log.exists()}
    return "\n".join(f"--- {log}\n{text[-3000:]}" for log, text in texts.items() if text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that :func:`_start` started, and its children: its session holds nothing else."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_shared_memory(port: int) -> None:
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        leftover.unlink(missing_ok=True)

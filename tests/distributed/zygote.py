"""``python -m tests.distributed.zygote``: forks test processes that have torch and DeepSpeed imported already.

Reads requests from standard input, one JSON object a line, and answers each with exit codes. A test suite of many short
distributed jobs would otherwise spend most of its time on imports. The process itself starts no thread and never
touches torch beyond importing it, so its children start from a clean state.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import cpuinfo

from tests.distributed import jobs
from tests.distributed.launch import ANSWER
from tests.distributed.namespaces import enter

#: Of ``prctl`` (linux/prctl.h): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Answer requests until standard input ends."""
    info = cpuinfo.get_cpu_info()  # a process of a second or two, which DeepSpeed starts for every op in every rank
    cpuinfo.get_cpu_info = lambda: info
    # takes minutes to build, for every version of DeepSpeed; with LOCAL_SIZE above the number of ranks nothing calls it
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    # two seconds in each rank otherwise; the last is what install() imports
    for name in ("torch._dynamo", "bitsandbytes", "elastic_ckpt.load.hook"):
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # DeepSpeed and the tests collect garbage often: not again in what the imports left
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        for job in request.pop("imports") or [request["job"]]:
            _import_for(job)
        answers.write(ANSWER + json.dumps(run(**request)) + "\n")
        answers.flush()


def _import_for(job: str) -> None:
    """What takes long to import and only some jobs need; of ``module:function``, the module."""
    module, colon, _ = job.partition(":")
    if colon and module not in sys.modules:
        importlib.import_module(module)
        gc.collect()
        gc.freeze()
    if job.startswith(("parallel_jobs.", "soak_jobs.", "expert_")) and "transformers" not in sys.modules:
        for package, name in (("megatron", "core.models.gpt"), ("transformers", "models.llama.modeling_llama")):
            if importlib.util.find_spec(package):
                importlib.import_module(f"{package}.{name}")
        gc.collect()
        gc.freeze()


def run(ranks: list[dict[str, Any]], job: str, arguments: str, timeout: float) -> list[int | None]:
    """Fork a process for each rank and wait for all; exit codes, ``None`` where one had to be ended at the time limit.

    The limit counts from the last time that a rank wrote down what it found.
    """
    pids = [fork(rank, job, arguments) for rank in ranks]
    codes: dict[int, int] = {}
    limit, written = time.monotonic() + timeout, -1
    while len(codes) < len(pids) and time.monotonic() < limit:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        before, written = written, _nbytes_written(ranks)
        if written != before:
            limit = time.monotonic() + timeout
        time.sleep(0.02)
    for pid in set(pids) - set(codes):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def _nbytes_written(ranks: list[dict[str, Any]]) -> int:
    facts = [Path(rank["facts"]) for rank in ranks]
    return sum(path.stat().st_size for path in facts if path.exists())


def fork(rank: dict[str, Any], job: str, arguments: str) -> int:
    """Run a job of one rank in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans where the test run is ended
    stream = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.update(rank["env"])
    if rank.get("holder"):
        enter(rank["holder"])
    sys.argv = [jobs.__file__, job]
    code = 1
    try:
        module, colon, function = job.partition(":")
        work = getattr(sys.modules[module], function) if colon else partial(jobs.run, job)
        with open(rank["facts"], "ab", buffering=0) as stream:
            if job == jobs.CELLS:
                jobs.run_cells(pickle.loads(bytes.fromhex(arguments)), stream)
            else:
                stream.write(pickle.dumps(work(pickle.loads(bytes.fromhex(arguments)))))
        code = 0
    except BaseException:  # the end of this process, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo now and then abort the interpreter's teardown


if __name__ == "__main__":
    serve()

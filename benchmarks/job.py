"""What the processes of a job run: ``python -m benchmarks.job NAME ARGUMENTS LOGS``, the last two as JSON."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cpuinfo
import deepspeed
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from benchmarks import privates, sharded
from benchmarks.cases import DCP, NATIVE, Case, shuffled
from benchmarks.contenders import Runner, build_runner
from benchmarks.flat_jobs import flat_load, flat_save
from benchmarks.held import Held, agreed, build_engine, checksum
from benchmarks.launching import CPU_INFO
from benchmarks.meter import Meter, settle
from benchmarks.model import STATES, is_filled

TAG = "step10"
#: Of ``prctl`` (linux/prctl.h): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def save(arguments: dict[str, Any]) -> None:
    """Make a native checkpoint, one of torch.distributed.checkpoint, or both."""
    case = Case(**arguments["case"])
    folders = {source: Path(folder) for source, folder in arguments["folders"].items()}
    engine = build_engine(case, saved=True)
    shapes = sharded.shapes_of(engine)
    if NATIVE in folders:
        held = Held(engine)
        held.fill_as_saved()
        _prove(engine)
        engine.save_checkpoint(str(folders[NATIVE]), tag=TAG)
        del held
    del engine
    settle()
    if DCP in folders:
        sharded.save(shapes, folders[DCP])
    _write(folders.values(), {})


def _prove(engine: Any) -> None:
    """What is saved lies where DeepSpeed's public getters look for it: small tensors of every kind. Collective."""
    privates.link_states(engine)
    for name, param in list(engine.module.named_parameters())[2:16]:
        if not is_filled(safe_get_full_fp32_param(param).view(-1), name, "fp32", 0):
            raise AssertionError(f"{name}: DeepSpeed holds another master weight")
        for key in STATES:
            if not is_filled(safe_get_full_optimizer_state(param, key).view(-1), name, key, 0):
                raise AssertionError(f"{name}: DeepSpeed holds another {key}")


def convert(arguments: dict[str, Any]) -> None:
    """DeepSpeed's offline converter, with its own default options; imports are not counted."""
    folders = arguments["folders"]
    options = Namespace(
        input_folder=os.path.join(folders["native"], TAG),
        output_folder=os.path.join(folders["universal"], TAG),
        num_extract_workers=4,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    start = time.perf_counter()
    ds_to_universal.main(options)
    seconds = time.perf_counter() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    _write([Path(folders["universal"])], {"conversion_seconds": seconds, "conversion_worker_nbytes": children})


def _write(folders: Any, facts: dict[str, Any]) -> None:
    """Mark folders as complete, once everything in them is on disk."""
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        os.sync()
        for folder in folders:
            (folder / "made.json").write_text(json.dumps(facts), encoding="utf-8")


@dataclass
class History:
    """What this rank saw before: peaks of memory by contender and kind, the checksum that was judged by both."""

    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    checksums: dict[tuple[str, str], int] = field(default_factory=dict)


def measure(arguments: dict[str, Any]) -> None:
    """Every contender that needs this case, in rotating order; the first round is discarded."""
    case = Case(**arguments["case"])
    folders = {source: Path(folder) for source, folder in arguments["folders"].items()}
    held = Held(build_engine(case, saved=False))
    runners = {key: build_runner(key, held, folders, case.stage) for key in arguments["contenders"]}
    meter = Meter(arguments["cold"])
    gc.collect()
    gc.freeze()  # what was imported and built: a second a collection otherwise, in and between loads
    history = History()
    samples: list[dict[str, Any]] = []
    for number in range(arguments["repeats"] + 1):
        for key in shuffled(list(runners), number):
            for kind in arguments["kinds"][key]:
                sample = _turn(runners[key], key, kind, meter, history)
                samples.append({"contender": key, "kind": kind, "round": number, **sample})
            runners[key].drop()
        if dist.get_rank() == 0:
            print(f"round {number} of {arguments['repeats']} done", flush=True)
    if dist.get_rank() == 0:
        Path(arguments["out"]).write_text(json.dumps(samples), encoding="utf-8")


def _turn(runner: Runner, key: str, kind: str, meter: Meter, history: History) -> dict[str, Any]:
    """One load, measured, and judged: exactly the first time, by a checksum of it later. Collective."""
    kept_nbytes = runner.prepare(kind)
    peak_nbytes = history.peaks.get((key, kind), 0)
    cost = meter.measure(lambda: runner.load(kind), runner.folder, max(kept_nbytes, peak_nbytes))
    total = checksum(runner.parts())
    is_first = (key, kind) not in history.checksums
    verdict = agreed(runner.judge() if is_first else {"same as judged": total == history.checksums[key, kind]})
    # what a load keeps has to be new to the process, or the kind of memory is not what it is called
    verdict |= agreed({"fresh memory": cost.peak_nbytes > 0.8 * kept_nbytes or not kept_nbytes})
    verdict |= agreed({"lent memory": cost.lent_nbytes >= max(kept_nbytes, peak_nbytes)})
    history.checksums.setdefault((key, kind), total)
    history.peaks[key, kind] = max(peak_nbytes, cost.peak_nbytes)
    mine = {
        **asdict(cost),
        "extra_nbytes": max(cost.peak_nbytes - kept_nbytes, 0),
        "owned_nbytes": runner.owned_nbytes,
        "tensor_nbytes": runner.tensor_nbytes,
        "phases": runner.phases,
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {"ranks": ranks, "restored": verdict}


_JOBS = {"save": save, "convert": convert, "measure": measure, "flat_save": flat_save, "flat_load": flat_load}
_JOBS["pretrained"] = lambda arguments: importlib.import_module("benchmarks.pretrained_jobs").pretrained(arguments)
_JOBS["bucket"] = lambda arguments: importlib.import_module("benchmarks.bucket_jobs").bucket(arguments)
_JOBS["sparse_save"] = lambda arguments: importlib.import_module("benchmarks.sparse_jobs").sparse_save(arguments)
_JOBS["sparse_load"] = lambda arguments: importlib.import_module("benchmarks.sparse_jobs").sparse_load(arguments)
_JOBS["generate"] = lambda arguments: importlib.import_module("benchmarks.generated").generate(arguments)


def main() -> int:
    """Fork the ranks of the job that the command line names; 0 if all end well. The first that does not ends them all.

    Importing torch and DeepSpeed takes seconds: it is done once, in this process, which does nothing else.
    """
    name, arguments, logs = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    _end_with_parent()
    info = json.loads(os.environ[CPU_INFO])
    cpuinfo.get_cpu_info = lambda: info
    if name != "convert":
        importlib.import_module("torch._dynamo")  # DeepSpeed's initialize imports it
    gc.collect()
    gc.freeze()
    ranks = set[int]()
    for rank, log in enumerate(logs):
        ranks.add(_fork(name, arguments, rank, len(logs), log))
        if arguments.get("one_by_one") and os.waitstatus_to_exitcode(os.waitpid(ranks.pop(), 0)[1]):
            return 1
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(name: str, arguments: dict[str, Any], rank: int, world_size: int, log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _end_with_parent()
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        world_size = arguments.get("believed", world_size)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        if arguments.get("one_by_one") or "believed" in arguments:
            privates.believe_in_others(rank, world_size)
        if name != "convert":
            deepspeed.init_distributed("gloo")
        _JOBS[name](arguments)
        code = 0
    except BaseException:  # the end of this process, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # DeepSpeed's threads and gloo's take seconds to end


if __name__ == "__main__":
    sys.exit(main())

"""What a load into a GPU restores and how fast it is; see ``launch/gpu.sh``.

Every cell is a checkpoint that a job of real ranks has saved, loaded into an engine of other ranks, and judged through
DeepSpeed's own getters. Several ranks share the one GPU and talk through gloo; a single one has NCCL.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.distributed.launch import end, end_with_parent, start

REPO = Path(__file__).parents[1]
SECTION = re.compile(r"(<!-- written by launch/gpu.sh -->\n).*?(<!-- end of gpu -->)", re.DOTALL)
#: Saved by so many ranks, loaded by so many.
DEGREES = ((2, 3), (2, 1), (1, 2))
_SECONDS = 420
#: By which losses of the run that goes on may differ: ranks add up in another order.
_LOSS_GAPS = {"fp32": 1e-4}
_OTHER_LOSS_GAP = 2e-2
_MIB, _GB = 1 << 20, 1e9


@dataclass(frozen=True)
class Group:
    """Setups that are loaded into each other, whose arguments are as those of the tests' ``Setup``."""

    name: str
    setups: tuple[tuple[Any, ...], ...]  # stage, precision, optimizer, offload
    jobs: str = "jobs"  # module of the tests' jobs
    needs: str = ""  # a package, or an op that DeepSpeed compiles


OPTIMIZER, PARAM = (f"offload_{what}" for what in ("optimizer", "param"))
GROUPS = (
    *(Group(f"ZeRO 0 to 3, {kind}", tuple((stage, kind) for stage in range(4))) for kind in ("fp32", "bf16", "fp16")),
    Group(
        "CPU offload",
        (
            (1, "bf16", "cpuadam", (OPTIMIZER,)),
            (2, "fp16", "cpuadam", (OPTIMIZER,)),
            (3, "bf16", "cpuadam", (OPTIMIZER,)),
            (3, "bf16", "cpuadam", (OPTIMIZER, PARAM)),
            (3, "bf16"),
        ),
        needs="CPUAdamBuilder",
    ),
    Group(
        "FusedAdam",
        ((0, "bf16", "fusedadam"), (1, "bf16", "fusedadam"), (2, "fp16", "fusedadam"), (3, "bf16", "fusedadam")),
        needs="FusedAdamBuilder",
    ),
    Group(
        "bitsandbytes, 8 bits",
        tuple((stage, kind, "bnb.AdamW8bit") for stage in (1, 2, 3) for kind in ("fp32", "bf16")),
        "optimizer_jobs",
        needs="bitsandbytes",
    ),
)


def setups_of(group: Group) -> list[Any]:
    """The setups of a group."""
    from tests.distributed.model import Setup  # noqa: PLC0415  it imports torch and DeepSpeed

    made = []
    for stage, precision, *more in group.setups:
        optimizer, offload = (*more, *("adamw", ())[len(more) :])
        zero = tuple((each, {"device": "cpu", "pin_memory": True}) for each in offload)
        made.append(Setup(stage, precision, optimizer, zero=zero))
    return made


def missing(group: Group) -> str:
    """Why a group cannot run here."""
    if group.needs.endswith("Builder"):
        from deepspeed.ops import op_builder  # noqa: PLC0415

        try:
            getattr(op_builder, group.needs)().load(verbose=False)
        except Exception as error:
            return f"DeepSpeed cannot build it: {str(error).strip().splitlines()[-1:]}"
    elif group.needs and importlib.util.find_spec(group.needs) is None:
        return f"{group.needs} is not installed"
    return ""


class Launcher:
    """Starts jobs of ranks that share a GPU."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device

    def __call__(self, ranks: int, job: str, arguments: Any, name: str) -> list[Any]:
        """What a job has found on all ranks; :class:`RuntimeError` with the end of its log if it failed."""
        # of several ranks on one GPU, gloo sends what is on it too; what checks 8-bit states sends tensors of the host
        alone = "cpu:gloo,cuda:nccl" if job.startswith("optimizer_jobs") else "nccl"
        backend = alone if ranks == 1 and self._device == "cuda" else "gloo"
        mail, log = self._folder / "mail", self._folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        mail.write_bytes(pickle.dumps((job, arguments, backend, self._device)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        # more than there are ranks: DeepSpeed would take its shared-memory all-reduce for CPUs
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": "64", "DS_ACCELERATOR": self._device}
        process = start([*torchrun, __file__, "--mail", str(mail)], environment, log)
        try:
            code = process.wait(_SECONDS)
            failed = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = f"still running after {_SECONDS} s"
        finally:
            end(process)
        if failed:
            errors = re.findall(r"^.*Error.*$", log.read_text(errors="replace"), re.MULTILINE)
            raise RuntimeError(f"{failed}: {(errors or ['see the log'])[0][:300]} ({log})")
        found: list[Any] = pickle.loads(mail.read_bytes())
        return found


def work(mail: Path) -> None:
    """One rank of a job."""
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    end_with_parent()
    job, arguments, backend, device = pickle.loads(mail.read_bytes())
    os.environ["LOCAL_RANK"] = "0"  # all ranks share the first GPU
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend)  # which DeepSpeed takes over
    deepspeed.init_distributed(dist_backend=backend)
    module, _, function = job.rpartition(".")
    found = (
        globals()[function] if not module else getattr(importlib.import_module(f"tests.distributed.{module}"), function)
    )
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, found(arguments))
    if dist.get_rank() == 0:
        mail.write_bytes(pickle.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def try_group(group: Group, launch: Callable[..., list[Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """The cells of a group: each setup loaded into each other, at each of the degrees."""
    if why := missing(group):
        yield {"group": group.name, "skipped": why}
        return
    setups = setups_of(group)
    for saved, live in DEGREES:
        about = {"group": group.name, "saved by": saved, "loaded by": live}
        slug = f"{re.sub(r'[^a-z0-9]+', '-', group.name.lower())}-{saved}-{live}"
        place = folder / "checkpoints" / slug
        sources = [{"folder": str(place / f"{each.name}-dp{saved}"), "format": "native"} for each in setups]
        targets = [{"setup": each, "sources": sources, "continue": range(len(sources))} for each in setups]
        try:
            launch(saved, f"{group.jobs}.save", {"folder": str(place), "setups": setups}, f"{slug}-save")
            arguments = {"targets": targets} if group.jobs == "jobs" else targets
            ranks = launch(live, f"{group.jobs}.load", arguments, f"{slug}-load")
        except RuntimeError as error:
            yield about | {"failed": str(error)}
            continue
        finally:
            shutil.rmtree(place, ignore_errors=True)
        for target, loads in zip((each for each in setups for _ in sources), zip(*ranks, strict=True), strict=True):
            yield about | judged(loads, target)


def judged(loads: tuple[Any, ...], target: Any) -> dict[str, Any]:
    """What all ranks found of one load."""
    wrong = {key: text for load in loads for key, text in load.differences.items()}
    states, requantized = getattr(loads[0], "states", {}), getattr(loads[0], "requantized", 0)
    if not requantized:  # blocks that were cut may change within the bound that is checked as they are written
        wrong |= states
    gap = max(load.loss_gap for load in loads)
    if gap > (allowed := _OTHER_LOSS_GAP if requantized else _LOSS_GAPS.get(target.precision, _OTHER_LOSS_GAP)):
        wrong["losses"] = f"off by {gap}, more than {allowed}"
    source = Path(loads[0].case["folder"]).name
    return {"source": source, "target": target.name, "wrong": wrong, "loss gap": gap, "requantized blocks": requantized}


def throughput(arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes of loads into one GPU, of reading the same files, and of copying as many bytes."""
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415

    import elastic_ckpt  # noqa: PLC0415

    elastic_ckpt.install()
    device, folder = torch.device(arguments["device"]), arguments["folder"]
    width, precision = 4096, {"bf16": {"enabled": True}}
    layers = max(1, round(arguments["params"] / width**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {"train_batch_size": 1, "zero_optimization": {"stage": arguments["stage"]}, **precision}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16, device=device)).float().sum())
    engine.step()
    engine.save_checkpoint(folder)
    seconds: dict[str, list[float]] = {"load": [], "read": [], "copy": [], "preadv": []}
    for _ in range(arguments["repeats"] + 1):
        began = time.perf_counter()
        engine.load_checkpoint(folder)
        _synchronize(device)
        work = engine.elastic_report.ranks[0]
        seconds["load"].append(time.perf_counter() - began)
        seconds["read"].append(work.seconds["read"])
        seconds["copy"].append(copy_seconds(work.read.nbytes, device))
        seconds["preadv"].append(read_seconds(folder, work.read.nbytes, device))
    found = {key: median(values[1:]) for key, values in seconds.items()}
    return {"nbytes": work.read.nbytes, "staged_nbytes": work.read.staged_nbytes, "stage": arguments["stage"], **found}


def _synchronize(device: Any) -> None:
    import torch  # noqa: PLC0415

    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def copy_seconds(nbytes: int, device: Any) -> float:
    """Seconds to copy so many bytes from pinned memory, 64 MiB at a time."""
    import torch  # noqa: PLC0415

    host = torch.empty(64 * _MIB, dtype=torch.uint8, pin_memory=device.type != "cpu").fill_(1)
    there = torch.empty_like(host, device=device)
    _synchronize(device)
    began = time.perf_counter()
    for first in range(0, nbytes, host.numel()):
        part = min(host.numel(), nbytes - first)
        there[:part].copy_(host[:part], non_blocking=True)
    _synchronize(device)
    return time.perf_counter() - began


def read_seconds(folder: str, nbytes: int, device: Any) -> float:
    """Seconds to read so many bytes of a folder's files into pinned memory by four threads, 16 MiB at a time."""
    import torch  # noqa: PLC0415

    sizes = {path: path.stat().st_size for path in Path(folder).rglob("*.pt")}
    chunks = [(path, first) for path, size in sizes.items() for first in range(0, size, 16 * _MIB)]
    buffers = [torch.empty(16 * _MIB, dtype=torch.uint8, pin_memory=device.type != "cpu").fill_(1) for _ in range(4)]
    chunks = chunks[: -(-nbytes // (16 * _MIB))]

    def read(number: int) -> None:
        for path, first in chunks[number :: len(buffers)]:
            with path.open("rb", buffering=0) as stream:
                os.preadv(stream.fileno(), [buffers[number].numpy().data], first)

    began = time.perf_counter()
    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(read, range(len(buffers))))
    return time.perf_counter() - began


def table(found: dict[str, Any]) -> str:
    """What was found, as a page shows it."""
    lines = ["| | saved by → loaded by | loads | bit-equal, and losses go on |", "|---|---|---|---|"]
    cells = found["cells"]
    for name in dict.fromkeys(cell["group"] for cell in cells):
        for saved, live in DEGREES:
            here = [cell for cell in cells if (cell["group"], cell.get("saved by")) == (name, saved)]
            here = [cell for cell in here if cell["loaded by"] == live]
            if here:
                right = sum(cell.get("wrong") == {} for cell in here)
                failed = next((f": {cell['failed'].splitlines()[0][:80]}" for cell in here if "failed" in cell), "")
                cut = sum(cell.get("requantized blocks", 0) > 0 for cell in here)
                bounded = f", of which {cut} within the bound of blocks that were cut" if cut else ""
                lines.append(f"| {name} | {saved} → {live} | {len(here)} | {right}{bounded}{failed} |")
        skipped = [cell["skipped"] for cell in cells if cell["group"] == name and "skipped" in cell]
        lines += [f"| {name} | | | not run: {skipped[0]} |"] if skipped else []
    lines += ["", "| | GB | load s | reading s | GB/s | bare copy GB/s | times the copy | `preadv` GB/s |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for each in found["throughput"]:
        if "failed" in each:
            lines.append(f"| failed: {each['failed'][:80]} | | | | | | | |")
            continue
        speed, copy, preadv = (each["nbytes"] / each[key] / _GB for key in ("read", "copy", "preadv"))
        times = f"{each['nbytes'] / _GB:.2f} | {each['load']:.2f} | {each['read']:.2f} | {speed:.1f} | {copy:.1f}"
        lines.append(f"| ZeRO-{each['stage']}, bf16, one rank | {times} | {copy / speed:.2f} | {preadv:.1f} |")
    about = found["machine"]
    versions = f"torch {about['torch']}, DeepSpeed {about['deepspeed']}"
    lines += ["", f"{about['gpu']}, {about['cores']} cores, {versions}; pages cached; {about['when'][:10]}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu_results"))
    parser.add_argument("--on-cpu", action="store_true", help="a rehearsal of this script, without a GPU")
    parser.add_argument("--only", default="", help="groups whose names contain this")
    parser.add_argument("--params", type=int, default=300_000_000, help="of the model whose load is timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mail", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mail is not None:
        work(options.mail)
        return 0
    try:
        import torch  # noqa: PLC0415

        has_gpu = torch.cuda.is_available()
    except ModuleNotFoundError:
        has_gpu = False
    if not (has_gpu or options.on_cpu):
        print(f"{sys.executable} sees no GPU: nothing was tried (ELASTIC_CKPT_PYTHON names another Python)")
        return 0
    from benchmarks import machine  # noqa: PLC0415

    device, folder = "cpu" if options.on_cpu else "cuda", options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["DS_ACCELERATOR"] = device
    launch = Launcher(folder, device)
    gpu = "CPU" if options.on_cpu else torch.cuda.get_device_name(0)
    found: dict[str, Any] = {"machine": machine.describe() | {"gpu": gpu}, "cells": [], "throughput": []}
    for group in (each for each in GROUPS if options.only in each.name):
        print(group.name, flush=True)
        for cell in try_group(group, launch, folder):
            found["cells"].append(cell)
            if cell.get("wrong") or "failed" in cell:
                print(json.dumps(cell), flush=True)
    for stage in (2, 3):
        place = folder / "checkpoints" / "timed"
        arguments = {"device": device, "folder": str(place), "stage": stage}
        try:
            arguments |= {"params": options.params, "repeats": options.repeats}
            found["throughput"] += launch(1, "throughput", arguments, f"throughput-{stage}")
        except RuntimeError as error:
            found["throughput"].append({"failed": str(error)})
        shutil.rmtree(place, ignore_errors=True)
    (folder / "gpu.json").write_text(json.dumps(found, indent=1))
    text = table(found)
    (folder / "gpu.md").write_text(text)
    if not options.on_cpu:
        page = REPO / "docs" / "benchmarks.md"
        page.write_text(SECTION.sub(lambda match: match[1] + text + match[2], page.read_text()))
    print(text)
    every = [*found["cells"], *found["throughput"]]
    return int(any(each.get("wrong") or "failed" in each for each in every))


if __name__ == "__main__":
    sys.exit(main())

"""Jobs of a few processes that measure what :mod:`elastic_ckpt.scaling` models."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from elastic_ckpt import parallel
from elastic_ckpt.catalog import MASTER, SourceFile
from elastic_ckpt.destinations import Destinations
from elastic_ckpt.dtypes import ITEMSIZE
from elastic_ckpt.forecast import Reads, reads_of
from elastic_ckpt.opened import config_of, locate, open_checkpoint
from elastic_ckpt.plan import Copy, Plan, Slot
from elastic_ckpt.reader import ReadOptions, execute

FRESH, TOUCHED, STAGED = "fresh", "touched", "staged"
#: Reads with gaps between them are not to be joined.
OPTIONS = ReadOptions(progress=False, gap_nbytes=0)
#: Runs of a point, of which the first is not counted: pages that the machine had given away come back in it.
_RUNS, _RUNS_OF_SLOW, _SLOW_S = 4, 2, 0.3
_GAP_NBYTES = 64
_JOB_TIMEOUT_S = 400.0
#: Of tensors in a synthetic checkpoint: elements of a parameter.
_NUMEL = 8


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """A plan to execute: bytes, in so many reads (before long ones are split) from so many files.

    Attributes:
        nbytes: of one rank.
        reads: with a gap between them, so that they cannot be joined.
        files: over which they are spread.
        pieces: of the slot that each of them fills.
        memory: that is filled: touched before, fresh, or, through bounce buffers, touched before.
    """

    nbytes: int
    reads: int
    files: int
    pieces: int
    memory: str


@dataclass(frozen=True, slots=True)
class SavePoint:
    """A checkpoint whose metadata is read: ZeRO-1 at some data-parallel degree, of some parameters."""

    dp: int
    parameters: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"dp{self.dp}-of-{self.parameters}"


@dataclass(frozen=True, slots=True)
class Work:
    """What a job measures: reads from these files, and metadata of the checkpoints in a folder."""

    reads: tuple[ReadPoint, ...]
    saves: tuple[SavePoint, ...]
    files: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of the points of a job, of a round of all ranks, and what each checkpoint holds."""

    reads: list[float]
    saves: list[float]
    round: float


def read_points() -> tuple[ReadPoint, ...]:
    """From 4 MB to 400 MB, 1 to 20,000 reads, of 200 bytes to 16 MiB."""
    found = []
    for size, nbytes in enumerate((4_000_000, 40_000_000, 400_000_000)):
        for count, reads in enumerate((1, 50, 1_000, 20_000 if size != 1 else 5_000)):
            for kind, memory in enumerate((TOUCHED, FRESH, STAGED)):
                files = (1, 8, 64)[(size + count + kind) % 3]
                pieces = (1, 1, 16)[(count + 2 * kind) % 3] if memory != STAGED and reads < 5_000 else 1
                fewer = min(reads, 2_000) if memory == STAGED else reads  # they take ten times as long
                found.append(ReadPoint(nbytes, fewer, min(files, fewer), pieces, memory))
    found += [ReadPoint(4_000_000, files, files, 1, TOUCHED) for files in (8, 64)]
    found += [ReadPoint(40_000_000, 40, 1, pieces, TOUCHED) for pieces in (100, 500)]
    return tuple(found)


def save_points() -> tuple[SavePoint, ...]:
    """From few small files to many."""
    held = ((1, 20), (1, 200), (1, 600), (8, 20), (8, 200), (32, 20), (32, 100))
    return tuple(SavePoint(dp, parameters) for dp, parameters in held)


def write_data(folder: Path, nbytes: int, links: int) -> tuple[str, ...]:
    """One file of noise, under many names: each is opened as a file of its own, and all take the disk of one."""
    first = folder / "data0"
    noise = os.urandom(1 << 20)
    with first.open("wb") as stream:
        for _ in range(-(-nbytes // len(noise))):
            stream.write(noise)
    paths = [first] + [folder / f"data{number}" for number in range(1, links)]
    for path in paths[1:]:
        os.link(first, path)
    return tuple(map(str, paths))


def data_nbytes(points: Sequence[ReadPoint]) -> int:
    """How long the file must be."""
    return max(point.nbytes + point.reads * _GAP_NBYTES for point in points)


def plan_of(point: ReadPoint, paths: Sequence[str]) -> Plan:
    """The plan of a point; every file holds its own part of the bytes."""
    dtype = "int32" if point.memory == STAGED else "float32"  # another dtype than the slot's goes through a buffer
    numel = point.nbytes // point.reads // point.pieces // ITEMSIZE[dtype]
    gap = _GAP_NBYTES // ITEMSIZE[dtype]
    stride = numel * point.pieces + gap
    copies = []
    for file in range(point.files):
        first, stop = (number * point.reads // point.files for number in (file, file + 1))
        if point.pieces == 1:  # as the planner writes rows of a shard
            at, to = first * stride * ITEMSIZE[dtype], first * numel
            copies.append(Copy(file, at, 0, to, numel, dtype, stop - first, stride, numel))
            continue
        for read in range(first, stop):
            at, to = read * stride * ITEMSIZE[dtype], read * numel * point.pieces
            copies.append(Copy(file, at, 0, to, numel, dtype, point.pieces, numel, numel))
    slot = Slot("exp_avg" if point.memory == FRESH else MASTER, 0, "", numel * point.pieces * point.reads, "float32")
    return Plan(tuple(SourceFile(path, 0) for path in paths[: point.files]), (slot,), tuple(copies))


def reads_in(plan: Plan) -> Reads:
    """What a forecast says about a plan."""
    nothing = Destinations(0, 1, 0, "", (), (), (), ())
    return reads_of(nothing, plan, OPTIONS, on_accelerator=False)


def write_save(folder: Path, point: SavePoint) -> None:
    """A ZeRO-1 checkpoint as DeepSpeed writes it, of tiny parameters."""
    tag = folder / point.name / "step1"
    tag.mkdir(parents=True)
    (tag.parent / "latest").write_text("step1")
    names = [f"model.layers.{number}.self_attention.weight" for number in range(point.parameters)]
    numel = _NUMEL * len(names)
    part = -(-numel // (2 * point.dp)) * 2
    common = {"ds_config": {"zero_optimization": {"stage": 1}}, "ds_version": "0.19.8"}
    model = {
        "module": {name: torch.zeros(_NUMEL) for name in names},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: torch.Size([_NUMEL]) for name in names}],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 1,
        "global_samples": 1,
        "dp_world_size": point.dp,
        "mp_world_size": 1,
        **common,
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    for rank in range(point.dp):
        stop = min((rank + 1) * part, numel)
        held = max(stop - rank * part, 0)
        mine = range(rank * part // _NUMEL, -(-stop // _NUMEL)) if held else range(0)
        group = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "params": [0]}
        states = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(part), "exp_avg_sq": torch.zeros(part)}
        optimizer = {
            "base_optimizer_state": {"state": {0: states}, "param_groups": [group]},
            "single_partition_of_fp32_groups": [torch.zeros(held)],
            "zero_stage": ZeroStageEnum.optimizer_states,
            "group_paddings": [part - held],
            "partition_count": [point.dp],
            "ds_version": "0.19.8",
            "param_slice_mappings": [{names[number]: fragment_address(_NUMEL, 0) for number in mine}],
        }
        path = tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, **common}, path)


def run_job(ranks: int, work: Work) -> Timed:
    """Measure on so many processes, forked from this one.

    Raises:
        RuntimeError: one of them failed, or took too long.
    """
    folder = Path(work.folder)
    store, result = folder / f"store{ranks}", folder / f"result{ranks}.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, ranks, work, store, result)) for rank in range(ranks)]
    for process in processes:
        process.start()
    limit = time.monotonic() + _JOB_TIMEOUT_S
    for process in processes:
        process.join(max(limit - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    if any(codes) or None in codes:
        raise RuntimeError(f"a job of {ranks} ranks failed: exit codes {codes} (None: it took too long)")
    return Timed(**json.loads(result.read_text()))


def _rank(rank: int, ranks: int, work: Work, store: Path, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    reads = [_time_reading(point, work.files) for point in work.reads]
    saves = []
    for point in work.saves:
        found = locate(str(Path(work.folder) / point.name), None)
        saves.append(_time(partial(open_checkpoint, found, config_of(None))))
    every_round = _time(lambda: [parallel.share(None) for _ in range(50)]) / 50
    if rank == 0:
        result.write_text(json.dumps({"reads": reads, "saves": saves, "round": every_round}))
    dist.barrier()
    dist.destroy_process_group()


def _time_reading(point: ReadPoint, paths: Sequence[str]) -> float:
    plan = plan_of(point, paths)
    numel = plan.slots[0].numel
    if point.memory == FRESH:
        memories: Iterator[mmap.mmap] = iter(lambda: mmap.mmap(-1, numel * 4), None)
        return _time(lambda tensor: execute(plan, [tensor], OPTIONS, False), lambda: _over(next(memories), numel))
    tensor = torch.zeros(numel)
    return _time(lambda: execute(plan, [tensor], OPTIONS, False))


def _over(memory: mmap.mmap, numel: int) -> torch.Tensor:
    """A tensor over pages that no process has touched: an allocator would give out those that it got back."""
    return torch.frombuffer(memory, dtype=torch.float32, count=numel)


def _time(do: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> float:
    """Median seconds, from when the first rank begins to when the last one is done; the first run is not counted."""
    found: list[float] = []
    while len(found) < (_RUNS_OF_SLOW if found and found[0] > _SLOW_S else _RUNS):
        arguments = () if prepare is None else (prepare(),)
        dist.barrier()
        start = time.monotonic()  # one clock for all processes of a machine
        do(*arguments)
        stop = time.monotonic()
        del arguments
        times = parallel.share((start, stop))
        found.append(max(stop for _, stop in times) - min(start for start, _ in times))
    return median(found[1:])

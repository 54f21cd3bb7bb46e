"""Measures how the steps of a load scale on this machine, and writes the fit: ``python -m benchmarks.scaling``.

It takes two to three minutes, 0.5 GB of disk and 2 GB of memory, and reads what it has just written, from the page
cache: what a disk or a network file system gives is no part of the fit, but an input of every forecast
(``elastic-ckpt plan --bandwidth``).
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.scaling_fit import Measured, checks, errors, fit
from benchmarks.scaling_jobs import (
    OPTIONS,
    Timed,
    Work,
    data_nbytes,
    plan_of,
    read_points,
    reads_in,
    run_job,
    save_points,
    write_data,
    write_save,
)
from elastic_ckpt.opened import config_of, load_options, locate, open_checkpoint
from elastic_ckpt.planner import plan_load
from elastic_ckpt.ready_configs import config_folder
from elastic_ckpt.scaling import (
    DEFAULT_SCALING,
    Coefficients,
    Factors,
    HeldOut,
    Room,
    Scaling,
    agreeing_factors,
    metadata_factors,
    opening_factors,
    planning_factors,
    reading_factors,
)
from elastic_ckpt.timing import saved_of
from elastic_ckpt.virtual import Topology, VirtualJob
from elastic_ckpt.virtual.scale import scale_catalog
from elastic_ckpt.virtual.scale_config import load_scale

_RANKS = (1, 2, 4)
#: Model, preset, and topologies (dp, tp, pp, ZeRO stage) whose planning is timed.
_PLANNED = (
    ("bloom-176b", "bloom", ((8, 4, 12, 1), (4, 8, 6, 1), (48, 8, 1, 3), (16, 1, 1, 1), (64, 4, 2, 3))),
    ("104b", "megatron-deepspeed-interleaved", ((32, 4, 4, 1), (8, 8, 2, 3), (4, 2, 1, 2), (16, 4, 1, 3))),
)
_PLAN_RUNS = 3


def main() -> None:
    """Measure, fit, check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=config_folder("scaling") / f"{DEFAULT_SCALING}.json")
    parser.add_argument("--points", type=Path, help="write every measured point and its prediction to this file (TSV)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    measured = measure(os.cpu_count() or 1)
    scaling = scaling_of(measured)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(scaling.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if arguments.points is not None:
        arguments.points.write_text(listed(measured, scaling.coefficients), encoding="utf-8")
    show(scaling, measured)
    print(f"written to {arguments.out}, after {time.monotonic() - start:.0f} s")


def measure(cores: int) -> dict[str, list[Measured]]:
    """Points by what they are about."""
    found: dict[str, list[Measured]] = {"reading": [], "metadata": [], "agreeing": [], "planning": planning_points()}
    with tempfile.TemporaryDirectory(prefix="elastic_ckpt_scaling_") as folder:
        points, saves = read_points(), save_points()
        files = write_data(Path(folder), data_nbytes(points), max(point.files for point in points))
        for save in saves:
            write_save(Path(folder), save)
        work = Work(points, saves, files, folder)
        for ranks in _RANKS:
            print(f"measuring on {ranks} ranks", file=sys.stderr, flush=True)
            add_job(found, run_job(ranks, work), work, Room(ranks, cores, OPTIONS.threads))
    return found


def add_job(found: Mapping[str, list[Measured]], timed: Timed, work: Work, room: Room) -> None:
    """The points of one job, as the model sees them."""
    for point, seconds in zip(work.reads, timed.reads, strict=True):
        task = reads_in(plan_of(point, work.files)).work
        factors: Factors = {**reading_factors(task, room), **opening_factors(task, room)}
        found["reading"].append(Measured(factors, seconds, room.ranks))
    for save, seconds in zip(work.saves, timed.saves, strict=True):
        opened = open_checkpoint(locate(str(Path(work.folder) / save.name), None), config_of(None))
        held = saved_of(opened.checkpoint.catalog, tp=1, stages=1)
        factors = metadata_factors(held.files, held.parameters, held.extents, room.ranks, room)
        found["metadata"].append(Measured(factors, seconds, room.ranks))
    if room.ranks > 1:
        found["agreeing"].append(Measured(agreeing_factors(room.ranks, rounds=1), timed.round, room.ranks))


def planning_points() -> list[Measured]:
    """Plans of single ranks of big models, in this process."""
    found = []
    alone = Room(1, 1, 1)
    for name, preset, topologies in _PLANNED:
        catalog = scale_catalog(load_scale(name))
        for dp, tp, pp, stage in topologies:
            options = load_options(config_of(None, tp_preset=preset))
            job = VirtualJob(catalog, Topology(dp=dp, tp=tp, pp=pp, zero_stage=stage), options)
            for rank in (0, job.topology.ranks // 2 + 1):
                destinations = job.destinations(job.topology.place(rank))
                plan = plan_load(job.catalog, destinations, job.options)
                seconds = _median_of(partial(plan_load, job.catalog, destinations, job.options))
                copies = len(plan.copies) + len(plan.recodes)
                saved = saved_of(job.catalog, tp, pp)
                factors = planning_factors(saved.extents / pp, copies, saved.recut, alone)
                found.append(Measured(factors, seconds, 1))
    return found


def _median_of(do: Callable[[], object]) -> float:
    times = []
    for _ in range(_PLAN_RUNS):
        start = time.perf_counter()
        do()
        times.append(time.perf_counter() - start)
    return median(times)


def scaling_of(measured: Mapping[str, Sequence[Measured]]) -> Scaling:
    """The fit of all points, and how far fits without some of them were off there."""
    coefficients: dict[str, float] = {}
    held_out: dict[str, HeldOut] = {}
    for step, points in measured.items():
        coefficients |= fit(points)
        held_out |= {f"{step}: {name}": result for name, result in checks(points).items()}
    return Scaling(
        machine=machine(),
        cores=os.cpu_count() or 1,
        measured=datetime.date.today().isoformat(),
        coefficients=Coefficients(**coefficients),
        held_out=held_out,
    )


def machine() -> str:
    """This machine, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    software = f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, pages cached; {software}"


def listed(measured: Mapping[str, Sequence[Measured]], coefficients: Coefficients) -> str:
    """Every point: what it is about, ranks, seconds measured and predicted, and the factors."""
    rows = ["step\tranks\tseconds\tpredicted\tfactors"]
    for step, points in measured.items():
        for point in points:
            factors = " ".join(f"{name}={count:g}" for name, count in point.factors.items())
            predicted = coefficients.of(point.factors)
            rows.append(f"{step}\t{point.ranks}\t{point.seconds:.6f}\t{predicted:.6f}\t{factors}")
    return "\n".join(rows) + "\n"


def show(scaling: Scaling, measured: Mapping[str, Sequence[Measured]]) -> None:
    """Print the coefficients, and how far off they are."""
    table = Table("coefficient", "seconds", title=scaling.machine)
    for name, seconds in scaling.coefficients.model_dump().items():
        table.add_row(name, f"{seconds:.3g}")
    relative = Table("relative errors", "points", "median", "worst")
    for step, points in measured.items():
        found = errors(scaling.coefficients.model_dump(), points)
        relative.add_row(f"{step}: fitted", str(len(points)), f"{median(found):.0%}", f"{max(found):.0%}")
    for name, held in scaling.held_out.items():
        relative.add_row(name, str(held.points), f"{held.median:.0%}", f"{held.worst:.0%}")
    console = Console(width=110)
    console.print(table)
    console.print(relative)


if __name__ == "__main__":
    main()

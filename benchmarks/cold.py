"""``python -m benchmarks.cold FOLDER``: loads of checkpoints that no page cache has, beside what the disk gives.

The disk is read by ``dd`` with O_DIRECT, all of the same files at once, right after each load.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import machine
from benchmarks.cases import MODELS, NATIVE, RESUME, Case
from benchmarks.generated import Layout, write
from benchmarks.launching import Launcher
from benchmarks.results import Target
from benchmarks.table import table_of

app = typer.Typer(add_completion=False)
#: ZeRO stage and ranks of the save, and of the load.
_Move = tuple[tuple[int, int], tuple[int, int]]
_MOVES: tuple[_Move, ...] = (((3, 2), (3, 4)), ((1, 2), (3, 2)))
_MIB, _GB = 1 << 20, 1e9
_OF_THE_METER = ("lent memory", "fresh memory")  # of machines that have less than the job takes
_SECONDS = 3600


def disk_seconds(folder: Path) -> tuple[int, float]:
    """Bytes of a folder's files, and the seconds in which ``dd`` reads them past the page cache."""
    files = [path for path in folder.rglob("*.pt") if path.stat().st_size > _MIB]
    began = time.perf_counter()
    command = ["dd", "of=/dev/null", f"bs={16 * _MIB}", "iflag=direct", "status=none"]
    running = [subprocess.Popen([*command, f"if={path}"]) for path in files]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError(f"dd failed to read {folder} with O_DIRECT")
    return sum(path.stat().st_size for path in files), time.perf_counter() - began


def measure(params: str, move: _Move, out: Path, launcher: Launcher, repeats: int) -> Iterator[Any]:
    """Loads of a checkpoint that is written for them and removed afterwards: what all ranks measured, and the disk."""
    (saved_stage, saved_dp), (stage, dp) = move
    layout, raw = Layout(params, saved_stage, saved_dp), out / "cold-raw.json"
    write([layout], out, launcher.extensions)
    folder = out / layout.name
    arguments = {
        "case": asdict(Case(params, stage, saved_dp, dp)),
        "folders": {NATIVE: str(folder.resolve())},
        "contenders": [NATIVE],
        "repeats": 1,
        "cold": True,
        "kinds": {NATIVE: [RESUME]},
        "out": str(raw.resolve()),
    }
    for _ in range(repeats):
        launcher.run(dp, "measure", arguments, _SECONDS)
        sample = json.loads(raw.read_text(encoding="utf-8"))[-1]
        nbytes, seconds = disk_seconds(folder)
        ranks = sample["ranks"]
        found = {
            "nbytes": sum(rank["tensor_nbytes"] for rank in ranks),
            "seconds": max(rank["seconds"] for rank in ranks),
            "disk_nbytes": nbytes,
            "disk_seconds": seconds,
            "extra_nbytes": max(rank["extra_nbytes"] for rank in ranks),
            "wrong": [what for what, right in sample["restored"].items() if not right and what not in _OF_THE_METER],
        }
        yield {"move": f"ZeRO-{saved_stage}, DP {saved_dp} → ZeRO-{stage}, DP {dp}", "params": params, **found}
    shutil.rmtree(folder)


def by_move(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The measurements of each move."""
    found: dict[str, list[Any]] = {}
    for point in document.get("points", ()):
        found.setdefault(f"{point['params']} {point['move']}", []).append(point)
    return found


def _speeds(points: Sequence[Any]) -> tuple[float, float]:
    """Bytes per second of the loads, and of ``dd``."""
    ours = median(each["nbytes"] / each["seconds"] for each in points)
    return ours, median(each["disk_nbytes"] / each["disk_seconds"] for each in points)


def table_rows(document: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Heads, then a row for each move."""
    yield "load", "GB", "seconds", "GB/s", "dd, GB/s", "of it", "extra MiB", "wrong"
    for move, points in by_move(document).items():
        ours, disk = _speeds(points)
        nbytes, seconds = points[0]["nbytes"] / _GB, median(each["seconds"] for each in points)
        extra = f"{max(each['extra_nbytes'] for each in points) / _MIB:.0f}"
        wrong = ", ".join(sorted({what for each in points for what in each["wrong"]})) or "nothing"
        speeds = (f"{ours / _GB:.2f}", f"{disk / _GB:.2f}", f"{ours / disk:.2f}")
        yield move, f"{nbytes:.2f}", f"{seconds:.2f}", *speeds, extra, wrong


def aims(document: Mapping[str, Any]) -> Iterator[Target]:
    """What is aimed at, and what was measured; nothing for an empty document."""
    for move, points in by_move(document).items():
        ours, disk = _speeds(points)
        yield Target(f"{move}, cold: bytes per second / dd with O_DIRECT", ours / disk, 0.9, at_least=True)
        most = max(each["extra_nbytes"] for each in points) / _MIB
        yield Target(f"{move}, cold: extra memory of a rank, MiB", most, 64, at_least=False)


@app.command()
def main(
    folder: Path,
    params: Annotated[
        str, typer.Option(help=f"Of {', '.join(MODELS)}; 14 bytes of disk for each, 12 of memory.")
    ] = "1B",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    extensions: Annotated[Path, typer.Option(help="TORCH_EXTENSIONS_DIR.")] = Path("benchmark_results/extensions"),
) -> None:
    """Measure each move; cold.json in FOLDER has every measurement."""
    launcher = Launcher(folder / "logs", extensions)
    points: list[Any] = []
    for move in _MOVES:
        for point in measure(params, move, folder, launcher, repeats):
            points.append(point)
            machine.write_document(folder, "cold", points, repeats=repeats)
    Console(width=120).print(table_of(table_rows({"points": points})))


if __name__ == "__main__":
    app()

"""``python -m benchmarks.export``: a checkpoint's weights in one place, by elastic_ckpt and by ``zero_to_fp32.py``.

Every contender is a whole process, as a user starts it, imports included. torch is not imported here: what a process
has resident when it starts another one counts as the other's peak.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.cases import MODELS, NATIVE, Case, shuffled
from benchmarks.checkpoints import Store
from benchmarks.launching import Launcher
from benchmarks.results import Target

app = typer.Typer(add_completion=False)
OURS, THEIRS, FLOOR = "elastic-ckpt export", "zero_to_fp32.py", "dd of as many bytes"
_MIB = 1 << 20


@dataclass(frozen=True)
class ExportSample:
    """One run of a contender.

    Attributes:
        seconds, on_disk: until the process has ended, and until the kernel has also written its files to the disk.
        cpu: seconds of CPU, in the kernel too.
        peak_nbytes: most resident memory.
    """

    contender: str
    seconds: float
    on_disk: float
    cpu: float
    peak_nbytes: int


def commands(folder: Path, out: Path, nbytes: int) -> dict[str, list[str]]:
    """The command of each contender; ``nbytes`` are those of fp32 weights."""
    script = [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(out)]
    return {
        OURS: [sys.executable, "-m", "elastic_ckpt", "export", str(folder), str(out), "--json"],
        THEIRS: script,
        f"{THEIRS} --safe_serialization": [*script, "--safe_serialization"],
        FLOOR: ["dd", "if=/dev/zero", f"of={out}", f"bs={_MIB}", f"count={-(-nbytes // _MIB)}", "conv=fsync"],
    }


def run(contender: str, command: Sequence[str], out: Path) -> ExportSample:
    """Run a command that makes ``out``. Raises :class:`RuntimeError` if it fails."""
    os.sync()
    with open(out.with_name("log.txt"), "w+b") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{contender} failed: {log.read().decode(errors='replace')[-2000:]}")
    os.sync()
    on_disk = time.perf_counter() - begin
    return ExportSample(contender, seconds, on_disk, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def measure(folder: Path, out: Path, nbytes: int, repeats: int) -> list[ExportSample]:
    """All contenders in every round, in another order each time, after a round that does not count."""
    samples = []
    chosen = commands(folder, out, nbytes)
    for number in range(repeats + 1):
        for contender in shuffled(list(chosen), number):
            sample = run(contender, chosen[contender], out)
            samples += [sample] if number else []
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    return samples


def medians(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each figure's median, by contender."""
    found: dict[str, dict[str, float]] = {}
    for contender in dict.fromkeys(sample["contender"] for sample in samples):
        of_it = [sample for sample in samples if sample["contender"] == contender]
        keys = ("seconds", "on_disk", "cpu", "peak_nbytes")
        found[contender] = {key: statistics.median(sample[key] for sample in of_it) for key in keys}
    return found


def aims(document: Mapping[str, Any]) -> list[Target]:
    """What an export aims at, and what was measured; empty for an empty document."""
    if not document:
        return []
    case, found = Case(**document["case"]), medians(document["points"])
    load = document["load_average"][1]
    what = f"{case.params} ZeRO-{case.stage} of {case.saved_dp} ranks, export at a load average of {load}"
    return [Target(f"{what}: peak memory, MiB", found[OURS]["peak_nbytes"] / _MIB, 1024, at_least=False)]


def table_of(samples: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each contender."""
    table = Table("", "seconds", "until on disk", "seconds of CPU", "peak MiB", title="export, medians")
    for contender, each in medians(samples).items():
        seconds = (f"{each[key]:.1f}" for key in ("seconds", "on_disk", "cpu"))
        table.add_row(contender, *seconds, f"{each['peak_nbytes'] / _MIB:,.0f}")
    return table


@app.command()
def main(
    params: Annotated[str, typer.Option(help=f"Size: {', '.join(MODELS)}.")] = "270M",
    stage: Annotated[int, typer.Option(min=1, max=3)] = 3,
    dp: Annotated[int, typer.Option(min=1, help="Ranks that save.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("benchmark_results"),
    target: Annotated[Path | None, typer.Option(help="Folder to export into; --out by default.")] = None,
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
) -> None:
    """Measure the export of a checkpoint's weights in fp32: seconds and memory, against DeepSpeed's script."""
    console = Console(width=None if Console().is_terminal else 150)
    case = Case(params, stage, dp, dp)
    launcher = Launcher(out / "logs", extensions or out / "extensions")
    store = Store(out / "checkpoints", 1 << 40, launcher, lambda line: console.print(line, style="dim"))
    store.ensure(case, [NATIVE], 3600)
    place = (target or out).absolute() / "exported"
    place.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    samples = measure(store.folder(case, NATIVE), place / "weights", 4 * MODELS[params].numel, repeats)
    shutil.rmtree(place)
    points, load = list(map(asdict, samples)), (round(before, 1), round(os.getloadavg()[0], 1))
    machine.write_document(out, "export", points, case=asdict(case), repeats=repeats, load_average=load)
    console.print(table_of(points))
    console.print(f"load average {load[0]} before, {load[1]} after; written to {out}")


if __name__ == "__main__":
    app()

"""``python -m benchmarks.sparse FOLDER``: 7B parameters, and one virtual node of the job of 64 ranks that resumes them.

Files are sparse: of their tensors, only what is checked is on the disk. DeepSpeed saves one rank's in a process that
believes in the others; these have the same files, but for the values. Of the job that loads them, two ranks are real:
processes with DeepSpeed's engines, one beside the other. The messages of the others are played to them: what they read
of the files was recorded, and about anything else they say the same as the rank itself.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import machine
from benchmarks.generated import TAG
from benchmarks.launching import Launcher
from benchmarks.played import PlayedJob
from benchmarks.results import Target
from benchmarks.table import table_of
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.tools.opened import locate

app = typer.Typer(add_completion=False)
_MIB, _GB, _SECONDS = 1 << 20, 1e9, 1800.0


def record(folder: Path, ranks: int, recorded: Path) -> None:
    """Write down what all ranks of a job send each other while they read the metadata of a checkpoint."""
    job, found = PlayedJob(ranks), locate(str(folder), None)
    job.run_all(lambda: read_checkpoint(found, MetadataOptions(check_shards=False)).metadata)
    recorded.write_bytes(pickle.dumps([*zip(job.doings, job.rounds, strict=True)]))


def measure(out: Path, launcher: Launcher, params: str, saved: int, ranks: int, node: int) -> list[dict[str, Any]]:
    """What each real rank of the node measured."""
    folder, recorded, raw = out / f"{params}-sparse{saved}", out / "recorded.pkl", out / "sparse-raw"
    arguments = {"params": params, "ranks": saved, "folder": str(folder.resolve())}
    if not (folder / TAG).exists():
        launcher.run(1, "sparse_save", {**arguments, "believed": saved}, _SECONDS)
    record(folder, ranks, recorded)
    raw.mkdir(exist_ok=True)
    paths = {"recorded": str(recorded.resolve()), "out": str(raw.resolve())}
    launcher.run(node, "sparse_load", {**arguments, **paths, "believed": ranks}, _SECONDS)
    return [json.loads((raw / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(node)]


def table_rows(document: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Heads, then a row for each real rank."""
    yield "rank", "GB", "seconds", "metadata", "plan", "read", "extra MiB", "wrong"
    for rank, point in enumerate(document.get("points", ())):
        phases = (f"{point['phases'][name]:.2f}" for name in ("metadata", "plan", "read"))
        extra, nbytes = f"{point['extra_nbytes'] / _MIB:.0f}", f"{point['nbytes'] / _GB:.2f}"
        yield str(rank), nbytes, f"{point['seconds']:.2f}", *phases, extra, ", ".join(point["wrong"]) or "nothing"


def aims(document: Mapping[str, Any]) -> Iterator[Target]:
    """What is aimed at, and what was measured; nothing for an empty document."""
    if points := document.get("points"):
        what = f"{document['params']}, ranks of a job of {document['ranks']}: extra memory of a rank, MiB"
        yield Target(what, max(point["extra_nbytes"] for point in points) / _MIB, 64, at_least=False)


@app.command()
def main(
    folder: Path,
    params: str = "7B",
    saved: Annotated[int, typer.Option(min=1, help="Ranks of the save.")] = 48,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of the job that resumes it.")] = 64,
    node: Annotated[int, typer.Option(min=1, help="Its ranks that are real.")] = 2,
    extensions: Annotated[Path, typer.Option(help="TORCH_EXTENSIONS_DIR.")] = Path("benchmark_results/extensions"),
) -> None:
    """Save, load and check; sparse.json in FOLDER has what was measured. Two ranks of 7B take 8 GiB of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    points = measure(folder, Launcher(folder / "logs", extensions), params, saved, ranks, node)
    machine.write_document(folder, "sparse", points, params=params, saved=saved, ranks=ranks)
    Console(width=120).print(table_of(table_rows({"points": points})))


if __name__ == "__main__":
    app()

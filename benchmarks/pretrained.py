"""``python -m benchmarks.pretrained``: pretrained weights into ZeRO-3 partitions, against ``from_pretrained``.

What is measured is the load of the weights alone, without the model's construction: the floor (``preadv`` of the same
bytes by the same ranks), elastic_ckpt, Transformers' own way, and torch.distributed.checkpoint into FSDP2.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.launching import Launcher
from benchmarks.machine import write_document
from benchmarks.results import Target

app = typer.Typer(add_completion=False)
_MIB = 1 << 20
_AIMED_AT = ("floor", "elastic_ckpt", "from_pretrained")
#: Parameters -> hidden size and layers of the Llama.
SIZES = {"240M": (1024, 14), "550M": (1536, 16)}


def medians(points: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """By contender: seconds, and the most MiB that a rank's memory rose by beyond what it owns."""
    found: dict[str, tuple[float, float]] = {}
    for contender in dict.fromkeys(point["contender"] for point in points):
        rounds = [point["ranks"] for point in points if point["contender"] == contender]
        peaks = (max(rank["peak_nbytes"] for rank in ranks) / _MIB for ranks in rounds)
        found[contender] = median(max(rank["seconds"] for rank in ranks) for ranks in rounds), max(peaks)
    return found


def by_job(document: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, tuple[float, float]]]]:
    """By size and ranks, the medians of a document."""
    points = document.get("points", ())
    for size, ranks in dict.fromkeys((point["params"], point["ranks_of_job"]) for point in points):
        yield size, ranks, medians([p for p in points if (p["params"], p["ranks_of_job"]) == (size, ranks)])


def aims(document: Mapping[str, Any]) -> Iterator[Target]:
    """What is aimed at, and what was measured; nothing for an empty document."""
    for size, ranks, found in by_job(document):
        (floor, _), (ours, peak), (theirs, _) = (found[name] for name in _AIMED_AT)
        what = f"{size} parameters of a Hugging Face folder, {ranks} ranks"
        yield Target(f"{what}: times as fast as from_pretrained", theirs / ours, 10, at_least=True)
        yield Target(f"{what}: seconds beyond 1.3 x the floor", ours - 1.3 * floor, 0.1, at_least=False)
        yield Target(f"{what}: memory beyond what is owned, MiB", peak, 64, at_least=False)


@app.command()
def main(
    params: Annotated[list[str], typer.Option(help=f"Sizes: {', '.join(SIZES)}.")] = [*SIZES],  # noqa: B006
    ranks: Annotated[list[int], typer.Option(help="Ranks that load; may be given several times.")] = [2, 4],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for results and weights.")] = Path("benchmark_results"),
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
) -> None:
    """Measure the load of a Llama's bf16 weights: seconds, and how far each rank's memory rises."""
    console = Console(width=None if Console().is_terminal else 120)
    launcher = Launcher(out / "logs", extensions or out / "extensions")
    table, documents, load = Table("parameters", "ranks", "", "seconds", "peak MiB"), [], os.getloadavg()
    for size, count in product(params, ranks):
        folder, measured = (out / "pretrained" / size).absolute(), out / "measured.json"
        if not (folder / "config.json").exists():
            _save(folder, size)
        job = {"folder": str(folder), "repeats": repeats, "out": str(measured.absolute())}
        launcher.run(count, "pretrained", job, 1800)
        points = json.loads(measured.read_text(encoding="utf-8"))
        documents += [{"params": size, "ranks_of_job": count, **point} for point in points]
        for contender, (seconds, peak) in medians(points).items():
            table.add_row(size, str(count), contender, f"{seconds:.2f}", f"{peak:,.0f}")
    write_document(out, "pretrained", documents, repeats=repeats, load_average=round(load[0], 1))
    console.print(table)


def _save(folder: Path, size: str) -> None:
    from benchmarks.pretrained_jobs import save_pretrained  # noqa: PLC0415  Transformers takes seconds to import

    process = multiprocessing.get_context("spawn").Process(target=save_pretrained, args=(folder, *SIZES[size]))
    process.start()
    process.join()


if __name__ == "__main__":
    app()

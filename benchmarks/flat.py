"""``python -m benchmarks.flat``: what a load costs where there is much of something that is not bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import chart, flat_view, machine
from benchmarks.cases import NATIVE, UNIVERSAL
from benchmarks.flat_cases import FlatCase, FlatPoint, enumerate_flat, point_of
from benchmarks.launching import Launcher

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_EPILOG = "Example: python -m benchmarks.flat --most-universal 10000 --out /data/flat"
_DEGREES, _SAVED_DEGREES = (1, 2, 4), (1, 2, 4, 8)


class Session:
    """Makes the checkpoints that are missing, then loads them all, one job for each degree.

    Args:
        out: folder for everything.
        launcher: starts jobs.
        timeout_s: until a job is ended.
        console: where to say what goes on.
    """

    def __init__(self, out: Path, launcher: Launcher, timeout_s: float, console: Console) -> None:
        self._root = (out / "flat_checkpoints").resolve()
        self._raw = (out / "raw").resolve()
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._console = console

    def run(self, cases: Sequence[FlatCase], repeats: int) -> list[FlatPoint]:
        """All cases, each ``repeats`` times after once that does not count."""
        self._raw.mkdir(parents=True, exist_ok=True)
        for saved_dp in sorted({case.saved_dp for case in cases}):
            self._save([case for case in cases if case.saved_dp == saved_dp], saved_dp)
        self._convert([case for case in cases if case.source == UNIVERSAL])
        points = []
        for dp in sorted({case.dp for case in cases}):
            mine = [case for case in cases if case.dp == dp]
            self._console.print(f"loading {len(mine)} checkpoints on {dp} ranks", style="dim")
            points += self._load(mine, dp, repeats)
        return points

    def _save(self, cases: Sequence[FlatCase], saved_dp: int) -> None:
        missing = {case.checkpoint: case for case in cases if not self._mark(case, NATIVE).exists()}
        if not missing:
            return
        self._console.print(f"saving {len(missing)} checkpoints on {saved_dp} ranks", style="dim")
        for name in missing:
            shutil.rmtree(self._root / name, ignore_errors=True)
        arguments = {"root": str(self._root), "cases": [asdict(case) for case in missing.values()]}
        self._launcher.run(saved_dp, "flat_save", arguments, self._timeout_s)
        for case in missing.values():
            self._mark(case, NATIVE).touch()

    def _convert(self, cases: Sequence[FlatCase]) -> None:
        for case in {case.checkpoint: case for case in cases}.values():
            if self._mark(case, UNIVERSAL).exists():
                continue
            self._console.print(f"converting {case.checkpoint}", style="dim")
            folders = {source: str(self._root / case.checkpoint / source) for source in (NATIVE, UNIVERSAL)}
            shutil.rmtree(folders[UNIVERSAL], ignore_errors=True)
            Path(folders[UNIVERSAL]).mkdir(parents=True)
            self._launcher.run(1, "convert", {"folders": folders}, self._timeout_s)
            self._mark(case, UNIVERSAL).touch()

    def _mark(self, case: FlatCase, source: str) -> Path:
        return self._root / case.checkpoint / f"{source}.made"

    def _load(self, cases: Sequence[FlatCase], dp: int, repeats: int) -> list[FlatPoint]:
        raw = self._raw / f"flat-dp{dp}.json"
        raw.unlink(missing_ok=True)
        arguments = {
            "root": str(self._root),
            "cases": [asdict(case) for case in cases],
            "repeats": repeats,
            "out": str(raw),
        }
        self._launcher.run(dp, "flat_load", arguments, self._timeout_s)
        measured: list[dict[str, Any]] = json.loads(raw.read_text(encoding="utf-8"))
        return [point_of(FlatCase(**each["case"]), each["files"], each["rounds"]) for each in measured]


@app.command(epilog=_EPILOG)
def main(
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("benchmark_results"),
    repeats: Annotated[int, typer.Option(min=1, help="Loads that count, after one that does not.")] = 5,
    most_parameters: Annotated[int, typer.Option(help="Of 100, 1,000 and 10,000, at most this many.")] = 10_000,
    most_universal: Annotated[int, typer.Option(help="Convert checkpoints of at most so many parameters.")] = 1000,
    most_ranks: Annotated[int, typer.Option(help="Save and load on at most so many ranks.")] = 8,
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a job is ended.")] = 1800.0,
) -> None:
    """Measure metadata and planning with more and more parameters, param groups, source files and ranks."""
    console = Console(width=None if Console().is_terminal else 150)
    hindrance = chart.hindrance()
    if hindrance:
        console.print(hindrance, style="yellow")
    launcher = Launcher(out / "logs", extensions or out / "extensions")
    cases = enumerate_flat(
        [count for count in (100, 1000, 10_000) if count <= most_parameters],
        (1, 10, 100),
        [degree for degree in _SAVED_DEGREES if degree <= most_ranks],
        [degree for degree in _DEGREES if degree <= most_ranks],
        most_universal,
    )
    points = Session(out, launcher, timeout, console).run(cases, repeats)
    document = {"machine": machine.describe(), "repeats": repeats, "points": [point.as_dict() for point in points]}
    (out / "flat.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    for table in flat_view.tables(points):
        console.print(table)
    if not hindrance:
        flat_view.draw(points, out / "flat.png")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    app()

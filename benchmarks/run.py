"""``python -m benchmarks.run``: every way to bring a training state back, on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import chart, machine
from benchmarks.cases import (
    CONTENDERS,
    MODELS,
    QUICK,
    UNIVERSAL,
    Case,
    enumerate_cases,
    kinds_of,
    parse_pair,
    sources_of,
    that_run,
    with_their_floors,
)
from benchmarks.checkpoints import Store
from benchmarks.launching import JobFailed, Launcher
from benchmarks.results import CaseResult
from benchmarks.table import full_report, machine_line

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_GIB = 1 << 30
#: Options that take several values.
_LISTS = ("--params", "--stages", "--dp", "--contenders")
_EPILOG = "Example: python -m benchmarks.run --params 270M --stages 1 3 --dp 2:4 2:2 --repeats 5 --out /data/bench"


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    cases: tuple[Case, ...]
    contenders: tuple[str, ...]
    quick: bool
    repeats: int
    cold: bool
    out: Path
    timeout_s: float

    @property
    def page_state(self) -> str:
        """What the page cache holds of the files when a load starts."""
        return "cold: dropped before every load" if self.cold else "warm: all files read through before every load"


class Session:
    """One run: makes what is missing, measures case by case, writes down after each.

    Args:
        settings: what was asked for.
        store: the checkpoints.
        launcher: starts jobs.
        console: where to say what goes on.
    """

    def __init__(self, settings: Settings, store: Store, launcher: Launcher, console: Console) -> None:
        self._settings = settings
        self._store = store
        self._launcher = launcher
        self._console = console
        self._machine = machine.describe()
        self._results: list[CaseResult] = []
        self._hindrance = chart.hindrance()

    def run(self) -> list[CaseResult]:
        """All cases; what fails is left out by its reason, and the rest goes on."""
        self._console.print(machine_line(self._machine, self._settings.page_state), style="dim")
        if self._hindrance:
            self._console.print(self._hindrance, style="yellow")
        for number, case in enumerate(self._settings.cases, 1):
            self._console.print(f"[bold]{case.name}[/bold]  ({number} of {len(self._settings.cases)})")
            result = self._measure(case)
            self._results.append(result)
            self._console.print(full_report(result))
            self._write()
        return self._results

    def _measure(self, case: Case) -> CaseResult:
        left_out = self._left_out(case)
        keys = [key for key in that_run(case, self._settings.contenders) if key not in left_out]
        started = time.monotonic()
        try:
            self._store.ensure(case, sources_of(keys), self._settings.timeout_s)
            left_out |= self._too_big(case, keys)
            keys = [key for key in keys if key not in left_out]
            samples = self._run_job(case, keys)
        except JobFailed as error:
            self._console.print(str(error), style="red", markup=False, highlight=False)
            return CaseResult(case, [], {}, left_out | dict.fromkeys(keys, "the job failed; see the logs"))
        conversion = self._store.conversion(case) if UNIVERSAL in sources_of(keys) else {}
        self._console.print(f"measured in {time.monotonic() - started:.0f} s", style="dim")
        if "ds-universal" in left_out:
            left_out["ds-convert"] = left_out["ds-universal"]
        return CaseResult(case, samples, conversion, left_out)

    def _run_job(self, case: Case, keys: Sequence[str]) -> list[dict[str, Any]]:
        raw = self._settings.out / "raw" / f"{case.slug}.json"
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.unlink(missing_ok=True)
        arguments = {
            "case": asdict(case),
            "folders": self._store.folders(case, sources_of(keys)),
            "contenders": list(keys),
            "repeats": self._settings.repeats,
            "cold": self._settings.cold,
            "kinds": {key: kinds_of(key, self._settings.quick) for key in keys},
            "out": str(raw.resolve()),
        }
        self._launcher.run(case.dp, "measure", arguments, self._settings.timeout_s)
        samples: list[dict[str, Any]] = json.loads(raw.read_text(encoding="utf-8"))
        return samples

    def _left_out(self, case: Case) -> dict[str, str]:
        """Who cannot take part for want of disk."""
        keys = that_run(case, self._settings.contenders)
        if self._store.fits(case, sources_of(keys)):
            return {}
        reason = "its checkpoint and the others' do not fit into --disk-gib together"
        return {key: reason for key in keys if CONTENDERS[key].source == UNIVERSAL}

    def _too_big(self, case: Case, keys: Sequence[str]) -> dict[str, str]:
        """Who would take more memory than there is: DeepSpeed reads ``optimizer_state.pt`` whole on every rank."""
        if "ds-universal" not in keys:
            return {}
        need = case.dp * (2 * self._store.common_nbytes(case) + MODELS[case.params].numel * 4 // case.dp)
        need += machine_need(case)
        total = int(self._machine["memory_nbytes"])
        if need <= 0.9 * total:
            return {}
        return {"ds-universal": f"needs about {need / _GIB:.0f} GiB of memory, of {total / _GIB:.0f}"}

    def _write(self) -> None:
        out = self._settings.out
        settings = self._settings
        document = {
            "machine": self._machine,
            "pages": settings.page_state,
            "repeats": settings.repeats,
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "cases": [result.as_dict() for result in self._results],
        }
        (out / "results.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        if chart.chart_rows(self._results) and not self._hindrance:
            chart.draw(self._results, self._machine, settings.page_state, out / "chart.png")


def machine_need(case: Case) -> int:
    """Bytes that the engines of all ranks take: low-precision weights, masters and states; and 300 MiB a process."""
    weights = 2 * (1 if case.stage == 3 else case.dp)
    return MODELS[case.params].numel * (12 + weights) + case.dp * (300 << 20)


def settings_of(
    params: Sequence[str],
    stages: Sequence[int],
    dp: Sequence[str],
    contenders: Sequence[str],
    quick: bool,
    repeats: int,
    cold: bool,
    out: Path,
    timeout_s: float,
) -> Settings:
    """Check what was asked for.

    Raises:
        typer.BadParameter: something is not known.
    """
    for given, known in ((params, MODELS), (contenders, CONTENDERS)):
        unknown = [each for each in given if each not in known]
        if unknown:
            raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(map(str, known))}")
    if set(stages) - {1, 2, 3}:
        raise typer.BadParameter("--stages: 1, 2 or 3")
    try:
        pairs = [parse_pair(each) for each in dp]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    cases = tuple(enumerate_cases(params, stages, pairs))
    return Settings(cases, tuple(with_their_floors(contenders or CONTENDERS)), quick, repeats, cold, out, timeout_s)


def repeat_options(argv: Sequence[str], options: Sequence[str] = _LISTS) -> list[str]:
    """``--dp 2:4 4:2`` as ``--dp 2:4 --dp 4:2``, which is what the parser understands."""
    expanded: list[str] = []
    current = ""
    for word in argv:
        if word.startswith("--"):
            current, is_first = (word if word in options else ""), True
        elif current:
            expanded += [] if is_first else [current]
            is_first = False
        expanded.append(word)
    return expanded


def words(values: Sequence[str] | None, default: str) -> list[str]:
    """``--dp 2:4 --dp 4:2`` and ``--dp 2:4,4:2`` mean the same."""
    return " ".join(values or [default]).replace(",", " ").split()


@app.command(epilog=_EPILOG)
def main(
    quick: Annotated[
        bool, typer.Option(help="30M parameters, ZeRO-1 2:2 and ZeRO-3 2:4, 3 repeats: 3 minutes.")
    ] = False,
    params: Annotated[list[str] | None, typer.Option(help=f"Sizes: {', '.join(MODELS)}.")] = None,
    stages: Annotated[list[str] | None, typer.Option(help="ZeRO stages.")] = None,
    dp: Annotated[list[str] | None, typer.Option(help="Saved and live degree, as 2:4.")] = None,
    contenders: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CONTENDERS)}; all by default.")] = None,
    repeats: Annotated[int, typer.Option(min=0, help="Rounds that count, after one that does not; 0: 5, quick 3.")] = 0,
    cold: Annotated[bool, typer.Option(help="Drop the files from the page cache before every load.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("benchmark_results"),
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
    disk_gib: Annotated[float, typer.Option(help="What all checkpoints may take.")] = 25.0,
    timeout: Annotated[float, typer.Option(help="Seconds until a job is ended.")] = 3600.0,
) -> None:
    """Measure every way to bring a training state back: seconds, bytes, files, memory, and whether it came back right.

    Lists are separated by spaces or commas: --dp 2:4 4:2.
    """
    settings = settings_of(
        words(params, "30M" if quick else "30M,270M"),
        [int(stage) if stage.isdigit() else -1 for stage in words(stages, "1,3")],
        words(dp, "2:4,4:2,2:2"),
        words(contenders, ""),
        quick,
        repeats or (3 if quick else 5),
        cold,
        out,
        timeout,
    )
    if quick and not (params or stages or dp):
        settings = replace(settings, cases=QUICK)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if Console().is_terminal else 190)
    launcher = Launcher(out / "logs", extensions or out / "extensions")
    store = Store(out / "checkpoints", int(disk_gib * _GIB), launcher, lambda line: console.print(line, style="dim"))
    results = Session(settings, store, launcher, console).run()
    console.print(f"Written to {out}")
    if any(not result.samples for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(repeat_options(sys.argv[1:]))

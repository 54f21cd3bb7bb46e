"""``python -m benchmarks.report``: the tables of README and documentation, from the results of the other benchmarks.

What was measured is checked in below ``benchmarks/results``, with machine and date. ``--out`` replaces it by what a run
has just written; then each marked section of the pages is written anew.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import buckets, cold, export, pretrained, sparse
from benchmarks.cases import CONTENDERS, RESUME, TOUCHED, Case
from benchmarks.flat_cases import PARAMETERS, growth
from benchmarks.results import CaseResult, Target, find, is_floor, summarize, targets
from benchmarks.table import machine_line

app = typer.Typer(add_completion=False)
_REPO = Path(__file__).parents[1]
RESULTS = _REPO / "benchmarks" / "results"
#: Files that benchmarks write, and that are checked in.
DOCUMENTS: tuple[str, ...] = ("results", "flat", "metadata", "scale", "collectives", "gaps", "export", "pretrained")
DOCUMENTS += ("buckets", "cold", "sparse")
CHART = _REPO / "docs" / "benchmark_270M.png"
#: A section of a page is between these lines.
BEGIN, END = "<!-- written by python -m benchmarks.report: {} -->", "<!-- end of {} -->"
#: The case whose contenders are shown one by one.
SHOWN = Case("270M", 3, 2, 4)
_MIB = 1 << 20
_SECTION = re.compile(BEGIN.format(r"(\w+)") + r"\n(.*?)" + END.format(r"\1"), re.DOTALL)


class Measured:
    """The documents of a folder; those that are missing are empty."""

    def __init__(self, folder: Path) -> None:
        paths = {name: folder / f"{name}.json" for name in DOCUMENTS}
        self._documents = {n: json.loads(p.read_text(encoding="utf-8")) for n, p in paths.items() if p.is_file()}
        self.results = [CaseResult.from_dict(each) for each in self["results"].get("cases", ())]
        shown = (result for result in self.results if result.case == SHOWN and summarize(result))
        self.shown = next(shown, None)

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._documents.get(name, {})

    def origin(self, name: str) -> str:
        """Machine, versions and date of a document, in one line."""
        document = self[name]
        when = document.get("when") or document["machine"].get("when", "")
        pages = document.get("pages")
        line = (
            f"{machine_line(document['machine'], pages) if pages else machine_line(document['machine'])}; {when[:10]}"
        )
        return f"{line}; medians of {document['repeats']}." if "repeats" in document else f"{line}."


def contenders_section(measured: Measured) -> str:
    """Every loader's seconds for one job."""
    shown = measured.shown
    if shown is None:
        return ""
    case, gigabytes = shown.case, shown.case.state_nbytes / 1e9
    job = (
        f"{case.params} parameters, {gigabytes:.1f} GB of masters and states, saved with ZeRO-{case.stage} on "
        f"{case.saved_dp} ranks, loaded with ZeRO-{case.stage} on {case.dp} processes:"
    )
    return f"{job}\n\n{contenders(shown)}\n\n{measured.origin('results')}"


def aims_section(measured: Measured) -> str:
    """What was aimed at, beside what was measured."""
    aims = [*_of_loads(measured.results), *_of_parameters(measured["flat"]), *_of_ranks(measured["scale"])]
    for module in (export, cold, sparse, pretrained, buckets):
        aims += module.aims(measured[module.__name__.rpartition(".")[2]])
    return aims_table(aims) if aims else ""


def phases_section(measured: Measured) -> str:
    """Where the time of a load goes."""
    if measured.shown is None:
        return ""
    summaries = summarize(measured.shown)
    phases = list(next(each.phases for each in summaries if each.phases))
    rows: list[Sequence[str]] = [("seconds of the slowest rank", "memory", *phases, "all")]
    for key in ("native", "unverified", "universal"):
        for kind in (RESUME, TOUCHED):
            each = find(summaries, key, kind)
            if each is not None:
                seconds = [*(each.phases[name] for name in phases), each.seconds.median]
                rows.append((CONTENDERS[key].title, kind, *(f"{value:.3f}" for value in seconds)))
    return _markdown(rows)


def scale_section(measured: Measured) -> str:
    """What a checkpoint of many ranks costs one rank."""
    rows: list[Sequence[str]] = [
        ("", "source ranks", "files", "rank 0 s", "metadata s", "plan s", "extra MiB", "received KiB")
    ]
    for point in measured["scale"].get("points", ()):
        kind = point.get("model") or ("universal" if point["format"] == "universal" else "")
        source = f"ZeRO-{point['stage']}{', ' * bool(kind)}{kind}"
        seconds = (f"{point[key]:.4f}" for key in ("find_s", "metadata_s", "plan_s"))
        sizes = (f"{point['extra_nbytes'] / _MIB:.1f}", f"{point['received_nbytes'] / 1024:,.0f}")
        rows.append((source, f"{point['ranks']:,}", f"{point['files']:,}", *seconds, *sizes))
    return _with_origin(measured, "scale", rows)


def metadata_section(measured: Measured) -> str:
    """CPU seconds of reading one file's metadata."""
    rows: list[Sequence[str]] = [("files", "parameters", "elastic_ckpt s", "torch.load s", "its directory s (zipfile)")]
    points = [point for point in measured["metadata"].get("points", ()) if point["collection"] == "on"]
    for files, parameters in sorted({(each["case"]["files"], each["case"]["parameters"]) for each in points}):
        case = {"form": "model states", "files": files, "parameters": parameters}
        cpu = {point["reader"]: point["cpu"]["median"] for point in points if point["case"] == case}
        figures = [f"{cpu[reader]:.4f}" for reader in ("elastic_ckpt", "torch.load", "zipfile")]
        rows.append((str(files), f"{parameters:,}", *figures))
    return _with_origin(measured, "metadata", rows)


def collectives_section(measured: Measured) -> str:
    """Rounds and bytes of a load's collectives."""
    rows: list[Sequence[str]] = [("ranks", "collectives of a load", "a rank sends KiB", "a rank receives KiB")]
    for point in measured["collectives"].get("points", ()):
        nbytes = (f"{point[key] / 1024:,.1f}" for key in ("sent_nbytes", "received_nbytes"))
        rows.append((f"{point['ranks']:,}", str(point["collectives"]), *nbytes))
    return _with_origin(measured, "collectives", rows)


def gaps_section(measured: Measured) -> str:
    """Reads with gaps, one by one and merged."""
    rows: list[Sequence[str]] = [("piece and gap, KiB", "cache, alone", "merged", "network, alone", "merged")]
    for point in measured["gaps"].get("points", ()):
        rows.append((f"{point['kib']:,}", *(f"{seconds:.3f}" for seconds in point["seconds"])))
    return _with_origin(measured, "gaps", rows)


def export_section(measured: Measured) -> str:
    """An export beside DeepSpeed's script."""
    rows: list[Sequence[str]] = [("", "seconds", "until on disk", "seconds of CPU", "peak MiB")]
    for contender, each in export.medians(measured["export"].get("points", ())).items():
        seconds = (f"{each[key]:.1f}" for key in ("seconds", "on_disk", "cpu"))
        rows.append((contender, *seconds, f"{each['peak_nbytes'] / _MIB:,.0f}"))
    table = _with_origin(measured, "export", rows)
    return table and f"{table} Load average {measured['export']['load_average'][1]}."


def pretrained_section(measured: Measured) -> str:
    """Pretrained weights into memory that a model has."""
    document = measured["pretrained"]
    rows: list[Sequence[str]] = [("parameters, ranks", "", "seconds", "times the floor", "peak MiB")]
    for size, ranks, found in pretrained.by_job(document):
        for contender, (seconds, peak) in found.items():
            ratio = f"{seconds / found['floor'][0]:.1f}"
            rows.append((f"{size}, {ranks}", contender, f"{seconds:.2f}", ratio, f"{peak:,.0f}"))
    table = _with_origin(measured, "pretrained", rows)
    return table and f"{table} Load average {document['load_average']}."


def buckets_section(measured: Measured) -> str:
    """Loads from an object store."""
    table = _with_origin(measured, "buckets", list(buckets.table_rows(measured["buckets"].get("points", ()))))
    return table and f"{table} Load average {measured['buckets']['load_average']}."


def cold_section(measured: Measured) -> str:
    """Loads that no page cache helps."""
    return _with_origin(measured, "cold", list(cold.table_rows(measured["cold"])))


def sparse_section(measured: Measured) -> str:
    """The ranks of one node of a large job."""
    return _with_origin(measured, "sparse", list(sparse.table_rows(measured["sparse"])))


def _with_origin(measured: Measured, name: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{_markdown(rows)}\n\n{measured.origin(name)}" if measured[name] else ""


SECTIONS: Mapping[str, Callable[[Measured], str]] = {
    "contenders": contenders_section,
    "aims": aims_section,
    "phases": phases_section,
    "scale": scale_section,
    "metadata": metadata_section,
    "collectives": collectives_section,
    "gaps": gaps_section,
    "export": export_section,
    "pretrained": pretrained_section,
    "buckets": buckets_section,
    "cold": cold_section,
    "sparse": sparse_section,
}


def pages() -> list[Path]:
    """The pages that have sections."""
    found = [_REPO / "README.md", *sorted((_REPO / "docs").glob("*.md")), _REPO / "benchmarks" / "README.md"]
    return [path for path in found if _SECTION.search(path.read_text(encoding="utf-8"))]


def with_sections(text: str, measured: Measured) -> str:
    """A page whose sections are those of what was measured."""

    def written(match: re.Match[str]) -> str:
        name = match[1]
        return f"{BEGIN.format(name)}\n{SECTIONS[name](measured)}\n{END.format(name)}"

    return _SECTION.sub(written, text)


def check_in(folder: Path) -> list[str]:
    """Replace what is checked in by what a run has written; the names of what there was."""
    RESULTS.mkdir(exist_ok=True)
    found = [name for name in DOCUMENTS if (folder / f"{name}.json").is_file()]
    for name in found:
        document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        (RESULTS / f"{name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    if "results" in found and (folder / "chart.png").is_file():
        shutil.copyfile(folder / "chart.png", CHART)
    return found


def contenders(result: CaseResult) -> str:
    """Every contender's seconds into memory as a resumed job finds it; into touched memory, where it was measured."""
    summaries = summarize(result)
    ours = find(summaries, "native")
    rows = [("", "seconds", "times ours", "into touched memory", "read per rank", "temporary memory per rank")]
    for key, contender in CONTENDERS.items():
        each, touched = find(summaries, key), find(summaries, key, TOUCHED)
        if each is None:
            continue
        rows.append(
            (
                contender.title,
                f"{each.seconds.median:.2f}",
                f"{each.seconds.median / ours.seconds.median:.2f}" if ours else "",
                f"{touched.seconds.median:.2f}" if touched else "",
                f"{each.read_nbytes / 1e9:.2f} GB",
                "" if is_floor(each) else f"{each.extra_nbytes / _MIB:,.0f} MiB",
            )
        )
    return _markdown(rows)


def aims_table(aims: Sequence[Target]) -> str:
    """What was aimed at, what was measured, and whether that meets it."""
    rows = [("", "aim", "measured", "")]
    for aim in aims:
        bound = f"{'>=' if aim.at_least else '<='} {aim.bound:g}"
        rows.append((aim.what, bound, f"{aim.value:.3g}", "met" if aim.is_met else "**missed**"))
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _of_loads(results: Sequence[CaseResult]) -> Iterator[Target]:
    for result in results:
        for aim in targets(result):
            if aim.applies:
                yield Target(f"{result.case.name}: {aim.what}", aim.value, aim.bound, aim.at_least)


def _of_parameters(document: Mapping[str, Any]) -> Iterator[Target]:
    for point in document.get("points", ()):
        case = point["case"]
        if (case["series"], case["parameters"]) == (PARAMETERS, 10_000):
            what = f"10,000 parameters, ZeRO-{case['stage']}, DP {case['saved_dp']} → {case['dp']}: seconds"
            yield Target(what, point["seconds"], 1.5, at_least=False)


def growths(points: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By ZeRO stage, the power by which the seconds of one rank follow the number of source ranks."""
    costs: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        if point["format"] == "native" and not point["model"]:
            costs.setdefault(point["stage"], []).append((point["ranks"], point["metadata_s"] + point["plan_s"]))
    return {stage: growth(values) for stage, values in costs.items()}


def _of_ranks(document: Mapping[str, Any]) -> Iterator[Target]:
    for point in document.get("points", ()):
        if point["ranks"] == 1024:
            what = f"ZeRO-{point['stage']} source of 1,024 ranks x {point['parameters']:,} parameters, one rank"
            yield Target(f"{what}: seconds of CPU", point["metadata_s"] + point["plan_s"], 0.5, at_least=False)
            yield Target(f"{what}: extra memory, MiB", point["extra_nbytes"] / _MIB, 64, at_least=False)
    for stage, power in growths(document.get("points", ())).items():
        yield Target(f"ZeRO-{stage}: seconds of CPU grow with source ranks by the power", power, 0.2, at_least=False)


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="Folder with results.json and the like of a new run.")] = None,
    readme: Annotated[Path | None, typer.Option(help="Write this page alone; else all of them.")] = None,
) -> None:
    """Check in what was measured, and write it into the pages, beside what was aimed at."""
    if out is not None:
        print(f"checked in: {', '.join(check_in(out)) or 'nothing'}")
    measured = Measured(RESULTS)
    for page in [readme] if readme else pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(with_sections(text, measured), encoding="utf-8")
        print(f"written: {page}")


if __name__ == "__main__":
    app()

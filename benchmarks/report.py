"""``python -m benchmarks.report``: the README's tables, from the results that the other benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases import CONTENDERS, TOUCHED, Case
from benchmarks.flat_cases import PARAMETERS
from benchmarks.results import CaseResult, Target, find, is_floor, summarize, targets
from benchmarks.table import machine_line

app = typer.Typer(add_completion=False)
#: What is between these lines of README.md is written here.
BEGIN, END = "<!-- written by python -m benchmarks.report -->", "<!-- end of what benchmarks.report writes -->"
#: The case whose contenders are in the README, one by one.
SHOWN = Case("270M", 3, 2, 4)
_MIB = 1 << 20


def section(folder: Path) -> str:
    """The tables in Markdown, of those results that are in a folder."""
    measured = {name: _document(folder / f"{name}.json") for name in ("results", "flat", "metadata", "scale")}
    results = [CaseResult.from_dict(each) for each in measured["results"].get("cases", ())]
    shown = next((result for result in results if result.case == SHOWN and summarize(result)), None)
    aims = [*_of_loads(results), *_of_parameters(measured["flat"]), *_of_metadata(measured["metadata"])]
    aims += _of_ranks(measured["scale"])
    tables = [*([contenders(shown)] if shown else []), *([aims_table(aims)] if aims else [])]
    if results:
        line = machine_line(measured["results"]["machine"], measured["results"]["pages"])
        tables.append(f"{line}; medians of {measured['results']['repeats']}.")
    return "\n\n".join(tables)


def _document(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


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


def _of_metadata(document: Mapping[str, Any]) -> Iterator[Target]:
    cpu = {
        (point["reader"], point["case"]["parameters"]): point["cpu"]["median"]
        for point in document.get("points", ())
        if (point["case"]["form"], point["case"]["files"], point["collection"]) == ("model states", 1, "on")
    }
    for (reader, parameters), seconds in cpu.items():
        if reader == "elastic_ckpt" and parameters >= 1000:
            ratio = cpu["torch.load", parameters] / seconds
            yield Target(f"metadata of {parameters:,} tensors: times as fast as torch.load", ratio, 10, at_least=True)


def _of_ranks(document: Mapping[str, Any]) -> Iterator[Target]:
    for point in document.get("points", ()):
        if point["ranks"] == 1024:
            what = f"ZeRO-{point['stage']} source of 1,024 ranks x {point['parameters']:,} parameters, one rank"
            yield Target(f"{what}: seconds of CPU", point["metadata_s"] + point["plan_s"], 0.5, at_least=False)
            yield Target(f"{what}: extra memory, MiB", point["extra_nbytes"] / _MIB, 64, at_least=False)


def with_section(text: str, written: str) -> str:
    """A text whose section is ``written``."""
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{written}\n{END}{behind}"


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder with results.json, flat.json, metadata.json, scale.json.")] = Path(
        "benchmark_results"
    ),
    readme: Annotated[Path | None, typer.Option(help="File to write the tables into; else they are printed.")] = None,
) -> None:
    """Put what was measured, beside what was aimed at, into the README."""
    written = section(out)
    if readme is None:
        print(written)
    else:
        readme.write_text(with_section(readme.read_text(encoding="utf-8"), written), encoding="utf-8")


if __name__ == "__main__":
    app()

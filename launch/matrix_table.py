"""Write tables of what ``launch/matrix.sh`` ran into a page of the docs."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

END = "<!-- end -->\n"
PASSED, FAILED, SKIPPED = "yes", "**no**", "-"
VERSIONS = ("DeepSpeed", "torch", "Python")


def column_of(results: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Versions and cells of one run, by row; and why cells were skipped."""
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None, results
    column = {str(item.get("name")): str(item.get("value")) for item in suite.iter("property")}
    reasons: dict[str, str] = {}
    for case in suite.iter("testcase"):
        cell = str(case.get("name")).partition("[")[2].removesuffix("]")
        outcomes = {child.tag for child in case}
        if cell:
            column[cell] = FAILED if outcomes & {"failure", "error"} else SKIPPED if "skipped" in outcomes else PASSED
        if cell and column[cell] == SKIPPED:
            reasons[cell] = str(next(child.get("message") for child in case if child.tag == "skipped"))
    return column, reasons


def markdown(rows: list[list[str]]) -> str:
    """Rows as a table, the first as its head."""
    head, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *others))


def table(columns: list[dict[str, str]]) -> str:
    """Cells by versions."""
    first, *names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(each.get(name, SKIPPED) for each in columns)] for name in names]
    return markdown([[first, *(column[first] for column in columns)], *rows])


def spans(releases: list[str]) -> str:
    """Releases, those that follow each other by their last number as one span."""
    found: list[list[str]] = []
    for release in releases:
        before, _, number = release.rpartition(".")
        if found and found[-1][-1] == f"{before}.{int(number) - 1}":
            found[-1].append(release)
        else:
            found.append([release])
    return ", ".join(span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in found)


def releases_table(columns: list[dict[str, str]], reasons: list[dict[str, str]]) -> str:
    """Releases of DeepSpeed by cells, neighbors with the same outcomes together; and why cells were skipped."""
    cells = list(dict.fromkeys(name for column in columns for name in column if name not in VERSIONS))
    rows, notes = [["DeepSpeed", "releases", *cells]], []
    numbered = zip(columns, reasons, strict=True)
    for outcomes, run in groupby(numbered, key=lambda each: ([each[0].get(cell, SKIPPED) for cell in cells], each[1])):
        names = [column["DeepSpeed"] for column, _ in run]
        span = spans(names)
        rows.append([span, str(len(names)), *outcomes[0]])
        notes += [f"- {span}, {cell}: {reason}\n" for cell, reason in outcomes[1].items()]
    return markdown(rows) + "".join(["\n", *notes] if notes else [])


def _numbers(column: dict[str, str]) -> list[list[int]]:
    return [[int(part) for part in column[name].split("+")[0].split(".")] for name in ("torch", "DeepSpeed")]


def main(folder: Path, page: Path, kind: str) -> None:
    """Replace a table of ``page`` by the results in ``folder``: that of ``--releases``, or of ``--all``."""
    runs = sorted(map(column_of, folder.glob("*.xml")), key=lambda run: _numbers(run[0]))
    columns, reasons = [column for column, _ in runs], [skipped for _, skipped in runs]
    begin = f"<!-- written by launch/matrix.sh {kind} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(END)
    written = releases_table(columns, reasons) if kind == "--releases" else table(columns)
    page.write_text(before + begin + written + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

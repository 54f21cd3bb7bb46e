"""Write a table of what ``launch/matrix.sh`` ran, cells by versions, into a page of the docs."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

BEGIN, END = "<!-- written by launch/matrix.sh --all -->\n", "<!-- end -->\n"
PASSED, FAILED, SKIPPED = "yes", "**no**", "-"


def column_of(results: Path) -> dict[str, str]:
    """Versions and cells of one run, by row."""
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None, results
    column = {str(item.get("name")): str(item.get("value")) for item in suite.iter("property")}
    for case in suite.iter("testcase"):
        cell = str(case.get("name")).partition("[")[2].removesuffix("]")
        outcomes = {child.tag for child in case}
        column[cell] = FAILED if outcomes & {"failure", "error"} else SKIPPED if "skipped" in outcomes else PASSED
    return column


def table(columns: list[dict[str, str]]) -> str:
    """The columns as Markdown."""
    first, *names = dict.fromkeys(name for column in columns for name in column)
    head = [first, *(column[first] for column in columns)]
    lines = [head, ["---"] * len(head), *([name, *(each.get(name, SKIPPED) for each in columns)] for name in names)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _numbers(column: dict[str, str]) -> list[list[int]]:
    names = ("torch", "DeepSpeed")
    return [[int(part) for part in column[name].split("+")[0].split(".")] for name in names]


def main(folder: Path, page: Path) -> None:
    """Replace the table of ``page`` by the results in ``folder``."""
    columns = sorted(map(column_of, folder.glob("*.xml")), key=_numbers)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(columns) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Write a table of what ``launch/matrix.sh`` ran, versions by cells, into a page of the docs."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

BEGIN, END = "<!-- written by launch/matrix.sh --all -->\n", "<!-- end -->\n"
PASSED, FAILED, SKIPPED = "yes", "**no**", "-"


def row_of(results: Path) -> dict[str, str]:
    """Versions and cells of one run, by column."""
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None, results
    row = {str(item.get("name")): str(item.get("value")) for item in suite.iter("property")}
    for case in suite.iter("testcase"):
        cell = str(case.get("name")).partition("[")[2].removesuffix("]")
        outcomes = {child.tag for child in case}
        row[cell] = FAILED if outcomes & {"failure", "error"} else SKIPPED if "skipped" in outcomes else PASSED
    return row


def table(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([row.get(column, SKIPPED) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _numbers(row: dict[str, str]) -> list[list[int]]:
    names = ("torch", "DeepSpeed")
    return [[int(part) for part in row[name].split("+")[0].split(".")] for name in names]


def main(folder: Path, page: Path) -> None:
    """Replace the table of ``page`` by the results in ``folder``."""
    rows = sorted(map(row_of, folder.glob("*.xml")), key=_numbers)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(rows) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

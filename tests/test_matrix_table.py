"""``launch/matrix_table.py``: what ran becomes a table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TABLE = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "matrix_table.py"))
SKIPPED = '<skipped message="its converter fails"/>'


def run(release: str, pipeline: str = "", universal: str = "") -> str:
    cases = "".join(
        f'<testcase name="test_loads[{cell}]">{outcome}</testcase>'
        for cell, outcome in (("ZeRO-3", ""), ("pipeline", pipeline), ("universal", universal))
    )
    named = {"DeepSpeed": release, "torch": "2.13.0+cpu", "Python": "3.11.7"}
    facts = "".join(f'<property name="{name}" value="{value}"/>' for name, value in named.items())
    return f'<testsuites><testsuite><properties>{facts}</properties>{cases}<testcase name="test_plain"/></testsuite></testsuites>'


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, text in {
        "a": run("0.17.10"),
        "b": run("0.17.9"),
        "e": run("0.17.7"),
        "c": run("0.16.0", universal=SKIPPED),
        "d": run("0.18.0", pipeline="<failure/>"),
    }.items():
        (tmp_path / f"{name}.xml").write_text(text)
    return tmp_path


def test_releases_with_the_same_outcomes_are_one_row_and_skips_have_their_reason(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- written by launch/matrix.sh --releases -->\n", TABLE["END"]
    page.write_text(f"before\n{begin}old\n{end}after\n")
    TABLE["main"](results, page, "--releases")
    assert (
        page.read_text()
        == f"before\n{begin}"
        + (
            "| DeepSpeed | releases | ZeRO-3 | pipeline | universal |\n"
            "| --- | --- | --- | --- | --- |\n"
            "| 0.16.0 | 1 | yes | yes | - |\n"
            "| 0.17.7, 0.17.9 to 0.17.10 | 3 | yes | yes | yes |\n"
            "| 0.18.0 | 1 | yes | **no** | yes |\n"
            "\n- 0.16.0, universal: its converter fails\n"
        )
        + f"{end}after\n"
    )

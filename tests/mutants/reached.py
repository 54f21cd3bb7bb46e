"""How much of each room the recorded tests reach: branches, and statements that raise."""

from __future__ import annotations

import ast
import json
import tempfile
from collections import Counter
from pathlib import Path

import coverage

from tests.mutants.recording import REPO, Recorded, room_of


def print_reached(folder: Path) -> None:
    """Print a line for each room, and each ``raise`` that no test reaches."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.json")
        found = coverage.Coverage(
            data_file=str(folder / ".coverage"), config_file=False, source=[str(REPO / "elastic_ckpt")]
        )
        found.load()
        found.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    rooms: dict[str, Counter[str]] = {}
    for file, of_file in files.items():
        rooms.setdefault(room_of(_in_the_repository(file)), Counter()).update(of_file["summary"])
    for room, counted in sorted(rooms.items()):
        lines = f"{counted['covered_lines']} of {counted['num_statements']} statements"
        branches = f"{counted['covered_branches']} of {counted['num_branches']} branches"
        print(f"{room:<20} {lines:<28} {branches}")
    recorded = Recorded(folder)
    for path in sorted((REPO / "elastic_ckpt").rglob("*.py")):
        module = str(path.relative_to(REPO))
        code, reached = path.read_text(), recorded.lines(module)
        for line in raises_of(code):
            if line not in reached:
                print(f"not reached: {module}:{line}: {code.splitlines()[line - 1].strip()}")


def raises_of(code: str) -> list[int]:
    """Lines of the statements that raise."""
    return sorted(node.lineno for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Raise))


def _in_the_repository(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(REPO) if path.is_absolute() else path)

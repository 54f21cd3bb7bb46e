"""What all commands share: help, errors of usage, the width of what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from elastic_ckpt.cli import COMMANDS, app
from elastic_ckpt.cli.output import Answer, tell
from elastic_ckpt.core.text import counted


def text_of(*arguments: str) -> str:
    return " ".join(CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"}).output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_short_types_and_whole_sentences(command: str) -> None:
    shown = text_of(command, "--help")
    for long in ("<int", "<str>", "<path>", "<bool>", "<list", "INTEGER", "{", "}"):
        assert long not in shown
    lines = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output.splitlines()
    inside = [line.strip() for line in lines[: next(n for n, line in enumerate(lines) if line.startswith("╭"))]]
    texts = [line for line in inside if line and not line.startswith("Usage")]
    assert texts and all(len(line) > 150 or line.endswith(".") for line in texts), "a sentence is broken over two lines"


def test_help_lists_choices_and_names_both_folders() -> None:
    assert "Usage: elastic-ckpt diff [OPTIONS] A B" in text_of("diff", "--help")
    assert "INT [x>=1] Data-parallel degree" in text_of("plan", "--help")
    for choices in ("universal|dcp", "strict|first|mean"):
        assert choices in text_of("convert", "--help")
    assert "70b|104b" in text_of("plan", "--help") and "megatron-core" in text_of("inspect", "--help")


def test_an_unknown_command_gets_the_nearest_one() -> None:
    result = CliRunner().invoke(app, ["insepct", "folder"])
    assert result.exit_code == 2 and "Did you mean 'inspect'?" in result.output
    assert "Did you mean" not in CliRunner().invoke(app, ["xyz"]).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["insepct", "folder", "--json"], "Did you mean 'inspect'?"),
        (["plan", "--json"], "Missing argument 'DIR...'"),
        (["plan", "x", "--zero", "4", "--json"], "--zero"),
        (["diff", "--json", "x"], "'B'"),
        (["--bogus", "--json"], "--bogus"),
    ],
)
def test_errors_of_usage_are_json_where_it_is_asked_for(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    told = json.loads(result.stdout)
    assert result.exit_code == 2 and told["error"] == "UsageError" and says in told["problem"]


@pytest.mark.parametrize(("columns", "width"), [(None, 300), ("40", 40), ("120", 120)])
def test_piped_output_is_as_wide_as_its_longest_line(columns: str | None, width: int) -> None:
    script = "from tests.cli.test_usage import show; show()"
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    environment |= {} if columns is None else {"COLUMNS": columns}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert max(map(len, done.stdout.splitlines())) == width


def show() -> None:
    """Print a table whose one line has 300 characters."""
    made = Table(show_header=False)
    made.add_column(overflow="fold")
    made.add_row("x " * 147 + "xx")
    tell(Answer(None, [made]), as_json=False)


def test_singulars() -> None:
    assert [counted(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]

"""The shape of the package: what importing it costs, and how big its files may grow."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.cli.app import COMMANDS

PACKAGE = Path(elastic_ckpt.__file__).parent


def test_importing_the_package_loads_neither_torch_nor_deepspeed() -> None:
    script = "import sys, elastic_ckpt; sys.exit(bool({'torch', 'deepspeed', 'pydantic'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(elastic_ckpt, name) is not None for name in elastic_ckpt.__all__)
    assert not hasattr(elastic_ckpt, "no_such_name")


def test_no_file_outgrows_its_room() -> None:
    too_long = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in too_long.items() if lines > 400} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_no_two_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_the_help_of_the_command_line_loads_neither_torch_nor_deepspeed() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from elastic_ckpt.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        f"assert result.exit_code == 0 and all(name in result.output for name in {list(COMMANDS)}), result.output\n"
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_of_itself_what_the_list_says(name: str) -> None:
    callback = getattr(importlib.import_module(f"elastic_ckpt.cli.{name}"), name)
    assert inspect.getdoc(callback).splitlines()[0] == COMMANDS[name]
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "Example:" in result.output

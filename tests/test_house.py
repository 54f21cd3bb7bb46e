"""The shape of the package: what importing it costs, and how big its files may grow."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import COMMANDS, app, summary

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


#: What opens files or lists folders that are none of a checkpoint's, or only asks whether there is one.
OPENERS = {
    "load/flow.py": "writes the report",
    "load/nodes.py": "the machine's own number",
    "load/replicate.py": "what it copies to this node",
    "tools/opened.py": "a DeepSpeed config",
    "tools/output_folder.py": "what a conversion or an export writes",
}


def test_files_of_a_checkpoint_are_opened_in_one_room() -> None:
    """Elsewhere, a pipe in the place of a file would be waited for, and a loop of links be a bare error."""
    found, opens = set(), re.compile(r"open|os\.(open|listdir|scandir)|.*\.read_(text|bytes)")
    for room in ("formats", "io", "load", "tools"):
        for path in (PACKAGE / room).rglob("*.py"):
            called = {
                ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            }
            if any(opens.fullmatch(name) for name in called):
                found.add(str(path.relative_to(PACKAGE)))
    assert found - {"load/installation/__init__.py"} == OPENERS.keys()


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
    callback = getattr(importlib.import_module(f"elastic_ckpt.cli.{COMMANDS[name]}"), name)
    assert inspect.getdoc(callback).splitlines()[0] == summary(name) != ""
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "Example:" in result.output


#: Tests of what no unit test imports: by test, the modules that it covers through what others do with them.
COVERED_BY = {
    "test_run.py": "__main__",
    "distributed/test_cli_diff.py": "cli/tensors",
    "distributed/test_cli_latest.py": "tools/latest",
    "distributed/test_nodes.py": "load/replicate",
    "distributed/test_parallel.py": "megatron",
    "distributed/test_pretrained.py": "load/pretrained load/pretrained_hook",
}


def test_every_module_has_a_test() -> None:
    """One of its name, a unit test that imports it or the package that it is of, or the one that is named above."""
    tests = PACKAGE.parent / "tests"
    imported: set[str] = set()
    for path in tests.rglob("test_*.py"):
        if path.parent.name not in ("distributed", "integration"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    named = {module for modules in COVERED_BY.values() for module in modules.split()}
    without = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("")
        names = {".".join(("elastic_ckpt", *module.parts))}
        if len(module.parts) > 2:  # rooms of tools/ are tested through what their package exports
            names.add(".".join(("elastic_ckpt", *module.parts[:-1])))
        if (
            path.stem != "__init__"
            and not (tests / module.parent / f"test_{path.name}").exists()
            and not names & imported
        ):
            without.append(str(module))
    assert sorted(set(without) - named) == [], "add a test, or name the one that covers it"
    assert named <= set(without), "remove the entry: the module is gone, or has a test"
    assert [name for name in COVERED_BY if not (tests / name).exists()] == []

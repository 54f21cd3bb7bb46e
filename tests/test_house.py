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
    assert {path: lines for path, lines in too_long.items() if lines > 450} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def packed_values(code: str) -> list[str]:
    """Assignments of several values to as many names, but those that exchange some."""
    lines = code.splitlines()
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        (target, *_) = node.targets
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
            continue
        if any(isinstance(each, ast.Starred) for each in (*target.elts, *node.value.elts)):
            continue
        targets = {ast.unparse(each) for each in target.elts}
        values = {ast.unparse(each) for each in node.value.elts}
        if targets.isdisjoint(values):
            found.append(f"{node.lineno}: {lines[node.lineno - 1].strip()}")
    return found


def test_one_statement_is_one_idea() -> None:
    found = {
        str(path.relative_to(PACKAGE)): packed
        for path in PACKAGE.rglob("*.py")
        if (packed := packed_values(path.read_text()))
    }
    assert found == {}, "assign each value on a line of its own"
    assert packed_values("a, b = 1, 2\nc, d = d, c\ne, f = pair") == ["1: a, b = 1, 2"]


#: Functions and methods, called or passed on, that open, list or look at what has a path.
_ASKS = re.compile(
    r"open|os\.(open|stat|lstat|access|readlink|listdir|scandir|f?walk|pread|preadv)|shutil\.copy(file|tree|2)?|torch\.load"
    r"|os\.path\.(isfile|isdir|islink|exists|lexists|getsize|getmtime|samefile)"
    r"|.+\.(iterdir|r?glob|is_file|is_dir|is_symlink|exists|l?stat|read_text|read_bytes|open)",
    re.DOTALL,
)


#: Says in the package, on the line of such a call or above it, what is asked, which is no file of a checkpoint.
_MARKED = re.compile(r"# asks the system: \w")


def asked_of_the_system(code: str) -> list[str]:
    """What opens, lists or looks at a path without a mark: calls, and what is passed on of ``os`` and ``os.path``."""
    lines, found = code.splitlines(), []
    for node in ast.walk(ast.parse(code)):
        if any(_ASKS.fullmatch(name) for name in _names(node)):
            around = lines[max(0, node.lineno - 2) : node.end_lineno]
            if not any(_MARKED.search(line) for line in around):
                found.append(f"{node.lineno}: {lines[node.lineno - 1].strip()}")
    return sorted(set(found))


def _names(node: ast.AST) -> list[str]:
    """Of a function or method that is called, passed on or imported."""
    if isinstance(node, ast.Call):
        return [ast.unparse(node.func)]
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("os."):
        return [ast.unparse(node)]
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "shutil", "io"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_files_of_a_checkpoint_are_opened_in_one_room() -> None:
    """Elsewhere, a pipe would be waited for, a loop of links be a bare error, and other nodes' files not be seen."""
    found = {
        str(path.relative_to(PACKAGE)): asked
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "storage" not in path.parents and (asked := asked_of_the_system(path.read_text()))
    }
    assert found == {}, "ask storage; what is no file of a checkpoint: # asks the system: what it is"


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "os.preadv(f, b, 0)",
        "map(os.path.isdir, paths)",
        "Path(x).glob('*')",
        "from os import scandir",
        "p.stat()",
        "path.exists()",
    ],
)
def test_what_asks_the_system_is_seen(code: str) -> None:
    assert asked_of_the_system(code) == [f"1: {code}"]
    assert asked_of_the_system(f"x = 1\n\n{code}  # asks the system: the report") == []
    assert asked_of_the_system(f"# asks the system: the report\n{code}") == []
    assert asked_of_the_system(f"# asks the system: the report\n\n{code}") != []
    assert asked_of_the_system("open_stream(path); os.path.join(a, b); found.path(name)") == []


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


#: In a test, names what it covers and does not import, and why.
_COVERS = re.compile(r"^# Covers (elastic_ckpt/[\w/]+)\.py, \w.*\.$", re.MULTILINE)


def test_every_module_has_a_test() -> None:
    """One of its name, one that imports it or the package that it is of, or one that says that it covers it."""
    tests = PACKAGE.parent / "tests"
    imported: set[str] = set()
    covered: set[str] = set()
    for path in tests.rglob("*.py"):
        code = path.read_text()
        covered.update(_COVERS.findall(code))
        imported |= _modules_imported(code)
    without = set()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).with_suffix("")
        names = {".".join(("elastic_ckpt", *module.parts))}
        if len(module.parts) > 2:  # rooms of tools/ are tested through what their package exports
            names.add(".".join(("elastic_ckpt", *module.parts[:-1])))
        has_own = (tests / module.parent / f"test_{path.name}").exists()
        if path.stem != "__init__" and not has_own and not names & imported:
            without.add(f"elastic_ckpt/{module}")
    assert without - covered == set(), "add a test, or: # Covers elastic_ckpt/room/module.py, which is ..."
    assert covered - without == set(), "remove the comment: the module is gone, or has a test"


def test_no_test_imports_a_test() -> None:
    """What two of them need is in a module of its own, or a fixture of their folder."""
    root = PACKAGE.parent
    files = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in (root / "tests").rglob("*.py")}
    tests = {module for path, module in files.items() if path.name.startswith("test_")}
    found = {}
    for path, module in files.items():
        others = tests & _modules_imported(path.read_text()) - {module}
        if others:
            found[module] = others
    assert found == {}


def _modules_imported(code: str) -> set[str]:
    """By their dotted names, wherever in the code they are imported."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names

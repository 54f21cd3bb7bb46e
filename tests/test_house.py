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


#: What asks the system itself, and why: by room, file and call.
ASKS_THE_SYSTEM = {
    "load/publishing.py: open": "writes the report",
    "load/agreed_config.py: os.stat": "whether two spellings are of one folder",
    "load/nodes.py: os.stat": "whether ranks see one and the same folder, which has no answer in a view",
    "load/nodes.py: machine.exists": "the machine's name, in /proc",
    "load/nodes.py: machine.read_text": "the machine's name, in /proc",
    "load/resume_sheet.py: open": "the training script",
    "load/installation/__init__.py: (file := Path(folder, _PTH)).is_file": "a file in site-packages",
    "load/installation/__init__.py: shutil.copyfile": "a file in site-packages",
    "tools/opened.py: path.read_text": "a DeepSpeed config",
    "tools/conversion/__init__.py: os.walk": "counts what was written",
    "tools/fetch.py: path.is_file": "what was fetched before",
    "tools/export.py: path.parent.stat": "permissions of what is written",
    "tools/output_folder.py: os.path.lexists": "whether there is room for what is written",
    "tools/output_folder.py: target.exists": "whether there is room for what is written",
    "tools/output_folder.py: path.rglob": "what was written",
    "tools/output_folder.py: os.open": "what was written",
}
#: Functions and methods, called or passed on, that open, list or look at what has a path.
_ASKS = re.compile(
    r"open|os\.(open|stat|lstat|access|readlink|listdir|scandir|f?walk|pread|preadv)|shutil\.copy(file|tree|2)?|torch\.load"
    r"|os\.path\.(isfile|isdir|islink|exists|lexists|getsize|getmtime|samefile)"
    r"|.+\.(iterdir|r?glob|is_file|is_dir|is_symlink|exists|l?stat|read_text|read_bytes|open)",
    re.DOTALL,
)


def asked_of_the_system(code: str) -> set[str]:
    """Calls that open, list or look at a path; and what does so and is passed on, of ``os`` and ``os.path``."""
    tree = ast.parse(code)
    names = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names |= {
        name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := ast.unparse(node))[:3] == "os."
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "shutil", "io"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {" ".join(name.split()) for name in names if _ASKS.fullmatch(name)}


def test_files_of_a_checkpoint_are_opened_in_one_room() -> None:
    """Elsewhere, a pipe would be waited for, a loop of links be a bare error, and other nodes' files not be seen."""
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for room in ("formats", "io", "load", "tools")
        for path in (PACKAGE / room).rglob("*.py")
        for name in asked_of_the_system(path.read_text())
    }
    assert found == ASKS_THE_SYSTEM.keys()


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "os.preadv(f, b, 0)",
        "map(os.path.isdir, paths)",
        "Path(x).glob('*')",
        "from os import scandir",
        "p.stat()",
    ],
)
def test_what_asks_the_system_is_seen(code: str) -> None:
    assert len(asked_of_the_system(code)) == 1
    assert asked_of_the_system("storage.exists(path); open_stream(path); os.path.join(a, b); found.path(name)") == {
        "storage.exists"
    }


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
    "formats/test_client_state.py": "formats/rebuilt_tensors",
    "test_run.py": "__main__ patches/abbreviations",
    "distributed/test_cli_diff.py": "cli/tensors",
    "distributed/test_cli_latest.py": "tools/latest",
    "distributed/test_ds_to_universal.py": "ds_to_universal/__main__",
    "tools/test_fetch.py": "cli/fetch",
    "data/test_sampler.py": "data/position",
    "distributed/test_data_position.py": "load/data_position",
    "distributed/test_parallel.py": "megatron",
    "distributed/test_resume_sheet.py": "load/resume_sheet tools/explain",
    "distributed/test_weights_alone.py": "formats/module_weights",
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

"""What each test reaches, as coverage writes it down: a test function of units, a file of tests that start jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import coverage

REPO = Path(__file__).resolve().parents[2]
JOBS = ("tests/distributed", "tests/integration")
#: Exit status of pytest where all tests of a file are nightly.
_NO_TESTS = 5
_SETTINGS = """\
[run]
source = {repository}/elastic_ckpt
data_file = {folder}/.coverage
parallel = true
branch = true
sigterm = true
patch = subprocess, _exit, fork
{context}

[paths]
package =
    {here}/elastic_ckpt
    {repository}/elastic_ckpt
"""


def all_tests(repository: Path) -> tuple[list[str], list[str]]:
    """Folders and files of tests that start no jobs, and files of those that do."""
    files = [str(path.relative_to(repository)) for path in (repository / "tests").rglob("test_*.py")]
    jobs = sorted(file for file in files if file.startswith(JOBS))
    units = {"/".join(Path(file).parts[:2]) for file in files if not file.startswith(JOBS)}
    return sorted(units - {"tests/test_mutants.py"}), jobs


def record_units(folder: Path, paths: Sequence[str], repository: Path = REPO) -> None:
    """Run the tests of some files or folders of a checkout or copy, each function of which is told apart."""
    _record(folder, "dynamic_context = test_function", paths, repository)


def record_jobs(folder: Path, files: Sequence[str], repository: Path = REPO) -> None:
    """Run files of tests that start jobs, with all their ranks; what a file reaches is told apart."""
    for file in files:
        _record(folder, f"context = {file}", [file], repository)


def _record(folder: Path, context: str, paths: Sequence[str], repository: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coverage.ini"
    settings.write_text(_SETTINGS.format(here=REPO, repository=repository, folder=folder, context=context))
    started = time.monotonic()
    tests = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "not nightly", *paths]
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *tests]
    ended = subprocess.run(command, cwd=repository, env=environment(repository), check=False)
    if ended.returncode not in (0, _NO_TESTS):
        raise subprocess.CalledProcessError(ended.returncode, command)
    print(f"{' '.join(paths)}: {time.monotonic() - started:.0f} s", flush=True)
    combine = [sys.executable, "-m", "coverage", "combine", "-q", "--append", f"--rcfile={settings}"]
    subprocess.run(combine, cwd=repository, check=True)


def environment(repository: Path) -> dict[str, str]:
    """Of tests that run in a checkout or copy: it is found before what is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))}


def copy_of_repository(folder: Path, tests: str) -> Path:
    """The files that git knows, in a folder; ``tests``: of which commit those of ``tests/`` are, if not as they are here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).exists() and not (tests and name.startswith("tests/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)
    if tests:
        archive = subprocess.run(["git", "archive", tests, "tests"], cwd=REPO, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


class Recorded:
    """What was recorded.

    Args:
        folder: as of :func:`record_units`.
    """

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / ".coverage"))
        self._data.read()
        self._tests: dict[str, dict[int, list[str]]] = {}

    def modules(self) -> list[str]:
        """Paths, in the repository, of the modules of the package that any test reaches."""
        files = (Path(file) for file in self._data.measured_files())
        return sorted(str(file.relative_to(REPO)) for file in files if REPO in file.parents)

    def lines(self, module: str) -> set[int]:
        """Those of a module that any test reaches."""
        self._data.set_query_contexts([".+"])
        return set(self._data.lines(str(REPO / module)) or ())

    def tests(self, module: str) -> Mapping[int, list[str]]:
        """By line of a module, the tests that reach it: as pytest names them, those of jobs by their files."""
        if module not in self._tests:
            self._data.set_query_contexts(None)
            contexts_of = self._data.contexts_by_lineno(str(REPO / module))
            self._tests[module] = {
                line: sorted(node for context in contexts if (node := node_of(context)))
                for line, contexts in contexts_of.items()
            }
        return self._tests[module]


def node_of(context: str) -> str:
    """``tests.core.test_fqn.TestTies.test_one`` as ``tests/core/test_fqn.py::TestTies::test_one``."""
    if context.endswith(".py") or not context:
        return context
    parts = context.split(".")
    number = next((number for number, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: number + 1]) + ".py", *parts[number + 1 :]])


def room_of(module: str) -> str:
    """``formats`` of ``elastic_ckpt/formats/zero0.py``; files beside the rooms are one."""
    _, room, *rest = Path(module).parts
    return room if rest else "beside the rooms"

"""Cells: the cases of distributed tests as data, and the launches that many of them share.

A cell says what was saved, what happens to a copy of it, which job loads it, on how many ranks and how. A test declares a
table of cells and looks at what the ranks of each found out::

    @cells([Cell("ZeRO-1 to 3", Save(Setup(1)), "resume", ranks=3, case={"setup": Setup(3)})])
    def test_masters_come_back(cell, facts):
        for load in facts:
            assert load.differences == {}, load.where

The selected cells of a module that need as many ranks run in one launch, one after the other. When one raises, hangs or
dies, it fails alone: the launch is replaced, and the rest go on in the next one. Saves are made when the first cell needs
them, and once a session.

With ``ELASTIC_CKPT_TEST_SPOIL=1`` every test of a cell must fail: one element of what ranks compare with is another, and
what was to be damaged is not. A test that passes all the same has shown nothing.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed import jobs
from tests.distributed.launch import launch_ranks

Change = Callable[..., object]
#: How many cells share a launch: what it takes must fit into the time limit of one test.
PACK = 40
CONVERT = "convert.convert_each"


@dataclass(frozen=True)
class Save:
    """A checkpoint that cells load.

    Attributes:
        setup: the engine that saves it.
        ranks: how many save it.
        job: as a cell's. Its case has ``folder``, ``setup`` and what is in ``more``.
        more: what the job is told beside.
        converted: whether a universal checkpoint is made of it.
        converter: the job of one rank that makes it: DeepSpeed's own converter, or another one of ``convert.py``.
        source: a save that its job goes on from: ``source`` of its case is that folder.
        forks: whether DeepSpeed forks a process of each rank, which can stand still, since a rank has threads: the save
            is tried once more then, in a launch of its own.
    """

    setup: Any
    ranks: int = 2
    job: str = "save_each"
    more: Mapping[str, Any] = field(default_factory=dict)
    converted: bool = False
    converter: str = CONVERT
    source: Save | None = None
    forks: bool = False

    @property
    def key(self) -> str:
        """Equal for equal saves; configs are dictionaries, which have no hash."""
        return repr(self)

    @property
    def name(self) -> str:
        """What saved it, for the names of cells."""
        return f"{self.setup.name}-dp{self.ranks}{' universal' * self.converted}"

    @property
    def format(self) -> str:
        """As a report names it."""
        return "universal" if self.converted else "native"

    @property
    def native(self) -> Save:
        """What it is converted from."""
        return replace(self, converted=False, converter=CONVERT)


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        name: of the test, unique in its table.
        save: what is loaded; ``None`` for a job that saves its own, if any.
        job: a function of :mod:`tests.distributed.jobs`, or ``module.function`` of another module of jobs: it takes a
            case, or a list of ``cases``, here of one, and returns a list of facts, or ``None`` where other ranks have
            them.
        ranks: how many run it.
        case: what the job is told, beside ``name``, ``folder``, and ``scratch``: a path where nothing is, to write to.
        change: is done to a copy of the save, which is loaded in its place; called with the copy and the folders of
            ``others``.
        others: more saves, of which parts are taken.
        expected: what the test looks at.
        fits: of a load that must be refused, the save and the case that are not, so that its test can be seen to fail.
        seconds: limit after which the ranks are ended, and the cell has failed.
    """

    name: str
    save: Save | None
    job: str
    ranks: int
    case: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    others: tuple[Save, ...] = ()
    expected: Any = None
    fits: tuple[Save | None, Mapping[str, Any]] | None = None
    seconds: float = 120

    def __str__(self) -> str:
        return self.name

    @property
    def saves(self) -> list[Save]:
        """All that it takes something of."""
        return [*([] if self.save is None else [self.save]), *self.others]


def crossing(
    save: Save, target: Any, ranks: int, job: str = "resume", expected: Any = None, note: str = "", **case: Any
) -> Cell:
    """A load into an engine of the ``target``'s setup; ``note`` tells it from others of the same two."""
    name = f"{save.name} to {target.name}-dp{ranks}{note and ', '}{note}"
    return Cell(name, save, job, ranks, {"setup": target, **case}, expected=expected)


def cells(table: Sequence[Cell]) -> pytest.MarkDecorator:
    """Run a test once for each cell; it gets ``cell``, and by ``facts`` what all ranks found, in the order of ranks."""
    names = [cell.name for cell in table]
    assert len(set(names)) == len(names), f"names of cells come twice: {sorted(names)}"
    return pytest.mark.parametrize("cell", table, ids=str)


class Task(NamedTuple):
    """What ranks are told of a cell or a save: its name, its job, and the case for it."""

    name: str
    job: str
    case: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """A cell whose ranks did not come to its end."""

    text: str


class Launcher:
    """Runs tasks that need as many ranks in one launch, and those that are left when one fails in another.

    Args:
        extensions_dir: where DeepSpeed builds its ops.
    """

    def __init__(self, extensions_dir: str) -> None:
        self._extensions_dir = extensions_dir

    def run(self, ranks: int, tasks: Sequence[Task], seconds: float) -> list[list[Any] | Failed]:
        """What each task found on all ranks, in the order of ranks."""
        found: list[list[Any] | Failed] = []
        while len(found) < len(tasks):
            left = tasks[len(found) :]
            imports = sorted({task.job for task in left})
            ended = launch_ranks(ranks, jobs.CELLS, left, self._extensions_dir, seconds, imports=imports)
            for of_ranks in zip(*ended.facts, strict=False):  # those that every rank came to the end of
                found.append([fact for of_rank in of_ranks for fact in of_rank or ()])
            if len(found) < len(tasks):
                task = tasks[len(found)]
                found.append(Failed(f"{task.job} on {ranks} ranks failed (None: still running at the limit)\n{ended}"))
        return found


class Saves:
    """The saves of a session.

    Args:
        folder: where they are written.
        launcher: runs their jobs.
    """

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self._root, self._launcher = folder, launcher
        self._folders: dict[str, Path | Failed] = {}

    def folder(self, save: Save) -> Path:
        """Of one save, which is made if there is none."""
        self.make([save])
        found = self._folders[save.key]
        if isinstance(found, Failed):
            pytest.fail(found.text, pytrace=False)
        return found

    def failed(self, saves: Sequence[Save]) -> Failed | None:
        """The first of these that could not be made."""
        found = [self._folders.get(save.key) for save in saves]
        return next((result for result in found if isinstance(result, Failed)), None)

    def make(self, saves: Sequence[Save]) -> None:
        """Make all that are missing: those of as many ranks in one launch."""
        sources = [save.source for save in saves if save.source is not None]
        if sources:
            self.make(sources)
        natives = {save.key: save for save in (each.native for each in saves)}
        self._make(self._makeable(natives, lambda save: save.source), self._case)
        converted = {save.key: save for save in saves if save.converted}
        self._make(
            self._makeable(converted, lambda save: save.native),
            lambda save, folder: {"native": str(self.folder(save.native))},
        )

    def _makeable(self, saves: Mapping[str, Save], base_of: Callable[[Save], Save | None]) -> dict[str, Save]:
        """Those of which there is what they are made of; the others have failed with it."""
        found = {}
        for key, save in saves.items():
            base = base_of(save)
            failed = None if base is None else self.failed([base])
            if failed is None:
                found[key] = save
            else:
                self._folders[key] = failed
        return found

    def _case(self, save: Save, folder: Path) -> dict[str, Any]:
        source = {} if save.source is None else {"source": str(self.folder(save.source))}
        return {"setup": save.setup, **source, **save.more}

    def _make(self, saves: Mapping[str, Save], case_of: Callable[[Save, Path], dict[str, Any]]) -> None:
        missing = [save for key, save in saves.items() if key not in self._folders]
        for ranks in sorted({_ranks(save) for save in missing}):
            of_ranks = [save for save in missing if _ranks(save) == ranks]
            folders = [self._root / str(len(self._folders) + number) for number in range(len(of_ranks))]
            tasks = []
            for save, folder in zip(of_ranks, folders, strict=True):
                job = save.converter if save.converted else save.job
                tasks.append(Task(repr(save), job, {"folder": str(folder), **case_of(save, folder)}))
            found = self._launcher.run(ranks, tasks, seconds=300)
            for save, folder, task, result in zip(of_ranks, folders, tasks, found, strict=True):
                self._folders[save.key] = result if isinstance(result, Failed) else folder
                if isinstance(result, Failed) and save.forks:
                    again = folder.with_name(f"{folder.name}-again")
                    once_more = task._replace(case={**task.case, "folder": str(again)})
                    (second,) = self._launcher.run(ranks, [once_more], seconds=300)
                    self._folders[save.key] = second if isinstance(second, Failed) else again


def _ranks(save: Save) -> int:
    """How many ranks its job needs: a converter is no distributed job."""
    return 1 if save.converted else save.ranks


class Packs:
    """What the selected cells of a session found.

    Args:
        saves: where their checkpoints are.
        launcher: runs their jobs.
        folder: where damaged copies are put.
        selected: all tests that will run.
    """

    def __init__(self, saves: Saves, launcher: Launcher, folder: Path, selected: Sequence[pytest.Item]) -> None:
        self._saves, self._launcher, self._copies = saves, launcher, folder
        self._numbers = itertools.count()
        self._waiting: dict[tuple[Path, int], list[Cell]] = {}
        for item in selected:
            cell = cell_of(item)
            if cell is not None and not _is_skipped(item):
                self._waiting.setdefault((item.path, cell.ranks), []).append(cell)
        self._found: dict[int, list[Any] | Failed] = {}

    def facts(self, module: Path, cell: Cell) -> list[Any]:
        """What the ranks found of this cell; up to :data:`PACK` that wait for as many ranks are run with it."""
        if id(cell) not in self._found:
            waiting = [each for each in self._waiting.get((module, cell.ranks), []) if id(each) not in self._found]
            others = [each for each in waiting if each is not cell]
            self._run([cell, *others[: PACK - 1]])
        found = self._found[id(cell)]
        if isinstance(found, Failed):
            pytest.fail(found.text, pytrace=False)
        if not found:
            pytest.fail(f"{cell.job}: no rank found anything out, so there is nothing to check", pytrace=False)
        return found

    def _run(self, pack: list[Cell]) -> None:
        self._saves.make([save for cell in pack for save in cell.saves])
        for cell in pack:
            failed = self._saves.failed(cell.saves)
            if failed is not None:
                self._found[id(cell)] = failed
        whole = [cell for cell in pack if id(cell) not in self._found]
        tasks = [Task(cell.name, cell.job, self._case(cell)) for cell in whole]
        found = self._launcher.run(pack[0].ranks, tasks, max(cell.seconds for cell in pack))
        for cell, result in zip(whole, found, strict=True):
            self._found[id(cell)] = result

    def _case(self, cell: Cell) -> dict[str, Any]:
        save, case = cell.save, cell.case
        if jobs.SPOILS and cell.fits is not None:
            save, case = cell.fits
        case = {"name": cell.name, **case}
        folder = self._copies / str(next(self._numbers))  # to be made, where there is no save
        scratch = f"{folder}-scratch"
        if save is not None and (cell.change is None or jobs.SPOILS):
            folder = self._saves.folder(save)
        elif save is not None and cell.change is not None:
            shutil.copytree(self._saves.folder(save), folder)
            cell.change(folder, *map(self._saves.folder, cell.others))
        return {"folder": str(folder), "scratch": scratch, **case}


def _is_skipped(item: pytest.Item) -> bool:
    """Whether a marker will skip it."""
    return any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that a test is about."""
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec else None
    return cell if isinstance(cell, Cell) else None

"""Which component of a run deviates from another run, and at which step; or what a run has changed on its way."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core import metadata
from elastic_ckpt.core import resume_sheet as of_run
from elastic_ckpt.core.resume_sheet import Deviation, ResumeSheet, compare_sheets
from elastic_ckpt.errors import DamagedError, NotFoundError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import global_steps, list_below, list_checkpoints, look_at
from elastic_ckpt.formats.sheet import read_sheet
from elastic_ckpt.report import saved_topology
from elastic_ckpt.storage import absolute
from elastic_ckpt.tools.comparison import Comparison, Difference, compare, open_both
from elastic_ckpt.tools.opened import locate

#: What follows from any of the components before.
_EFFECTS = (of_run.WEIGHTS, of_run.OPTIMIZER, of_run.LOSSES)
#: Runs of other topologies round sums otherwise, and training adds to it: as much of a tensor's largest value.
_ROUNDING = 1e-2
#: What changes as a run goes on.
_GO_ON = (of_run.LR, of_run.RNG, of_run.LOSSES)
_POSITIONS = ("samples_consumed", "documents_consumed")


@dataclass(frozen=True)
class Explanation:
    """What deviates, causes first, at the first common step where anything does."""

    steps: tuple[int, ...]  # that both have
    step: int | None = None  # ``None``: nothing deviates
    deviations: tuple[Deviation, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> list[str]:
        """The components to look at: causes, or where there are none, what has changed."""
        found = list(dict.fromkeys(each.component for each in self.deviations))
        return [each for each in found if each not in _EFFECTS] or found


@dataclass(frozen=True)
class Change:
    """What a run has changed between two of its steps."""

    first: int
    second: int
    deviation: Deviation


def explain(first: str, second: str, config: ElasticConfig) -> Explanation:
    """Find the first step at which two runs deviate, and what of them.

    Both are folders of runs, or of one tag. Of tensors, all are read at a few of the steps that both have.
    Raises :class:`ElasticCkptError` if they have no step in common, or one cannot be read.
    """
    mine, others = (_by_step(folder, config) for folder in (first, second))
    steps = sorted(mine.keys() & others.keys())
    if not steps:
        problem = "the two have no step in common"
        remedy = "give two tags of one step, or folders with such tags"
        expected = f"one of the steps {sorted(mine)}"
        found = f"{sorted(others)} in {second}"
        raise NotFoundError(problem, first, expected, found, remedy=remedy)

    @cache
    def at(step: int) -> Explanation:
        deviations, notes = _deviations(mine[step], others[step], config)
        return Explanation(tuple(steps), step if deviations else None, tuple(deviations), tuple(notes))

    number = bisect_left(steps, True, key=lambda step: bool(at(step).deviations))
    return at(steps[min(number, len(steps) - 1)])


def changes(folder: str, config: ElasticConfig) -> tuple[list[int], list[Change]]:
    """The steps of a run that have resume sheets, and what they tell to be another one from one to the next."""
    sheets = {step: sheet for step, found in _by_step(folder, config).items() if (sheet := _sheet(found, []))}
    found = []
    for step, sheet in sheets.items():
        data = {key: value for key, value in (sheet.data or {}).items() if key not in _POSITIONS}
        sheets[step] = sheet.model_copy(update={"data": data})
    for before, after in pairwise(sorted(sheets)):
        both = compare_sheets(sheets[before], sheets[after])
        found += [Change(before, after, each) for each in both if each.component not in _GO_ON]
    return sorted(sheets), found


def _sheet(found: CheckpointInfo, notes: list[str]) -> ResumeSheet | None:
    """The sheet of a checkpoint; without one that can be read, a note."""
    try:
        sheet = read_sheet(found.folder)
        notes += [f"no resume sheet is in {found.folder}"] if sheet is None else []
        return sheet
    except DamagedError as error:
        notes.append(f"{error.problem}: {error.file}: {error.found}")
        return None


def _by_step(folder: str, config: ElasticConfig) -> dict[int, CheckpointInfo]:
    """The checkpoints of a folder by step; of several of one step, the newest."""
    path = absolute(folder)
    by_step = dict[int, CheckpointInfo]()
    every = list_checkpoints(path)
    if not every and look_at(*os.path.split(path)) is None:  # not a tag's folder, but a framework's
        every = [each for _, each in list_below(path)]
    for found in every or [locate(path, None, config.trust_pickle)]:
        step = global_steps(found, config.trust_pickle)
        if step is not None:
            by_step.setdefault(step, found)
    return by_step


def _deviations(
    first: CheckpointInfo, second: CheckpointInfo, config: ElasticConfig
) -> tuple[list[Deviation], list[str]]:
    notes: list[str] = []
    left, right = (_sheet(each, notes) for each in (first, second))
    found = compare_sheets(left, right) if left and right else []
    one, other, without = open_both(first.folder, second.folder, config)
    outcome = compare(one, other, config.reading.threads, without=without)
    topologies = {saved_topology(each.metadata.source) for each in (one, other)}
    found += _of_tensors(outcome, {each.component for each in found}, len(topologies) > 1, notes)
    notes += outcome.notes
    if not any(each.component in _EFFECTS for each in found) and any(each.component == of_run.RNG for each in found):
        found = [each for each in found if each.component != of_run.RNG]
        notes.append("states of random generators differ, with no effect so far")
    return of_run.in_order(found), notes


def _of_tensors(outcome: Comparison, named: set[str], resharded: bool, notes: list[str]) -> Iterator[Deviation]:
    """A deviation for each component in which tensors and other values differ, but for those that sheets have named."""
    by_component: dict[str, list[Difference]] = {}
    rounded = 0
    for each in outcome.differences:
        if resharded and each.max_abs is not None and 0 < each.max_abs <= _ROUNDING * each.scale:
            rounded += 1
        else:
            by_component.setdefault(_component(each), []).append(each)
    if rounded:
        notes.append(f"{rounded} tensors differ by no more than other topologies round: {_ROUNDING:g} of their values")
    for component in of_run.COMPONENTS:
        if component not in named and (every := by_component.get(component)):
            worst = max(every, key=lambda each: each.max_abs or 0.0)
            yield Deviation(component, f"{len(every)} differ, such as {worst.name} {worst.key}: {worst.detail}")


def _component(difference: Difference) -> str:
    name = difference.name
    key = difference.key
    if key == "counter":
        return of_run.OPTIMIZER if name == "skipped_steps" else of_run.BATCH
    if name == "lr scheduler" or key == "lr":
        return of_run.LR
    if name.startswith("param group "):
        return of_run.HYPERPARAMETERS
    if difference.max_abs == 0.0:  # of another dtype, with the same values
        return of_run.PRECISION
    return of_run.WEIGHTS if key in metadata.WEIGHTS else of_run.OPTIMIZER

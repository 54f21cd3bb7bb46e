"""Which of several saves are older: by the counters in their files, the numbers in their tags, and times of writing.

Counters stand still where something else than ``engine.step`` steps, as in Lightning Fabric, and are equal in copies.
Then the numbers in the tags tell, if all of these tags have one form, and else when the files were written.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.detect import saved_entry, step_of_tag
from elastic_ckpt.storage import modified

_NUMBER = re.compile(r"\d+")
BY_COUNTERS = "global_steps"
BY_NUMBERS = "the numbers in their names"
BY_TIMES = "the times of writing"


@dataclass(frozen=True)
class Save:
    """What is known of when a checkpoint was saved."""

    name: str  # that a user or framework has numbered: the tag, or the folder around it (checkpoint-20)
    counted: int | None  # global_steps of its model-states files; ``None`` if none can be read
    tagged: int | None = None  # step in a tag of a known form
    written: float = 0.0  # seconds since the epoch

    @property
    def step(self) -> int | None:
        """The global step; of a checkpoint whose files cannot be read, that of its tag."""
        return self.tagged if self.counted is None else self.counted

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its name."""
        return tuple(map(int, _NUMBER.findall(self.name)))

    @property
    def form(self) -> str:
        """Its name without the numbers."""
        return _NUMBER.sub("#", self.name)


def save_of(found: CheckpointInfo, name: str | None = None, trust_pickle: bool = False) -> Save:
    """What the files of a checkpoint tell of its save. Reads one model-states file.

    ``name``: of its tag, if not given.
    """
    counted = saved_entry(found, "global_steps", trust_pickle)
    files = found.files
    names = chain(files.model.values(), files.model_zero3.values(), files.optimizer.values())
    path = next(map(found.path, names), found.folder)
    steps = counted if isinstance(counted, int) else None
    return Save(name or os.path.basename(found.folder), steps, step_of_tag(found.tag), modified(path))


def oldest_first(saves: Sequence[Save]) -> list[int]:
    """The saves by their index; those of no known step come last, since they may be the newest."""
    forms: dict[float, set[str]] = {}
    for save in saves:
        forms.setdefault(_step(save), set()).add(save.form)

    def age(index: int) -> tuple[float, tuple[int, ...], float]:
        save = saves[index]
        has_one_form = len(forms[_step(save)]) == 1
        return _step(save), save.numbers if has_one_form else (), save.written

    return sorted(range(len(saves)), key=age)


def told_by(newer: Save, older: Save) -> str:
    """By what two saves are ordered."""
    if newer.step != older.step:
        return BY_COUNTERS
    return BY_NUMBERS if newer.form == older.form and newer.numbers != older.numbers else BY_TIMES


def steps_between(newer: Save, older: Save) -> int | None:
    """Steps that one save has trained beyond another; ``None`` if nothing tells."""
    steps = None
    if newer.counted is not None and older.counted is not None and newer.counted != older.counted:
        steps = newer.counted - older.counted
    elif newer.tagged is not None and older.tagged is not None:
        steps = newer.tagged - older.tagged
    elif newer.counted is None and newer.step is not None and older.step is not None:
        steps = newer.step - older.step
    return None if steps is None or steps < 0 else steps


def _step(save: Save) -> float:
    return math.inf if save.step is None else save.step

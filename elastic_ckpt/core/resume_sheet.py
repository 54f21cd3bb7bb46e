"""The resume sheet: what a run was when it saved, beside its tensors, and how two runs differ in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import shortened

#: The sheet's file in the folder of a tag; how much of it is read, and how many losses are in it.
SHEET, MOST_SHEET_NBYTES, MOST_LOSSES = "elastic_resume.json", 1 << 20, 64
#: Components of a run, causes before what follows from them.
CODE, PRECISION, BATCH, DATA, LR = "code versions", "precision", "batch", "data order", "lr"
HYPERPARAMETERS, RNG, WEIGHTS, OPTIMIZER, LOSSES = "hyperparameters", "RNG", "weights", "optimizer", "losses"
COMPONENTS = (CODE, PRECISION, BATCH, DATA, LR, HYPERPARAMETERS, RNG, WEIGHTS, OPTIMIZER, LOSSES)
#: Losses of two runs are equal up to this fraction: other ranks sum in another order.
_ROUNDING = 1e-3
Value = bool | int | float | str | None | list[bool | int | float]


class ResumeSheet(BaseModel):
    """What a run was after a step. A checkpoint's is untrusted, as its other files are: it is only compared."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: Literal[1] = 1
    step: int
    world_size: int
    global_batch: int
    precision: str
    groups: list[dict[str, Value]] = []  # numbers among the hyperparameters, by param group
    data: dict[str, Value] | None = None  # position and facts of the registered sampler
    rng: dict[str, str] = {}  # digests of rank 0's generators
    versions: dict[str, str] = {}
    losses: list[float] = Field([], max_length=MOST_LOSSES)  # of the last steps, if the script hands them over


@dataclass(frozen=True)
class Deviation:
    """A component that is another one in two runs, and how."""

    component: str
    detail: str

    def __str__(self) -> str:
        return f"{self.component}: {self.detail}"


def compare_sheets(first: ResumeSheet, second: ResumeSheet) -> list[Deviation]:
    """What deviates, in the order of :data:`COMPONENTS`; what one of them does not tell is not compared."""
    found = [Deviation(CODE, each) for each in _changes(first.versions, second.versions)]
    pairs = ((PRECISION, first.precision, second.precision), (BATCH, first.global_batch, second.global_batch))
    found += [Deviation(name, f"{mine} -> {other}") for name, mine, other in pairs if mine != other]
    if first.data is not None and second.data is not None:
        found += [Deviation(DATA, each) for each in _changes(first.data, second.data)]
    if first.groups and second.groups and len(first.groups) != len(second.groups):
        found.append(Deviation(HYPERPARAMETERS, f"{len(first.groups)} -> {counted(len(second.groups), 'param group')}"))
    else:
        for number, (mine, other) in enumerate(zip(first.groups, second.groups, strict=False)):
            for change in _changes(mine, other):
                component = LR if change.startswith("lr ") else HYPERPARAMETERS
                found.append(Deviation(component, f"{change} (param group {number})"))
    if kinds := [key for key in sorted(first.rng.keys() & second.rng.keys()) if first.rng[key] != second.rng[key]]:
        found.append(Deviation(RNG, f"other states of {', '.join(kinds)}"))
    found += [Deviation(LOSSES, each) for each in _apart(first.losses, second.losses)]
    return in_order(found)


def in_order(deviations: Iterable[Deviation]) -> list[Deviation]:
    """Deviations, causes before what follows from them."""
    return sorted(deviations, key=lambda each: COMPONENTS.index(each.component))


def goes_on(saved: ResumeSheet, live: ResumeSheet, deviations: Iterable[Deviation], replaced: bool = False) -> str:
    """In words, the components that both sheets tell and that do not deviate.

    ``replaced``: whether hyperparameters are the saved ones because a load has replaced other ones.
    """
    rates = dict.fromkeys(f"{group['lr']:g}" for group in live.groups if isinstance(group.get("lr"), int | float))
    told = {BATCH: f"batch {live.global_batch}"}
    if saved.groups and live.groups:
        which = " (the saved ones, which replaced live ones: see the note)" if replaced else ""
        told |= {LR: f"lr {shortened(rates)}", HYPERPARAMETERS: HYPERPARAMETERS + which}
    if saved.data and live.data:
        told[DATA] = f"{DATA} ({', '.join(f'{key} {value}' for key, value in live.data.items())})"
    told |= {PRECISION: f"{PRECISION} {live.precision}", CODE: CODE}
    other = {each.component for each in deviations}
    return ", ".join(text for component, text in told.items() if component not in other)


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Values of the keys that both have, where they are not equal; NaN is equal to itself, and 1 to 1.0."""
    for key in sorted(first.keys() & second.keys()):
        mine, other = first[key], second[key]
        if mine != other and repr(mine) != repr(other):
            yield f"{key} {mine} -> {other}"


def _apart(first: list[float], second: list[float]) -> Iterator[str]:
    """The first of the last losses that differ by more than rounding."""
    for back in range(min(len(first), len(second)), 0, -1):
        mine, other = first[-back], second[-back]
        if not abs(mine - other) <= _ROUNDING * max(abs(mine), abs(other)) and repr(mine) != repr(other):
            yield f"{mine:g} -> {other:g}, number {back} from the end"
            return

"""The resume sheet: what a run was when it saved, beside its tensors, and how two runs differ in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import shortened

#: The sheet's file in the folder of a tag.
SHEET = "elastic_resume.json"
#: How much of it is read.
MOST_SHEET_NBYTES = 1 << 20
#: How many losses it has, at most.
MOST_LOSSES = 64
#: How many files it has digests of, at most.
MOST_FILES = 1 << 12
#: Components of a run, causes before what follows from them.
CODE = "code versions"
PRECISION = "precision"
BATCH = "batch"
DATA = "data order"
LR = "lr"
HYPERPARAMETERS = "hyperparameters"
RNG = "RNG"
WEIGHTS = "weights"
OPTIMIZER = "optimizer"
LOSSES = "losses"
COMPONENTS = (CODE, PRECISION, BATCH, DATA, LR, HYPERPARAMETERS, RNG, WEIGHTS, OPTIMIZER, LOSSES)
#: Losses of two runs are equal up to this fraction: other ranks sum in another order.
_ROUNDING = 1e-3
#: Deviations of a component that are told: a sheet may have any number of them.
_MOST_TOLD = 64
#: Characters of a value that are told.
_LONGEST_TEXT = 200
Value = bool | int | float | str | None | list[bool | int | float]
Group = Mapping[str, Value]


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
    files: dict[str, str] = {}  # digests of what files hold, by name, of a save without optimizer partitions


@dataclass(frozen=True)
class Deviation:
    """A component that is another one in two runs, and how."""

    component: str
    detail: str

    def __str__(self) -> str:
        return f"{self.component}: {self.detail}"


def compare_sheets(
    first: ResumeSheet, second: ResumeSheet, sources: Sequence[Sequence[int]] | None = None
) -> list[Deviation]:
    """What deviates, in the order of :data:`COMPONENTS`; what one of them does not tell is not compared.

    ``sources``: per param group of the second run, those of the first that its parameters were in; ``None``: the same
    ones, if there are as many.
    """
    found = [Deviation(CODE, each) for each in _changes(first.versions, second.versions)]
    pairs = ((PRECISION, first.precision, second.precision), (BATCH, first.global_batch, second.global_batch))
    found += [Deviation(name, f"{_short(mine)} -> {_short(other)}") for name, mine, other in pairs if mine != other]
    if first.data is not None and second.data is not None:
        found += [Deviation(DATA, each) for each in _changes(first.data, second.data)]
    if first.groups and second.groups:
        found += dict.fromkeys(_compare_groups(first.groups, second.groups, sources))
    if kinds := [key for key in sorted(first.rng.keys() & second.rng.keys()) if first.rng[key] != second.rng[key]]:
        found.append(Deviation(RNG, f"other states of {shortened(map(_short, kinds))}"))
    found += [Deviation(LOSSES, each) for each in _apart(first.losses, second.losses)]
    return _shortened(in_order(found))


def _shortened(found: Sequence[Deviation]) -> list[Deviation]:
    """The first deviations of each component, and how many more there are."""
    by_component: dict[str, list[Deviation]] = {}
    for each in found:
        by_component.setdefault(each.component, []).append(each)
    kept: list[Deviation] = []
    for component, every in by_component.items():
        kept += every[:_MOST_TOLD]
        if len(every) > _MOST_TOLD:
            kept.append(Deviation(component, f"and {len(every) - _MOST_TOLD} more"))
    return kept


def _compare_groups(
    first: Sequence[Group], second: Sequence[Group], sources: Sequence[Sequence[int]] | None
) -> Iterator[Deviation]:
    """What deviates in the hyperparameters of param groups; one of them may be compared with several."""
    if len(first) != len(second):
        yield Deviation(HYPERPARAMETERS, f"{len(first)} -> {counted(len(second), 'param group')}")
    elif sources is None:
        sources = [[number] for number in range(len(second))]
    if sources is None:
        before = _rates(first)
        after = _rates(second)
        if before and after and (before != after or len(before) > 1):  # whose is whose is not known
            yield Deviation(LR, f"{shortened(before)} -> {shortened(after)}, in other param groups")
        return
    for number, (group, of_group) in enumerate(zip(second, sources, strict=True)):
        for source in of_group:
            for change in _changes(first[source], group):
                component = LR if change.startswith("lr ") else HYPERPARAMETERS
                yield Deviation(component, f"{change} (param group {number})")
        if not of_group and "lr" in group:
            yield Deviation(LR, f"{shortened(_rates([group]))} (param group {number}, of which nothing was saved)")


def _rates(groups: Iterable[Group]) -> list[str]:
    """The learning rates of param groups, each once."""
    return list(dict.fromkeys(f"{group['lr']:g}" for group in groups if isinstance(group.get("lr"), int | float)))


def in_order(deviations: Iterable[Deviation]) -> list[Deviation]:
    """Deviations, causes before what follows from them."""
    return sorted(deviations, key=lambda each: COMPONENTS.index(each.component))


def goes_on(saved: ResumeSheet, live: ResumeSheet, deviations: Iterable[Deviation], replaced: bool = False) -> str:
    """In words, the components that both sheets tell and that do not deviate.

    ``replaced``: whether hyperparameters are the saved ones because a load has replaced other ones.
    """
    told = {BATCH: f"batch {live.global_batch}"}
    if saved.groups and live.groups:
        which = " (the saved ones, which replaced live ones: see the note)" if replaced else ""
        told |= {LR: f"lr {shortened(_rates(live.groups))}", HYPERPARAMETERS: HYPERPARAMETERS + which}
    if saved.data and live.data:
        told[DATA] = f"{DATA} ({', '.join(f'{key} {value}' for key, value in live.data.items())})"
    told |= {PRECISION: f"{PRECISION} {live.precision}", CODE: CODE}
    other = {each.component for each in deviations}
    return ", ".join(text for component, text in told.items() if component not in other)


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Values of the keys that both have, where they are not equal; NaN is equal to itself, and 1 to 1.0."""
    for key in sorted(first.keys() & second.keys()):
        mine = first[key]
        other = second[key]
        if mine != other and repr(mine) != repr(other):
            yield f"{_short(key)} {_short(mine)} -> {_short(other)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _apart(first: list[float], second: list[float]) -> Iterator[str]:
    """The first of the last losses that differ by more than rounding."""
    for back in range(min(len(first), len(second)), 0, -1):
        mine = first[-back]
        other = second[-back]
        if not abs(mine - other) <= _ROUNDING * max(abs(mine), abs(other)) and repr(mine) != repr(other):
            yield f"{mine:g} -> {other:g}, number {back} from the end"
            return

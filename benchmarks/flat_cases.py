"""Where the cost of a load tends to grow: what is varied, and how fast the cost follows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import NATIVE, UNIVERSAL
from benchmarks.results import spread

#: What is varied: many tiny parameters, many param groups, many source files and ranks.
PARAMETERS, GROUPS, FILES = "parameters", "param groups", "files"
#: Elements of each parameter.
TINY = (8, 8)


@dataclass(frozen=True)
class FlatCase:
    """One load: of so many tiny parameters in so many param groups, saved by ``saved_dp`` ranks, loaded by ``dp``."""

    series: str
    stage: int
    parameters: int
    groups: int
    saved_dp: int
    dp: int
    source: str = NATIVE
    shape: tuple[int, int] = TINY

    @property
    def checkpoint(self) -> str:
        """Name of the folder that it reads, which other cases may read too."""
        return f"p{self.parameters}-g{self.groups}-z{self.stage}-dp{self.saved_dp}"

    @property
    def varied(self) -> int:
        """What the cost is held against."""
        return {PARAMETERS: self.parameters, GROUPS: self.groups, FILES: self.saved_dp}[self.series]

    @property
    def line(self) -> str:
        """What stays the same along a line of the picture."""
        text = f"ZeRO-{self.stage}, {self.source}"
        return f"ZeRO-{self.stage}, on {self.dp} ranks" if self.series == FILES else text


def enumerate_flat(
    parameters: Sequence[int],
    groups: Sequence[int],
    saved_dps: Sequence[int],
    dps: Sequence[int],
    most_universal: int,
    stages: Sequence[int] = (1, 3),
) -> list[FlatCase]:
    """All cases.

    Args:
        parameters, groups, saved_dps, dps: what to vary.
        most_universal: universal checkpoints are made of at most so many parameters: there are three files for each.
        stages: ZeRO stages.
    """
    cases = []
    for stage in stages:
        for count in parameters:
            cases.append(FlatCase(PARAMETERS, stage, count, 1, 2, 2))
            if count <= most_universal:
                cases.append(FlatCase(PARAMETERS, stage, count, 1, 2, 2, UNIVERSAL))
        cases += [FlatCase(GROUPS, stage, 1000, count, 2, 2) for count in groups]
        cases += [FlatCase(FILES, stage, 200, 2, saved_dp, dp) for dp in dps for saved_dp in saved_dps]
    return cases


@dataclass(frozen=True)
class FlatPoint:
    """What one case cost: medians of the slowest rank's seconds, and the most of any rank otherwise."""

    case: FlatCase
    files: int
    seconds: float
    phases: Mapping[str, float]
    metadata_nbytes: int
    opens: int
    opened: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def point_of(case: FlatCase, files: int, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> FlatPoint:
    """What the rounds that count come to.

    Args:
        case: the case.
        files: in the checkpoint.
        rounds: what each rank measured in each round.
    """
    ranks = [rank for each in rounds for rank in each]
    phases = {
        name: spread([max(rank["phases"][name] for rank in each) for each in rounds]).median
        for name in ranks[0]["phases"]
    }
    return FlatPoint(
        case=case,
        files=files,
        seconds=spread([max(rank["seconds"] for rank in each) for each in rounds]).median,
        phases=phases,
        metadata_nbytes=max(rank["read_nbytes"] - rank["tensor_nbytes"] for rank in ranks),
        opens=max(rank["opens"] for rank in ranks),
        opened=max(rank["files"] for rank in ranks),
    )


def lines_of(points: Sequence[FlatPoint]) -> dict[str, dict[str, list[FlatPoint]]]:
    """Series -> line -> its points, in order of what is varied."""
    lines: dict[str, dict[str, list[FlatPoint]]] = {}
    order = (PARAMETERS, GROUPS, FILES)
    for point in sorted(points, key=lambda point: (order.index(point.case.series), point.case.varied)):
        lines.setdefault(point.case.series, {}).setdefault(point.case.line, []).append(point)
    return lines


def growth(values: Sequence[tuple[float, float]]) -> float:
    """The power by which a cost follows what is varied, from first point to last: 0 is flat, 1 is in proportion."""
    (first, low), (last, high) = values[0], values[-1]
    if first == last or low <= 0 or high <= 0:
        return 0.0
    return math.log(high / low) / math.log(last / first)

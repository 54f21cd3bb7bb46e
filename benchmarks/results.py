"""What was measured, and what it comes to. Pure: plain data in, plain data out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import CONTENDERS, FLOORS, MODELS, RESUME, Case

_MIB = 1 << 20


@dataclass(frozen=True)
class Spread:
    """Seconds of several rounds."""

    median: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Summary:
    """One contender, one kind of memory, over all rounds that count.

    Bytes and files are those of the rank that had most of them.

    Attributes:
        contender, kind: what it is.
        seconds: barrier to barrier; of a conversion, with that.
        phases: medians over rounds of the slowest rank's seconds, phase by phase; elastic_ckpt only.
        read_nbytes: bytes that were read.
        owned_nbytes: bytes that the rank needed, masters and states without padding.
        disk_nbytes: bytes that came from the disk.
        metadata_nbytes: bytes read beside tensors; ``None`` where nobody tells the two apart.
        extra_nbytes: memory taken for a while, above what the load was for.
        opens, files: how often files were opened, and how many.
        wrong: what was not restored as it had been saved.
    """

    contender: str
    kind: str
    seconds: Spread
    phases: Mapping[str, float]
    read_nbytes: int
    owned_nbytes: int
    disk_nbytes: int
    metadata_nbytes: int | None
    extra_nbytes: int
    opens: int
    files: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class CaseResult:
    """One case: what was measured, and who was left out and why."""

    case: Case
    samples: Sequence[Mapping[str, Any]]
    conversion: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = self.case
        return {
            "case": {"params": case.params, "stage": case.stage, "saved_dp": case.saved_dp, "dp": case.dp},
            "name": case.name,
            "parameters": MODELS[case.params].numel,
            "state_nbytes": case.state_nbytes,
            "conversion": dict(self.conversion),
            "left_out": dict(self.left_out),
            "summaries": [summary_as_dict(self, each) for each in summarize(self)],
            "samples": list(self.samples),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CaseResult:
        """Undo :meth:`as_dict`."""
        return cls(Case(**values["case"]), values["samples"], values["conversion"], values["left_out"])


def spread(values: Sequence[float]) -> Spread:
    """Median and extremes.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("nothing was measured")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def summarize(result: CaseResult) -> list[Summary]:
    """A summary for each contender and kind, in the order of :data:`CONTENDERS`; round 0 does not count."""
    summaries = []
    for contender in CONTENDERS.values():
        if contender.key in result.left_out:
            continue
        for kind in contender.kinds:
            samples = [s for s in result.samples if (s["contender"], s["kind"]) == (contender.measured, kind)]
            if any(sample["round"] for sample in samples):
                added = result.conversion["conversion_seconds"] if contender.conversion else 0.0
                summaries.append(_summary(contender.key, kind, samples, added))
    return summaries


def _summary(key: str, kind: str, samples: Sequence[Mapping[str, Any]], added_seconds: float) -> Summary:
    counted = [sample for sample in samples if sample["round"]]
    ranks = [rank for sample in counted for rank in sample["ranks"]]
    phases = ranks[0]["phases"]
    per_round = {name: [max(rank["phases"][name] for rank in s["ranks"]) for s in counted] for name in phases}
    told = all(rank["tensor_nbytes"] is not None for rank in ranks)
    return Summary(
        contender=key,
        kind=kind,
        seconds=spread([max(rank["seconds"] for rank in s["ranks"]) + added_seconds for s in counted]),
        phases={name: statistics.median(values) for name, values in per_round.items()},
        read_nbytes=max(rank["read_nbytes"] for rank in ranks),
        owned_nbytes=max(rank["owned_nbytes"] for rank in ranks),
        disk_nbytes=max(rank["disk_nbytes"] for rank in ranks),
        metadata_nbytes=max(rank["read_nbytes"] - rank["tensor_nbytes"] for rank in ranks) if told else None,
        extra_nbytes=max(rank["extra_nbytes"] for rank in ranks),
        opens=max(rank["opens"] for rank in ranks),
        files=max(rank["files"] for rank in ranks),
        wrong=wrong_of(samples),
    )


def wrong_of(samples: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """What any of these loads did not restore."""
    return tuple(dict.fromkeys(what for s in samples for what, right in s["restored"].items() if not right))


def all_wrong(result: CaseResult, contender: str) -> tuple[str, ...]:
    """What a contender did not restore, in any kind of memory and any round: it is judged in full only once."""
    measured = CONTENDERS[contender].measured
    return wrong_of(sample for sample in result.samples if sample["contender"] == measured)


def find(summaries: Iterable[Summary], contender: str, kind: str = RESUME) -> Summary | None:
    """The summary of a contender, if it was measured."""
    return next((each for each in summaries if (each.contender, each.kind) == (contender, kind)), None)


def over_floor(summary: Summary, summaries: Sequence[Summary]) -> float | None:
    """Times the floor of the same files and the same kind of memory."""
    floor = find(summaries, CONTENDERS[summary.contender].floor, summary.kind)
    return summary.seconds.median / floor.seconds.median if floor else None


def summary_as_dict(result: CaseResult, summary: Summary) -> dict[str, Any]:
    """For JSON, with what follows from it."""
    values = {name: getattr(summary, name) for name in Summary.__dataclass_fields__}
    seconds = summary.seconds
    values["seconds"] = {name: getattr(seconds, name) for name in Spread.__dataclass_fields__}
    values["times_floor"] = over_floor(summary, summarize(result))
    values["wrong"] = list(all_wrong(result, summary.contender))
    return values


@dataclass(frozen=True)
class Target:
    """Something that was aimed at, and what became of it.

    Attributes:
        what: the aim.
        value: what was measured.
        bound: what was aimed at.
        at_least: whether the value should be at least the bound, or at most.
        applies: whether this case is one that the aim is about.
    """

    what: str
    value: float
    bound: float
    at_least: bool
    applies: bool = True

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


#: Most times the floor of its source, by contender, in memory as a resuming job finds it; of small models in any case.
_OVER_FLOOR = {"native": 1.05, "universal": 1.15}
_SMALL_OVER_FLOOR, _SMALL_NUMEL = 2.0, 100_000_000
#: How many times as fast as another contender, in the kind of memory in which both resume.
_FASTER = {"ds-universal": 10.0, "ds-convert": 28.0, "dcp": 2.1, "ds-native": 1.0}
#: Phases that do not grow with bytes, and most seconds of them together.
_FIXED, _FIXED_SECONDS = ("metadata", "plan", "commit"), 0.10
#: The case that aims are about; others are shown beside them.
_AIMED_AT = Case("270M", 3, 2, 4)


def targets(result: CaseResult) -> list[Target]:
    """What elastic_ckpt aims at, as far as it was measured in this case."""
    summaries = summarize(result)
    ours = find(summaries, "native")
    if ours is None:
        return []
    applies, is_small = result.case == _AIMED_AT, MODELS[result.case.params].numel < _SMALL_NUMEL
    met = []
    for key, bound in _OVER_FLOOR.items():
        mine = find(summaries, key)
        ratio = over_floor(mine, summaries) if mine else None
        if ratio is not None:
            what = f"{CONTENDERS[key].title}: times the floor"
            most = _SMALL_OVER_FLOOR if is_small else bound
            met.append(Target(what, ratio, most, at_least=False, applies=applies or is_small))
    for key, bound in _FASTER.items():
        other = find(summaries, key)
        if other is not None:
            ratio = other.seconds.median / ours.seconds.median
            what = f"times as fast as {CONTENDERS[key].title}"
            met.append(Target(what, ratio, bound, at_least=True, applies=applies or key == "ds-native"))
    if set(_FIXED) <= set(ours.phases):
        fixed = sum(ours.phases[name] for name in _FIXED)
        met.append(Target(f"{' + '.join(_FIXED)}, seconds", fixed, _FIXED_SECONDS, at_least=False, applies=applies))
    if off := find(summaries, "unverified"):
        ratio = ours.seconds.median / off.seconds.median
        met.append(Target("verified / not verified", ratio, 1.08, at_least=False, applies=applies))
    tensors = ours.read_nbytes - (ours.metadata_nbytes or 0)
    met.append(Target("tensor bytes read / bytes owned", tensors / ours.owned_nbytes, 1.02, at_least=False))
    met.append(Target("extra memory of a rank, MiB", ours.extra_nbytes / _MIB, 64.0, at_least=False))
    return met


def is_floor(summary: Summary) -> bool:
    """Whether this is what is possible, and nobody's loader."""
    return summary.contender in FLOORS

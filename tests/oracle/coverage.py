"""Proves of a whole job that its ranks restore everything, and nothing twice. Pure: plans in, a proof out.

What is proven, of all that is restored:

1. *Written.* On every rank, items and requantize items write each element of each target exactly once, but for padding and rows
   of a vocabulary that the checkpoint lacks. A target that all data-parallel ranks fill together is written exactly once
   by all of them.
2. *Whole.* At each pipeline stage and tensor-parallel rank, the data-parallel ranks' fragments tile each live shard:
   each element of it belongs to exactly one of them (without ZeRO: to each of them, once). With 1: each element of a
   live shard is written exactly once.
3. *Read.* Every element of every logical tensor in the checkpoint is read: one that is cut over tensor-parallel ranks
   exactly once for each pipeline stage that holds it, so are shards that stay as they are; of one that every
   tensor-parallel rank saved whole, and of tied copies, each element is restored, or compared with the one that is.
   What is read belongs to a tensor.
4. *Complete.* Every parameter, state, buffer and frozen weight of the checkpoint is restored by some stage.
5. *Right.* What is read goes into the tensor that it is of; where shards stay as they were saved, or every rank held
   the whole, to the very element.

What is expected follows from the shapes on both sides, not from what the planner thinks of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elastic_ckpt.core.local_state import FlatPartition, LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan, TargetTensor
from elastic_ckpt.core.state_kinds import ELEMENTWISE
from tests.oracle.correspondence import Correspondence
from tests.oracle.intervals import Intervals, coverage, covers_exactly, intervals, strided, together
from tests.oracle.source_coverage import SCALES, Fault, SourceCoverage

__all__ = ["Coverage", "Fault", "Proof", "prove"]

#: Faults that are kept; a hole in every tensor need not be listed.
_MOST_FAULTS = 1000


@dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        ranks: how many plans were looked at.
        numel_written: elements of all targets of all ranks that were written, each once; what data-parallel ranks fill
            together counts once.
        numel_saved: elements of the checkpoint's logical tensors, each shard and each tied copy by itself.
        faults: what speaks against it; none: it holds.
    """

    ranks: int
    numel_written: int
    numel_saved: int
    faults: tuple[Fault, ...]

    @property
    def holds(self) -> bool:
        return not self.faults


def prove(metadata: CheckpointMetadata, ranks: Iterable[tuple[LocalState, LoadPlan]]) -> Proof:
    """Look at every rank of a job.

    Args:
        metadata: what the checkpoint holds, with the names that the local state use.
        ranks: what each rank holds, and its plan.
    """
    coverage = Coverage(metadata)
    for local_state, plan in ranks:
        coverage.add(local_state, plan)
    return coverage.proof()


@dataclass
class _Place:
    """What is known of one pipeline stage and tensor-parallel rank.

    Attributes:
        where: in words.
        dp: data-parallel degree.
        shapes: name -> shape of the live shard.
        held: (name, key) -> (start, stop) of what each data-parallel rank holds.
        everywhere: (name, key) of what every one of them holds whole.
        ranks: data-parallel ranks that were seen.
        shared: targets that they fill together.
        written: what they have written there.
    """

    where: str
    dp: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    everywhere: set[tuple[str, str]] = field(default_factory=set)
    ranks: list[int] = field(default_factory=list)
    shared: _Line | None = None
    written: list[Intervals] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """Some targets of a plan, one behind the other; ``bases``: target -> where it begins."""

    targets: tuple[TargetTensor, ...]
    bases: dict[int, int]

    def wanted(self) -> Intervals:
        """Everything but gaps."""
        pairs = []
        for target, base in zip(self.targets, self.bases.values(), strict=True):
            position = 0
            for gap in sorted(target.gaps, key=lambda gap: gap.start):
                pairs.append((base + position, base + gap.start))
                position = gap.stop
            pairs.append((base + position, base + target.numel))
        return intervals(pairs)

    def at(self, position: int) -> tuple[TargetTensor, int]:
        """The target there, and where it begins."""
        bases = list(self.bases.values())
        number = max(index for index, base in enumerate(bases) if base <= position)
        return self.targets[number], bases[number]


def _line(plan: LoadPlan, replicated: bool) -> _Line:
    """Its targets that data-parallel ranks fill together, or those of its own; no scales, which are no elements."""
    targets, bases, end = [], {}, 0
    for number, target in enumerate(plan.reads.targets):
        if target.replicated == replicated and target.numel and target.key not in SCALES:
            targets.append(target)
            bases[number] = end
            end += target.numel
    return _Line(tuple(targets), bases)


def _writes(plan: LoadPlan, line: _Line) -> Intervals:
    """What a plan writes into these targets."""
    rows = [
        (line.bases[copy.target] + copy.target_offset, copy.numel, copy.rows, copy.target_stride)
        for copy in plan.reads.items
        if copy.target in line.bases
    ]
    for item in plan.reads.requantize_items:
        base = line.bases.get(item.target)
        if base is not None and item.scale is not None:  # added up: all of it, from several sources
            rows.append((base + item.start, item.numel, 1, 0))
        elif base is not None:
            rows += [(base + source.target_offset, source.numel, 1, 0) for source in item.sources]
    return strided(rows)


class Coverage:
    """Collects the plans of a job's ranks.

    Args:
        metadata: what the checkpoint holds.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._catalog = metadata
        self._faults: list[Fault] = []
        self._places: dict[tuple[int, int], _Place] = {}
        self._states = {key: set[str]() for key in metadata.state_keys}
        for name, key in metadata.tensors:
            if key in self._states:
                self._states[key].add(name)
        self._source = SourceCoverage(metadata)
        self._correspondence = Correspondence(metadata)
        self._numel_written = 0

    def add(self, local_state: LocalState, plan: LoadPlan) -> None:
        """One rank."""
        at = (local_state.model.coordinates.pp_rank, local_state.model.coordinates.tp_rank)
        where = f"pipeline stage {at[0]}, tensor-parallel rank {at[1]}"
        place = self._places.setdefault(at, _Place(where, local_state.model.coordinates.partition_degree))
        place.ranks.append(local_state.model.coordinates.partition_rank)
        self._source.add(local_state, plan)
        self._remember(place, local_state)
        self._check_restored(place, local_state, plan)
        self._check_beyond(place, plan)
        self._check_written(place, local_state, plan)
        self._faults += self._correspondence.faults(local_state, plan)

    def proof(self) -> Proof:
        """What all of them come to."""
        for place in self._places.values():
            self._check_place(place)
        self._check_complete()
        found = [*self._faults, *self._source.faults()]
        return Proof(
            ranks=sum(len(place.ranks) for place in self._places.values()),
            numel_written=self._numel_written,
            numel_saved=self._source.numel,
            faults=tuple(found[:_MOST_FAULTS]),
        )

    def _check_beyond(self, place: _Place, plan: LoadPlan) -> None:
        for copy in plan.reads.items:
            numel = plan.reads.targets[copy.target].numel
            last = copy.target_offset + (copy.rows - 1) * copy.target_stride + copy.numel
            if copy.target_offset < 0 or last > numel:
                target = plan.reads.targets[copy.target]
                self._fault(
                    "is written beyond its ends", _name(target), target.key, place.where, copy.target_offset, last
                )

    def _check_written(self, place: _Place, local_state: LocalState, plan: LoadPlan) -> None:
        """Each target of its own exactly once; what ranks fill together is looked at when all of them are there."""
        where = f"{place.where}, data-parallel rank {local_state.model.coordinates.partition_rank}"
        own, shared = _line(plan, replicated=False), _line(plan, replicated=True)
        self._compare(_writes(plan, own), own, where)
        if place.shared is None:
            place.shared = shared
        elif shared.targets != place.shared.targets:
            self._fault("are not the same on all data-parallel ranks", "shared targets", "", place.where, 0, 0)
            return
        written = _writes(plan, shared)
        mine = intervals(
            (shared.bases[share.target] + share.range.start, shared.bases[share.target] + share.range.stop)
            for share in plan.reads.shares
            if share.owner == local_state.model.coordinates.partition_rank and share.target in shared.bases
        )
        found = coverage([(written, 1), (mine, 1)])
        for start, stop, (times, allowed) in zip(found.starts, found.stops, found.counts, strict=True):
            if times and not allowed:
                target, base = shared.at(int(start))
                problem = "is read by a rank that does not send it to the others"
                self._fault(problem, _name(target), target.key, where, int(start) - base, int(stop) - base)
        place.written.append(written)

    def _compare(self, written: Intervals, line: _Line, where: str) -> None:
        wanted = line.wanted()
        self._numel_written += wanted.numel
        if covers_exactly(written, wanted):
            return
        found = coverage([(written, 1), (wanted, 1)])
        for start, stop, (times, once) in zip(found.starts, found.stops, found.counts, strict=True):
            if times != once:
                target, base = line.at(int(start))
                problem = "is not written" if times == 0 else f"is written {times} times"
                problem = problem if once else "is written, and should be left alone"
                self._fault(problem, _name(target), target.key, where, int(start) - base, int(stop) - base)

    def _remember(self, place: _Place, local_state: LocalState) -> None:
        """What the rank holds of each live shard."""
        by_all = {flat.index for flat in local_state.flats if flat.replicated}
        for name, layout in local_state.model.layouts.items():  # a rank may hold no element of a parameter
            place.shapes.setdefault(name, layout.shapes[local_state.model.coordinates.tp_rank])
        for flat in local_state.flats:
            for name in flat.members:
                place.held.setdefault((name, MASTER), [])
                if flat.index in by_all:
                    place.everywhere.add((name, MASTER))
        for fragment in local_state.fragments:
            place.shapes[fragment.name] = fragment.shape
            place.held.setdefault((fragment.name, MASTER), []).append((fragment.range.start, fragment.range.stop))
        for whole in local_state.wholes:
            what = (whole.name, whole.key)
            place.shapes[whole.name] = whole.shape
            place.held.setdefault(what, []).append((whole.range.start, whole.range.stop))
            if whole.key == BUFFER or local_state.zero_stage < 3:
                place.everywhere.add(what)

    def _check_place(self, place: _Place) -> None:
        if sorted(place.ranks) != list(range(place.dp)):
            problem = f"of {place.dp} data-parallel ranks, these were planned: {sorted(place.ranks)[:8]}"
            self._fault(problem, "plan", "", place.where, 0, 0)
        if place.shared is not None:
            self._compare(together(place.written), place.shared, f"{place.where}, its ranks together")
        for (name, key), pieces in place.held.items():
            saved = self._catalog.parameters.get(name)
            numel = math.prod(place.shapes.get(name, saved.shape if saved is not None else (0,)))
            times = place.dp if (name, key) in place.everywhere else 1
            for start, stop, problem in _not_tiled(pieces, numel, times):
                self._fault(problem, name, key, place.where, start, stop)

    def _check_restored(self, place: _Place, local_state: LocalState, plan: LoadPlan) -> None:
        """What the checkpoint holds for this rank is restored, and has a target without gaps where its fragments lie."""
        restored = {(name, out.role) for out in plan.outcomes if out.what == "restored" for name in out.names}
        targets = {(target.flat, target.name, target.key): target for target in plan.reads.targets}
        places: dict[int, list[tuple[str, int, int]]] = {flat.index: [] for flat in local_state.flats}
        for part in local_state.fragments:
            places[part.flat].append((part.name, part.flat_offset, part.flat_offset + part.range.numel))
        weights = {name for name, key in self._catalog.tensors if key in (MASTER, FROZEN)}
        wanted = {MASTER: weights, **(self._states if plan.restores_states else {})}
        for flat in local_state.flats:
            for key, names in wanted.items():
                members = [name for name in flat.members if name in names]
                for name in members:
                    if (name, key) not in restored:
                        self._fault("is not restored", name, key, place.where, 0, 0)
                target = targets.get((flat.index, "", key))
                if members and target is None:
                    self._fault("has no target", members[0], key, place.where, 0, flat.numel)
                elif members and target is not None and target.layout == ELEMENTWISE:
                    held = set(members)
                    self._check_gaps(place, flat, target, [part for part in places[flat.index] if part[0] in held])
        for whole in local_state.wholes:
            if (whole.name, whole.key) in self._catalog.tensors and (-1, whole.name, whole.key) not in targets:
                self._fault("has no target", whole.name, whole.key, place.where, 0, whole.range.numel)

    def _check_gaps(
        self, place: _Place, flat: FlatPartition, target: TargetTensor, parts: Sequence[tuple[str, int, int]]
    ) -> None:
        """Gaps are padding, or rows of a vocabulary that the checkpoint lacks."""
        if not target.gaps or not parts:
            return
        places = [(a + row * flat.numel, b + row * flat.numel) for row in range(target.planes) for _, a, b in parts]
        gaps = intervals((gap.start, gap.stop) for gap in target.gaps)
        found = coverage([(gaps, 1), (intervals(places), 1)])
        for number in (found.counts.min(axis=1) > 0).nonzero()[0]:
            start = int(found.starts[number])
            name = next(name for name, a, b in parts if a <= start % flat.numel < b)
            if not self._source.is_padded(name):
                problem = "is left out, although it is no padding"
                self._fault(problem, name, target.key, place.where, start, int(found.stops[number]))

    def _check_complete(self) -> None:
        """Every name of the checkpoint has a place in the job."""
        held = {name for place in self._places.values() for name, _ in place.held}
        for name in dict.fromkeys(name for name, _ in self._catalog.tensors):
            if name not in held:
                self._fault("has no place on any rank", name, "parameter", "the job", 0, 0)

    def _fault(self, problem: str, name: str, key: str, where: str, start: int, stop: int) -> None:
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(Fault(problem, name, key, where, start, stop))


def _not_tiled(pieces: Sequence[tuple[int, int]], numel: int, times: int) -> Iterator[tuple[int, int, str]]:
    """Where some pieces do not hold each of ``numel`` elements so many times: (start, stop, what is wrong)."""
    if times == 1 and covers_exactly(intervals(pieces), intervals([(0, numel)])):
        return
    found = coverage([(intervals(pieces), 1), (intervals([(0, numel)]), times)])
    for start, stop, (held, wanted) in zip(found.starts, found.stops, found.counts, strict=True):
        if held != wanted:
            what = "is held by no data-parallel rank" if not held else f"is held {held} times, not {wanted}"
            yield int(start), int(stop), what


def _name(target: TargetTensor) -> str:
    return target.name or f"flat partition {target.flat}"

"""A load as plain data, which can be printed, counted and simulated without tensors."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any

from elastic_ckpt.core.chunks import BlockCode
from elastic_ckpt.core.extra_states import EXTRA_STATE, SavedExtraState
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import ITEMSIZE, SourceFile
from elastic_ckpt.core.state_kinds import ELEMENTWISE, BlockFormat

SCALE_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A live 1-D tensor that receives bytes."""

    key: str  # ``fp32``, a state key, ``buffer`` or ``frozen``
    flat: int  # index of the flat partition, for masters and states; else -1
    name: str  # of a buffer or frozen parameter; else empty
    numel: int
    dtype: str
    gaps: tuple[FlatRange, ...] = ()  # what no item writes: padding, and parameters that start fresh
    replicated: bool = False  # data-parallel ranks fill it together: each reads and broadcasts a ``BroadcastRange``
    layout: str = ELEMENTWISE  # of a state, its kind (:mod:`elastic_ckpt.core.state_kinds`)
    planes: int = 1  # values per element: the leading dimension of an elementwise state
    shape: tuple[int, ...] = ()  # of a state of another layout
    fill: float = 0.0  # value of a state's gaps


@dataclass(frozen=True, slots=True)
class BroadcastRange:
    """A range of a replicated target that data-parallel rank ``owner`` reads and broadcasts."""

    target: int
    range: FlatRange
    owner: int


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that takes five times as long to make, and there are millions
class ReadItem:
    """A strided copy from a file to a target: ``rows`` times ``numel`` contiguous elements. Immutable."""

    file: int  # index into ``ReadPlan.files``
    byte_offset: int  # of the first element
    target: int  # index into ``ReadPlan.targets``
    target_offset: int  # where the first element goes, in elements
    numel: int
    dtype: str  # torch dtype in the file; the target's own unless a conversion is needed
    rows: int = 1
    file_stride: int = 0  # elements from one row to the next; 0 for a single row
    target_stride: int = 0
    code: BlockCode | None = None  # how the elements are quantized, ``position`` being that of the first

    @property
    def nbytes(self) -> int:
        return self.rows * self.numel * ITEMSIZE[self.dtype]

    @property
    def target_stop(self) -> int:
        """One past the last element in the target."""
        return self.target_offset + (self.rows - 1) * self.target_stride + self.numel

    def row(self, number: int) -> ReadItem:
        return self._part(number * self.file_stride, number * self.target_stride, self.numel)

    def clip(self, start: int, stop: int) -> ReadItem:
        """The non-empty part of a single-row item that goes to ``[start, stop)`` of the target."""
        first = max(self.target_offset, start)
        skipped = first - self.target_offset
        return self._part(skipped, skipped, min(self.target_stop, stop) - first)

    def _part(self, skipped: int, distance: int, numel: int) -> ReadItem:
        code = self.code and replace(self.code, position=self.code.position + skipped)
        byte_offset = self.byte_offset + skipped * ITEMSIZE[self.dtype]
        target_offset = self.target_offset + distance
        return ReadItem(self.file, byte_offset, self.target, target_offset, numel, self.dtype, code=code)


def clip_items(items: Sequence[ReadItem], start: int, stop: int, disjoint: bool = True) -> tuple[ReadItem, ...]:
    """The parts of single-row items, sorted by ``target_offset``, that go to ``[start, stop)`` of their target.

    ``disjoint`` states that no two of them write the same element, so that the first can be found by bisection.
    """
    first = max(bisect_right(items, start, key=lambda item: item.target_offset) - 1, 0) if disjoint else 0
    last = bisect_left(items, stop, key=lambda item: item.target_offset)
    return tuple(item.clip(start, stop) for item in items[first:last] if item.target_stop > start)


def join_items(items: Iterable[ReadItem]) -> list[ReadItem]:
    """Join single-row items that continue their predecessor, in file and in target; the order stays."""
    joined: list[ReadItem] = []
    end = -1  # the byte behind the last one
    for item in items:
        if item.byte_offset == end:
            last = joined[-1]
            code = last.code and replace(last.code, position=last.code.position + last.numel)
            behind = last.file, last.target, last.target_offset + last.numel, last.dtype, last.rows * item.rows, code
            if behind == (item.file, item.target, item.target_offset, item.dtype, 1, item.code):
                joined.pop()
                place = (last.file, last.byte_offset, last.target, last.target_offset)
                numel = last.numel + item.numel
                item = ReadItem(*place, numel, last.dtype, code=last.code)  # noqa: PLW2901
        joined.append(item)
        end = item.byte_offset + item.numel * ITEMSIZE[item.dtype]
    return joined


def in_file_order(items: Iterable[ReadItem]) -> tuple[ReadItem, ...]:
    """Items sorted by file and offset, neighbours joined."""
    in_file = operator.attrgetter("file", "byte_offset", "target", "target_offset")
    return tuple(join_items(sorted(items, key=in_file)))


@dataclass(frozen=True, slots=True)
class RequantizeItem:
    """Elements of a target that are decoded, quantized or summed on their way from the files."""

    target: int
    start: int  # the first element, of the target and of a block
    numel: int  # elements, gaps included: whole blocks, or up to the end of a plane
    blocks: BlockFormat | None  # how to quantize; ``None`` if the target takes values
    scales_target: int
    scales_start: int  # the first block's scale in ``scales_target``
    sources: tuple[ReadItem, ...]  # single-row items, sorted by ``target_offset``
    scale: float | None = None  # each value is so many times the sum of its sources; ``None``: each has at most one

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the source elements, without scales."""
        return sum(item.nbytes for item in self.sources)

    def part(self, start: int, stop: int) -> RequantizeItem:
        """The part in ``[start, stop)`` of the target; ``start`` is the first element of a block."""
        blocks = (start - self.start) // self.blocks.numel if self.blocks is not None else 0
        sources = clip_items(self.sources, start, stop, disjoint=self.scale is None)
        return replace(self, start=start, numel=stop - start, scales_start=self.scales_start + blocks, sources=sources)


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one rank."""

    files: tuple[SourceFile, ...]
    targets: tuple[TargetTensor, ...]
    items: tuple[ReadItem, ...]  # sorted by file and offset, neighbours joined
    requantize_items: tuple[RequantizeItem, ...] = ()
    shares: tuple[BroadcastRange, ...] = ()  # who reads what of the replicated targets; the same on every rank

    @property
    def files_read(self) -> set[int]:
        """Indices of the files with bytes to read."""
        sources = [source for each in self.requantize_items for source in each.sources]
        scales = {source.code.scales_file for source in sources if source.code is not None} - {-1}
        return {item.file for item in chain(self.items, sources)} | scales

    def by_flat(self) -> dict[int, tuple[list[int], ReadPlan]]:
        """Per flat partition (``-1``: buffers and frozen parameters), the numbers of its targets, and their plan."""
        numbers: dict[int, list[int]] = {}
        for number, target in enumerate(self.targets):
            numbers.setdefault(target.flat, []).append(number)
        parts = {}
        for flat, members in numbers.items():
            new = {-1: -1} | {old: at for at, old in enumerate(members)}
            targets = tuple(self.targets[number] for number in members)
            items = (replace(item, target=new[item.target]) for item in self.items if item.target in new)
            requantize = (
                replace(each, target=new[each.target], scales_target=new[each.scales_target])
                for each in self.requantize_items
                if each.target in new
            )
            parts[flat] = members, ReadPlan(self.files, targets, tuple(items), tuple(requantize))
        return parts


#: A plan, or a part of one, and a live tensor for each of its targets. Each is read before the next is asked for.
Part = tuple[ReadPlan, Sequence[Any]]
Parts = Generator[Part, None, None]


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """Replicas that should be equal: of a whole tensor, or of a range of it."""

    name: str
    key: str
    numel: int
    replicas: tuple[tuple[ReadItem, ...], ...]  # each in single-row items, sorted by ``target_offset``, from 0 on
    taken: str = "first"  # how differing replicas are resolved: ``first`` or ``mean``
    is_guess: bool = False  # only equal shapes suggest that these are replicas
    start: int = 0  # first element among those that all ranks compare together
    number: int = 0  # tells the checks of one tensor apart: each shard of a tied parameter has its own
    names: tuple[str, ...] = ()  # of both replicas in the checkpoint, if they are not the same

    @property
    def is_of_stages(self) -> bool:
        """Whether the replicas are one tied parameter of several pipeline stages."""
        return self.number > 0 and not self.names

    def part(self, start: int, stop: int) -> ReplicaCheck:
        """The check of a range of its elements, counted from its first one."""
        replicas = tuple(
            tuple(replace(item, target_offset=item.target_offset - start) for item in clip_items(replica, start, stop))
            for replica in self.replicas
        )
        return replace(self, numel=stop - start, replicas=replicas, start=self.start + start)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happens to some items of the checkpoint or of the live engine."""

    role: str  # a key, ``"optimizer states"``, ``"param groups"``, ``"lr scheduler"``, ``"loss scale"`` ...
    #: ``"restored"``; ``"fresh"``: the live engine keeps or starts its own; ``"skipped"``: saved, but not requested or
    #: not applicable; ``"ignored"``: the live model has no counterpart.
    what: str
    names: tuple[str, ...] = ()  # none if the role has only one item
    reason: str = ""  # unless restored


#: Roles whose names are not those of parameters or buffers.
_NOT_TENSORS = frozenset({"param groups", "random state", "lr scheduler", EXTRA_STATE})


def names_with(outcomes: Iterable[Outcome], what: str) -> tuple[str, ...]:
    """Sorted names of parameters and buffers with one outcome (``"fresh"`` ...)."""
    tensors = [outcome for outcome in outcomes if outcome.what == what and outcome.role not in _NOT_TENSORS]
    return tuple(sorted({name for outcome in tensors for name in outcome.names}))


@dataclass(frozen=True, slots=True)
class SavedRate:
    """The learning rate with which the members of a live param group were saved."""

    group: int  # the saved one that they were in, or the first of several
    lr: float | None  # ``None``: not one number


@dataclass(frozen=True, slots=True)
class RestoredShare:
    """How much of the weights is restored, in elements that ranks hold: of one rank, or added up over ranks.

    What several ranks hold whole counts on each of them.
    """

    trained_numel: int = 0  # of the weights that train
    restored_numel: int = 0  # of these
    frozen_numel: int = 0  # of the weights that do not
    frozen_restored_numel: int = 0  # of these
    placed_numel: int = 0  # of the weights that no optimizer owns here, what trained in the run that saved

    def __add__(self, other: RestoredShare) -> RestoredShare:
        return RestoredShare(*map(operator.add, astuple(self), astuple(other)))

    @property
    def of_trained(self) -> float | None:
        """The share of the elements that train which is restored; ``None`` if none train."""
        return self.restored_numel / self.trained_numel if self.trained_numel else None

    def is_nothing(self, with_states: bool) -> bool:
        """Whether no weight that trains is restored, or none at all in an engine that trains none.

        Weights alone may go to where they no longer train, under new adapters: not with the states and counters
        (``with_states``) of a run that has trained none of what trains now.
        """
        if not self.trained_numel:
            return self.frozen_numel > 0 and not self.frozen_restored_numel
        return not self.restored_numel and (with_states or not self.placed_numel)


NO_SHARE = RestoredShare()


@dataclass(frozen=True, slots=True)
class SchedulerPlan:
    """What becomes of lr schedulers, those of the engine and others, and of the hyperparameters that they set."""

    is_restored: bool = False  # the engine's
    sets: frozenset[str] = frozenset()  # hyperparameters that it then sets, whatever is in the param groups
    sets_first_beta: bool = False  # of ``betas``, which are not in ``sets``, the first alone, as torch's schedules do
    begins_anew: bool = False  # the engine has one whose state is not restored
    kept_live: frozenset[str] = frozenset()  # hyperparameters that it begins with
    others_begin_anew: bool = False  # one that the engine does not have begins anew, unless one was saved in its place
    #: Where live values are kept: classes of schedulers that the engine does not have. The rates of some are those of
    #: their position, the others go on from the rate that is in the group, or may do so.
    sets_rates: tuple[str, ...] = ()
    goes_on: tuple[str, ...] = ()


NO_SCHEDULER = SchedulerPlan()


@dataclass(frozen=True)
class LoadPlan:
    """Everything that one rank reads, checks, commits and reports in a load."""

    reads: ReadPlan
    replica_checks: tuple[ReplicaCheck, ...] = ()  # what this rank compares before anything is written
    may_differ: frozenset[str] = frozenset()  # names whose replicas a rule or the checkpoint allows to differ
    blocks: int = 0  # number of 8-bit blocks that the plan fills
    restores_states: bool = False  # optimizer states and hyperparameters
    scalars: tuple[Mapping[str, Any] | None, ...] = ()  # per flat partition; ``None`` clears its optimizer state
    hyperparameters: tuple[Mapping[str, Any], ...] = ()  # per live group, the values to set
    saved_groups: int = 0
    group_sources: tuple[tuple[int, ...], ...] = ()  # per live group, the saved ones; empty if the live values stay
    keeps_live: bool = False  # whether all groups keep their live values, as ``"keep_live"`` says
    #: Per live group, the saved ones of its members, wherever its values come from; empty if it has none, or if weights
    #: alone are loaded, with which no schedule goes on.
    member_groups: tuple[tuple[int, ...], ...] = ()
    #: Per live group, what its members were trained with; ``None`` if none is in the checkpoint.
    saved_rates: tuple[SavedRate | None, ...] = ()
    #: Per live group, the saved values of the hyperparameters that a schedule of the engine begins anew with.
    start_values: tuple[Mapping[str, Any], ...] = ()
    share: RestoredShare = NO_SHARE
    replaces_live_values: bool = False  # whether some of ``hyperparameters`` are others than the live ones
    #: What modules of this rank are given beside parameters and buffers, by name in the live state dict.
    extra_states: Mapping[str, SavedExtraState] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def regroups(self) -> bool:
        """Whether param groups are known to be others than at the save: more, fewer, or in another order."""
        as_saved = tuple((number,) for number in range(self.saved_groups))
        return bool(self.saved_groups and self.member_groups) and self.member_groups != as_saved


#: Of a load that is not elastic_ckpt's.
NO_PLAN = LoadPlan(ReadPlan((), (), (), ()))

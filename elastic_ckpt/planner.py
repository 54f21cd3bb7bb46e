"""Catalog x Destinations -> Plan. Pure: no files, no collectives, no DeepSpeed, no devices.

Proves on the way that every destination element is written exactly once, or raises an error that names the
parameter which is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog, LogicalTensor
from elastic_ckpt.destinations import Destinations, FlatPartition, Fragment, WholeTensor
from elastic_ckpt.dtypes import ITEMSIZE, converts_exactly, is_floating
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.groups import GroupMatching, match_groups
from elastic_ckpt.matching import Matching, StateMatching, match_parameters, match_states, weights_key
from elastic_ckpt.plan import Copy, Outcome, Plan, Slot
from elastic_ckpt.renaming import RenameRules, adopt_live_names, rename_saved
from elastic_ckpt.shares import Sharing


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to restore.

    Attributes:
        strict: ``load_module_strict``.
        optimizer_states: ``load_optimizer_states``, and not ``load_module_only``.
        scheduler: whether the state of an lr scheduler will be restored too.
        keep_live_groups: hyperparameters of the live param groups stay.
        rename: (pattern, replacement) for saved names.
    """

    strict: bool = True
    optimizer_states: bool = True
    scheduler: bool = False
    keep_live_groups: bool = False
    rename: RenameRules = ()


def plan_load(catalog: Catalog, destinations: Destinations, options: LoadOptions) -> Plan:
    """Plan the load of one rank.

    Args:
        catalog: what the checkpoint holds.
        destinations: what this rank's engine holds.
        options: what to restore.

    Returns:
        The plan; its copies, and those of the other data-parallel ranks for replicated slots, write each element
        of each master weight, state, buffer and frozen weight that the checkpoint holds for this rank exactly once.

    Raises:
        MismatchError: names, shapes, dtypes, states or groups do not fit.
        DamagedError: the checkpoint's extents leave a hole in, or overlap on, a tensor.
    """
    catalog = adopt_live_names(rename_saved(catalog, options.rename), destinations)
    matching = match_parameters(catalog, destinations, options.strict)
    states = StateMatching((), (None,) * len(destinations.flats), frozenset(), ())
    groups = GroupMatching((), ())
    if options.optimizer_states or options.scheduler:
        groups = match_groups(catalog, destinations, options.keep_live_groups, options.optimizer_states)
    if options.optimizer_states:
        states = match_states(catalog, destinations, matching)
    builder = _PlanBuilder(catalog, Sharing(destinations.dp, destinations.dp_rank))
    fragments = _restored_fragments(destinations, matching)
    for flat in destinations.flats:
        held = fragments[flat.index]
        builder.add_flat(flat, MASTER, held)
        if states.scalars[flat.index] is not None:
            for key in states.keys:
                builder.add_flat(flat, key, [part for part in held if part.name in states.stateful])
    notes = list(catalog.notes)
    for whole in destinations.wholes:
        if (whole.name, whole.key) in matching.wholes:
            notes.extend(builder.add_whole(whole))
    return Plan(
        files=catalog.files,
        slots=tuple(builder.slots),
        copies=tuple(merge_neighbours(builder.copies)),
        shares=tuple(builder.sharing.shares),
        restores_states=options.optimizer_states,
        scalars=states.scalars,
        hyperparameters=groups.hyperparameters,
        saved_groups=len(catalog.groups),
        group_sources=groups.sources,
        outcomes=_restored(matching, states, groups if options.optimizer_states else None)
        + matching.outcomes
        + states.outcomes,
        notes=tuple(notes),
    )


def _restored(matching: Matching, states: StateMatching, groups: GroupMatching | None) -> tuple[Outcome, ...]:
    outcomes = [Outcome(MASTER, "restored", tuple(sorted(matching.restored)))]
    outcomes += [Outcome(key, "restored", tuple(sorted(states.stateful))) for key in states.keys]
    for kind in (BUFFER, FROZEN):
        outcomes.append(Outcome(kind, "restored", tuple(sorted(name for name, key in matching.wholes if key == kind))))
    sources = groups.sources if groups else ()
    for what, reason in (("restored", ""), ("fresh", "hyperparameters of the live group stay")):
        numbers = [str(n) for n, source in enumerate(sources) if (not source) == (what == "fresh")]
        outcomes.append(Outcome("param groups", what, tuple(numbers), reason))
    return tuple(outcome for outcome in outcomes if outcome.names)


def _restored_fragments(destinations: Destinations, matching: Matching) -> dict[int, list[Fragment]]:
    """Per flat partition, the fragments of parameters that the checkpoint has, in flat order."""
    fragments: dict[int, list[Fragment]] = {flat.index: [] for flat in destinations.flats}
    for fragment in destinations.fragments:
        if fragment.name in matching.restored:
            fragments[fragment.flat].append(fragment)
    return fragments


class _PlanBuilder:
    """Collects slots and the copies into them."""

    def __init__(self, catalog: Catalog, sharing: Sharing) -> None:
        self._catalog = catalog
        self.sharing = sharing
        self._tiled: set[tuple[str, str]] = set()
        self.slots: list[Slot] = []
        self.copies: list[Copy] = []

    def add_flat(self, flat: FlatPartition, key: str, held: list[Fragment]) -> None:
        """A master or state tensor of one flat partition, filled from ``held``, which is in flat order."""
        slot = len(self.slots)
        mine = self.sharing.mine(slot, flat.numel, flat.dtype) if flat.replicated else None
        gaps, position = [], 0
        for part in held:
            if part.flat_offset < position:
                raise AssertionError(f"fragments of {part.name} overlap in flat partition {flat.index}")
            if part.flat_offset > position:
                gaps.append(FlatRange(position, part.flat_offset))
            position = part.flat_offset + part.range.numel
            tensor = self._tensor(part.name, weights_key(self._catalog, part.name) if key == MASTER else key)
            _check_shape(part.name, tensor, part.shape)
            if not converts_exactly(tensor.dtype, flat.dtype):
                raise MismatchError(
                    f"{key} of this parameter would lose precision",
                    parameter=part.name,
                    file=self._catalog.files[tensor.extents[0].file].path if tensor.extents else None,
                    expected=f"{flat.dtype}, which the live optimizer keeps",
                    found=f"{tensor.dtype} in the checkpoint",
                    remedy="resume with the dtype of master weights and states that the checkpoint was saved with",
                )
            self._cover(tensor, part.range, slot, part.flat_offset, mine)
        if position < flat.numel:
            gaps.append(FlatRange(position, flat.numel))
        self.slots.append(Slot(key, flat.index, "", flat.numel, flat.dtype, tuple(gaps), flat.replicated))

    def add_whole(self, whole: WholeTensor) -> list[str]:
        """A buffer or a frozen parameter; returns a note where its dtype changes."""
        notes = []
        key = weights_key(self._catalog, whole.name) if whole.key == FROZEN else whole.key
        tensor = self._tensor(whole.name, key)
        _check_shape(whole.name, tensor, whole.shape)
        if tensor.dtype != whole.dtype:
            if not (is_floating(tensor.dtype) and is_floating(whole.dtype)):
                raise MismatchError(
                    f"dtype of this {whole.key} differs",
                    parameter=whole.name,
                    expected=f"{whole.dtype} in the live model",
                    found=f"{tensor.dtype} in the checkpoint",
                )
            notes.append(f"{whole.key} {whole.name} converted from {tensor.dtype} to {whole.dtype}")
        slot = len(self.slots)
        replicated = whole.replicated and not (whole.key == BUFFER and self._catalog.buffers_of_this_rank)
        mine = self.sharing.mine(slot, whole.range.numel, whole.dtype) if replicated else None
        if whole.range.numel:
            self._cover(tensor, whole.range, slot, 0, mine)
        self.slots.append(Slot(whole.key, -1, whole.name, whole.range.numel, whole.dtype, (), replicated))
        return notes

    def _tensor(self, name: str, key: str) -> LogicalTensor:
        tensor = self._catalog.tensors.get((name, key))
        if tensor is None:
            raise DamagedError(
                f"the checkpoint knows this parameter but holds no {key} for it",
                parameter=name,
                file=self._catalog.source.folder,
                expected=f"a tensor for {key}",
                found="none",
                remedy="the save is incomplete: take another tag, or load with load_optimizer_states=False",
            )
        if (name, key) not in self._tiled:
            _check_tiling(self._catalog, tensor)
            self._tiled.add((name, key))
        return tensor

    def _cover(
        self, tensor: LogicalTensor, wanted: FlatRange, slot: int, slot_offset: int, mine: FlatRange | None
    ) -> None:
        """Append copies that write ``wanted`` to the slot; the extents tile the tensor, so each element once.

        Args:
            tensor: the source.
            wanted: which of its elements.
            slot, slot_offset: where they go.
            mine: elements of the slot that this rank reads; ``None``: all.
        """
        if mine is not None:
            inside = FlatRange(slot_offset, slot_offset + wanted.numel).intersect(mine)
            if inside is None:
                return
            start = wanted.start + inside.start - slot_offset
            wanted, slot_offset = FlatRange(start, start + inside.numel), inside.start
        for part, byte_offset, file in _pieces(tensor, wanted):
            position = slot_offset + part.start - wanted.start
            self.copies.append(Copy(file, byte_offset, slot, position, part.numel, tensor.dtype))


def _check_tiling(catalog: Catalog, tensor: LogicalTensor) -> None:
    """Every element of the whole tensor, on this rank or not, lies in exactly one extent."""
    position = 0
    ends = [(extent.range.start, extent.range.stop) for extent in tensor.extents]
    for start, stop in [*ends, (math.prod(tensor.shape),) * 2]:
        if start != position:
            said, where = ("held twice", "two files") if start < position else ("incomplete", "no file")
            raise DamagedError(
                f"{tensor.key} of this parameter is {said} in the checkpoint",
                parameter=tensor.name,
                file=catalog.source.folder,
                expected="every element in exactly one file",
                found=f"elements {min(start, position)} to {max(start, position)} in {where}",
                remedy="a shard is missing or belongs to another save: restore the folder from its original",
            )
        position = stop


def _pieces(tensor: LogicalTensor, wanted: FlatRange) -> Iterator[tuple[FlatRange, int, int]]:
    """The parts of ``wanted`` that the extents hold: (range, byte offset, file), by ascending start."""
    itemsize = ITEMSIZE[tensor.dtype]
    extents = tensor.extents
    first = max(bisect_right(extents, wanted.start, key=lambda extent: extent.range.start) - 1, 0)
    for extent in extents[first:]:
        if extent.range.start >= wanted.stop:
            return
        part = extent.range.intersect(wanted)
        if part is not None:
            yield part, extent.byte_offset + (part.start - extent.range.start) * itemsize, extent.file


def _check_shape(name: str, tensor: LogicalTensor, live_shape: tuple[int, ...]) -> None:
    if tensor.shape != live_shape:
        raise MismatchError(
            f"shape of {'this ' + tensor.key if tensor.key in (BUFFER, FROZEN) else tensor.key} differs",
            parameter=name,
            expected=f"{live_shape} in the live model",
            found=f"{tensor.shape} in the checkpoint",
            remedy="build the model with the sizes it was saved with; no loader option makes shapes fit",
        )


def merge_neighbours(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Sort copies by file and offset, and join those that touch both in the file and in the slot."""
    last: Copy | None = None
    for copy in sorted(copies, key=lambda c: (c.file, c.byte_offset, c.slot, c.slot_offset)):
        if last is not None and _touches(last, copy):
            last = Copy(last.file, last.byte_offset, last.slot, last.slot_offset, last.numel + copy.numel, last.dtype)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _touches(left: Copy, right: Copy) -> bool:
    return (
        left.file == right.file
        and left.slot == right.slot
        and left.dtype == right.dtype
        and left.slot_offset + left.numel == right.slot_offset
        and left.byte_offset + left.numel * ITEMSIZE[left.dtype] == right.byte_offset
    )

"""Catalog x Destinations -> Plan. Pure: no files, no collectives, no DeepSpeed, no devices.

Proves on the way that every destination element is written exactly once, or raises an error that names the
parameter which is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog, LogicalTensor
from elastic_ckpt.destinations import Destinations, FlatPartition, Fragment, WholeTensor
from elastic_ckpt.dtypes import ITEMSIZE, converts_exactly, is_floating
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.matching import (
    Matching,
    adopt_live_names,
    match_groups,
    match_parameters,
    match_states,
    refuse_rebuilt_groups,
)
from elastic_ckpt.plan import Copy, Plan, Slot


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the caller of ``load_checkpoint`` asked for, in DeepSpeed's own words.

    Attributes:
        strict: ``load_module_strict``.
        optimizer_states: ``load_optimizer_states``, and not ``load_module_only``.
        scheduler: whether the state of an lr scheduler will be restored too.
    """

    strict: bool = True
    optimizer_states: bool = True
    scheduler: bool = False


def plan_load(catalog: Catalog, destinations: Destinations, options: LoadOptions) -> Plan:
    """Plan the load of one rank.

    Args:
        catalog: what the checkpoint holds.
        destinations: what this rank's engine holds.
        options: what to restore.

    Returns:
        The plan; its copies write each element of each master weight, state, buffer and frozen weight
        that the checkpoint holds for this rank exactly once.

    Raises:
        MismatchError: names, shapes, dtypes, states or groups do not fit.
        DamagedError: the checkpoint's extents leave a hole in, or overlap on, a tensor.
    """
    catalog = adopt_live_names(catalog, destinations)
    matching = match_parameters(catalog, destinations, options.strict)
    state_keys: tuple[str, ...] = ()
    scalars: list[Mapping[str, float] | None] = [None] * len(destinations.flats)
    hyperparameters: tuple[Mapping[str, Any], ...] = ()
    notes = list(catalog.notes)
    if options.optimizer_states:
        hyperparameters = match_groups(catalog, destinations, matching)
        if options.scheduler:
            refuse_rebuilt_groups(catalog, destinations, matching)
        state_keys, scalars = match_states(catalog, destinations, matching)
        if destinations.flats and all(values is None for values in scalars):
            notes.append("the checkpoint holds no optimizer state (saved before the first step): states start fresh")
    builder = _PlanBuilder(catalog)
    fragments = _restored_fragments(destinations, matching)
    for flat in destinations.flats:
        held = fragments[flat.index]
        builder.add_flat(flat, MASTER, held)
        if scalars[flat.index] is not None:
            for key in state_keys:
                builder.add_flat(flat, key, held)
    for whole in destinations.wholes:
        if whole.name not in matching.fresh:
            notes.extend(builder.add_whole(whole))
    return Plan(
        files=catalog.files,
        slots=tuple(builder.slots),
        copies=tuple(merge_neighbours(builder.copies)),
        restores_states=options.optimizer_states,
        scalars=tuple(scalars),
        hyperparameters=hyperparameters,
        fresh=tuple(sorted(matching.fresh)),
        ignored=tuple(sorted(matching.ignored)),
        notes=tuple(notes),
    )


def _restored_fragments(destinations: Destinations, matching: Matching) -> dict[int, list[Fragment]]:
    """Per flat partition, the fragments of parameters that the checkpoint has, in flat order."""
    fragments: dict[int, list[Fragment]] = {flat.index: [] for flat in destinations.flats}
    for fragment in destinations.fragments:
        if fragment.name in matching.restored:
            fragments[fragment.flat].append(fragment)
    return fragments


class _PlanBuilder:
    """Collects slots and the copies into them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._tiled: set[tuple[str, str]] = set()
        self.slots: list[Slot] = []
        self.copies: list[Copy] = []

    def add_flat(self, flat: FlatPartition, key: str, held: list[Fragment]) -> None:
        """A master or state tensor of one flat partition, filled from ``held``, which is in flat order."""
        slot = len(self.slots)
        gaps, position = [], 0
        for part in held:
            if part.flat_offset < position:
                raise AssertionError(f"fragments of {part.name} overlap in flat partition {flat.index}")
            if part.flat_offset > position:
                gaps.append(FlatRange(position, part.flat_offset))
            position = part.flat_offset + part.range.numel
            tensor = self._tensor(part.name, key)
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
            self._cover(tensor, part.range, slot, part.flat_offset)
        if position < flat.numel:
            gaps.append(FlatRange(position, flat.numel))
        self.slots.append(Slot(key, flat.index, "", flat.numel, flat.dtype, tuple(gaps)))

    def add_whole(self, whole: WholeTensor) -> list[str]:
        """A buffer or a frozen parameter; returns a note where its dtype changes."""
        notes = []
        tensor = self._tensor(whole.name, whole.key)
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
        if whole.range.numel:
            self._cover(tensor, whole.range, len(self.slots), 0)
        self.slots.append(Slot(whole.key, -1, whole.name, whole.range.numel, whole.dtype))
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

    def _cover(self, tensor: LogicalTensor, wanted: FlatRange, slot: int, slot_offset: int) -> None:
        """Append copies that write ``wanted`` to the slot; the extents tile the tensor, so each element once."""
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

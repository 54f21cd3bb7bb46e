"""A load, written down: plain data that can be printed, counted and simulated without a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import BlockCode, SourceFile
from elastic_ckpt.core.state_kinds import ELEMENTWISE, BlockFormat


@dataclass(frozen=True, slots=True)
class Slot:
    """A live 1-D tensor that receives bytes.

    Attributes:
        key: ``fp32``, a state key, ``buffer`` or ``frozen``.
        flat: index of the flat partition, for masters and states; ``-1`` otherwise.
        name: name of the buffer or frozen parameter; empty otherwise.
        numel: elements.
        dtype: name of its torch dtype.
        gaps: ranges of the slot that no copy writes: padding, and parameters that stay fresh.
        replicated: whether all data-parallel ranks fill it together: each reads its :class:`Share` and sends it on.
        layout: of a state: which kind it is (:mod:`elastic_ckpt.core.state_kinds`).
        rows: of an elementwise state: leading dimension.
        shape: of a state of another layout.
        fill: value of the gaps of a state: what stands for zero in it.
    """

    key: str
    flat: int
    name: str
    numel: int
    dtype: str
    gaps: tuple[FlatRange, ...] = ()
    replicated: bool = False
    layout: str = ELEMENTWISE
    rows: int = 1
    shape: tuple[int, ...] = ()
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """A piece of a replicated slot: one data-parallel rank reads it and sends it to the others.

    Attributes:
        slot: index into :attr:`ReadPlan.slots`.
        range: which of its elements.
        owner: data-parallel rank that reads them.
    """

    slot: int
    range: FlatRange
    owner: int


#: Roles whose names are not those of parameters or buffers.
NOT_TENSORS = frozenset({"param groups", "random state", "lr scheduler"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of some items of the checkpoint or of the live engine.

    Attributes:
        role: kind of item: ``"fp32"``, a state key, ``"optimizer states"``, ``"buffer"``, ``"frozen"``,
            ``"param groups"``, ``"lr scheduler"``, ``"loss scale"``, ``"counters"``, ``"client state"``.
        what: ``"restored"``; ``"fresh"``: the live engine keeps or starts its own; ``"skipped"``: the checkpoint
            has it and it was not asked for or cannot apply; ``"ignored"``: the live model has no place for it.
        names: the items; empty where the role has only one.
        reason: why, unless restored.
    """

    role: str
    what: str
    names: tuple[str, ...] = ()
    reason: str = ""


class HasOutcomes:
    """What a plan and a report of it can be asked."""

    outcomes: tuple[Outcome, ...]

    def names(self, what: str) -> tuple[str, ...]:
        """Names of parameters and buffers with one outcome (``"fresh"`` ...), sorted."""
        tensors = [outcome for outcome in self.outcomes if outcome.what == what and outcome.role not in NOT_TENSORS]
        return tuple(sorted({name for outcome in tensors for name in outcome.names}))

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of which the live engine keeps, or newly starts, something."""
        return self.names("fresh")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names in the checkpoint that the live model does not have."""
        return self.names("ignored")


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Move ``numel`` elements of ``dtype`` from a file to a slot, once or in ``rows`` at regular distances.

    Attributes:
        file: index into :attr:`ReadPlan.files`.
        byte_offset: where they start in the file.
        slot: index into :attr:`ReadPlan.slots`.
        slot_offset: where they go, in elements.
        numel: how many elements, of one row.
        dtype: name of the torch dtype in the file; the slot's own unless a widening conversion is needed.
        rows: how many rows.
        file_stride, slot_stride: elements from the start of one row to that of the next, in the file and in the slot.
    """

    file: int
    byte_offset: int
    slot: int
    slot_offset: int
    numel: int
    dtype: str
    rows: int = 1
    file_stride: int = 0
    slot_stride: int = 0

    def row(self, number: int) -> ReadItem:
        """One of its rows, as a copy of its own."""
        return ReadItem(
            self.file,
            self.byte_offset + number * self.file_stride * ITEMSIZE[self.dtype],
            self.slot,
            self.slot_offset + number * self.slot_stride,
            self.numel,
            self.dtype,
        )


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """Elements that several ranks saved, and that should be the same: all of a tensor, or a piece of it.

    Attributes:
        name, key: what it is.
        numel: elements of each copy.
        copies: per copy, where it lies: pieces whose ``start`` counts from its first element.
        taken: what the plan makes of copies that differ: ``first`` or ``mean``.
        is_guess: whether only shapes say that these are copies.
        start: the first of the elements, of those that are compared by all ranks together.
        whole_numel: how many these are; 0: ``numel``.
        number: which comparison of this tensor it is, or is a piece of: each shard of a tied one has its own.
    """

    name: str
    key: str
    numel: int
    copies: tuple[tuple[Piece, ...], ...]
    taken: str = "first"
    is_guess: bool = False
    start: int = 0
    whole_numel: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Source elements of a :class:`RequantizeItem`.

    Attributes:
        file, byte_offset: where they start.
        start: where they go, in elements of the slot.
        numel: how many.
        dtype: name of the torch dtype in the file.
        code: how they are quantized; its ``position`` is that of the first one.
    """

    file: int
    byte_offset: int
    start: int
    numel: int
    dtype: str
    code: BlockCode | None


def clip(piece: Piece, start: int, stop: int) -> Piece:
    """The part of a piece between two elements; without elements where there is none."""
    first, last = max(piece.start, start), min(piece.start + piece.numel, stop)
    skipped = first - piece.start
    code = None if piece.code is None else replace(piece.code, position=piece.code.position + skipped)
    offset = piece.byte_offset + skipped * ITEMSIZE[piece.dtype]
    return replace(piece, byte_offset=offset, start=first, numel=last - first, code=code)


@dataclass(frozen=True, slots=True)
class RequantizeItem:
    """Elements that have to be decoded, quantized, or both, on their way into a slot; or to be added up.

    Attributes:
        slot: index into :attr:`ReadPlan.slots`, of codes or of values.
        start: its first element; the first of a block.
        numel: how many elements, gaps among them: whole blocks, or up to the end of a row.
        target: how they are to be quantized; ``None``: the slot takes values.
        scales_slot: slot of the scales.
        scales_start: place in it of the first block's scale.
        pieces: the source elements, in order of ``start``.
        scale: the values are so many times the sum of all pieces at their place; ``None``: each has one piece.
    """

    slot: int
    start: int
    numel: int
    target: BlockFormat | None
    scales_slot: int
    scales_start: int
    pieces: tuple[Piece, ...]
    scale: float | None = None


@dataclass(frozen=True)
class ReadPlan(HasOutcomes):
    """What one rank will do.

    Attributes:
        files: source files.
        slots: what is written.
        copies: sorted by file and offset, neighbours merged.
        shares: who reads which piece of the replicated slots; the same on every rank.
        restores_states: whether optimizer states and hyperparameters are part of the load.
        recodes: what goes through another format on its way.
        comparisons: copies in the checkpoint that this rank compares before anything is written.
        averaged: names of those of which a rule says that they may differ.
        blocks: number of 8-bit blocks that the plan fills.
        scalars: per flat partition, its scalar states; ``None`` clears that partition's optimizer state.
        scalar_forms: see :attr:`elastic_ckpt.core.metadata.StateFacts.scalar_forms`.
        hyperparameters: per live group, the values to set.
        saved_groups: number of param groups in the checkpoint.
        group_sources: per live group, the saved groups that its values come from; none: the live values stay.
        outcomes: what is restored, and what is not and why.
        notes: sentences for the report.
    """

    files: tuple[SourceFile, ...]
    slots: tuple[Slot, ...]
    copies: tuple[ReadItem, ...]
    shares: tuple[Share, ...] = ()
    recodes: tuple[RequantizeItem, ...] = ()
    comparisons: tuple[ReplicaCheck, ...] = ()
    averaged: frozenset[str] = frozenset()
    blocks: int = 0
    restores_states: bool = False
    scalars: tuple[Mapping[str, float] | None, ...] = ()
    scalar_forms: Mapping[str, str] = field(default_factory=dict)
    hyperparameters: tuple[Mapping[str, Any], ...] = ()
    saved_groups: int = 0
    group_sources: tuple[tuple[int, ...], ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()

    def by_flat(self) -> dict[int, tuple[list[int], ReadPlan]]:
        """The plan in parts: flat partition -> the numbers of its slots here, and the plan of these slots alone.

        Buffers and frozen parameters are the part ``-1``.
        """
        numbers: dict[int, list[int]] = {}
        place = {}
        for number, slot in enumerate(self.slots):
            members = numbers.setdefault(slot.flat, [])
            place[number] = len(members)
            members.append(number)
        copies: dict[int, list[ReadItem]] = {flat: [] for flat in numbers}
        for copy in self.copies:
            copies[self.slots[copy.slot].flat].append(replace(copy, slot=place[copy.slot]))
        recodes: dict[int, list[RequantizeItem]] = {flat: [] for flat in numbers}
        for recode in self.recodes:
            scales = place[recode.scales_slot] if recode.target else -1
            moved = replace(recode, slot=place[recode.slot], scales_slot=scales)
            recodes[self.slots[recode.slot].flat].append(moved)
        return {
            flat: (
                members,
                replace(
                    self,
                    slots=tuple(self.slots[n] for n in members),
                    copies=tuple(copies[flat]),
                    recodes=tuple(recodes[flat]),
                ),
            )
            for flat, members in numbers.items()
        }

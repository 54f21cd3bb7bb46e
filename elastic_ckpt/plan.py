"""A load, written down: plain data that can be printed, counted and simulated without a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_ckpt.catalog import SourceFile
from elastic_ckpt.geometry import FlatRange


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
    """

    key: str
    flat: int
    name: str
    numel: int
    dtype: str
    gaps: tuple[FlatRange, ...] = ()
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """A piece of a replicated slot: one data-parallel rank reads it and sends it to the others.

    Attributes:
        slot: index into :attr:`Plan.slots`.
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


def names_of(outcomes: Iterable[Outcome], what: str) -> tuple[str, ...]:
    """Names of parameters and buffers with one outcome, sorted."""
    tensors = [outcome for outcome in outcomes if outcome.what == what and outcome.role not in NOT_TENSORS]
    return tuple(sorted({name for outcome in tensors for name in outcome.names}))


@dataclass(frozen=True, slots=True)
class Copy:
    """Move ``numel`` elements of ``dtype`` from a file to a slot.

    Attributes:
        file: index into :attr:`Plan.files`.
        byte_offset: where they start in the file.
        slot: index into :attr:`Plan.slots`.
        slot_offset: where they go, in elements.
        numel: how many elements.
        dtype: name of the torch dtype in the file; the slot's own unless a widening conversion is needed.
    """

    file: int
    byte_offset: int
    slot: int
    slot_offset: int
    numel: int
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What one rank will do.

    Attributes:
        files: source files.
        slots: what is written.
        copies: sorted by file and offset, neighbours merged.
        shares: who reads which piece of the replicated slots; the same on every rank.
        restores_states: whether optimizer states and hyperparameters are part of the load.
        scalars: per flat partition, its scalar states; ``None`` clears that partition's optimizer state.
        hyperparameters: per live group, the values to set.
        saved_groups: number of param groups in the checkpoint.
        group_sources: per live group, the saved groups that its values come from; none: the live values stay.
        outcomes: what is restored, and what is not and why.
        notes: sentences for the report.
    """

    files: tuple[SourceFile, ...]
    slots: tuple[Slot, ...]
    copies: tuple[Copy, ...]
    shares: tuple[Share, ...] = ()
    restores_states: bool = False
    scalars: tuple[Mapping[str, float] | None, ...] = ()
    hyperparameters: tuple[Mapping[str, Any], ...] = ()
    saved_groups: int = 0
    group_sources: tuple[tuple[int, ...], ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()

    def only(self, slots: Sequence[int]) -> Plan:
        """The plan of some slots alone, numbered anew in the order given."""
        numbers = {slot: number for number, slot in enumerate(slots)}
        return replace(
            self,
            slots=tuple(self.slots[slot] for slot in slots),
            copies=tuple(replace(copy, slot=numbers[copy.slot]) for copy in self.copies if copy.slot in numbers),
            shares=tuple(replace(share, slot=numbers[share.slot]) for share in self.shares if share.slot in numbers),
        )

    def names(self, what: str) -> tuple[str, ...]:
        """Names of parameters and buffers with one outcome, sorted."""
        return names_of(self.outcomes, what)

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of which the live engine keeps, or newly starts, something."""
        return self.names("fresh")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names in the checkpoint that the live model does not have."""
        return self.names("ignored")

"""A load, written down: plain data that can be printed, counted and simulated without a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    key: str
    flat: int
    name: str
    numel: int
    dtype: str
    gaps: tuple[FlatRange, ...] = ()


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
        restores_states: whether optimizer states and hyperparameters are part of the load.
        scalars: per flat partition, its scalar states; ``None`` clears that partition's optimizer state.
        hyperparameters: per live group, the values to set.
        fresh: parameters, buffers and frozen weights that keep what the live model has.
        ignored: names in the checkpoint that the live model does not have.
        notes: sentences for the report.
    """

    files: tuple[SourceFile, ...]
    slots: tuple[Slot, ...]
    copies: tuple[Copy, ...]
    restores_states: bool
    scalars: tuple[Mapping[str, float] | None, ...]
    hyperparameters: tuple[Mapping[str, Any], ...]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

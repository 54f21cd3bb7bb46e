"""Collects the slots of one rank's plan, and what fills them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog, Extent, LogicalTensor, ReplicatedState
from elastic_ckpt.coded import Row, plan_row, recut_blocks
from elastic_ckpt.destinations import FlatPartition, Fragment, WholeTensor
from elastic_ckpt.dtypes import ITEMSIZE, converts_exactly, is_floating
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.matching import weights_key
from elastic_ckpt.plan import Copy, Piece, Recode, Slot
from elastic_ckpt.shares import Sharing
from elastic_ckpt.state_matching import StateLink
from elastic_ckpt.states.kinds import REPLICATED, SCRATCH, TOUCHED, WHOLE, LiveState

_SCALES_DTYPE = "float32"
#: What codes stand for.
_VALUES_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of one parameter in a slot: which ones, from which tensor, and where they go in a row of it."""

    fragment: Fragment
    tensor: LogicalTensor
    offset: int


class PlanBuilder:
    """Collects slots, copies and recodes.

    Args:
        catalog: what the checkpoint holds.
        sharing: deals out what every data-parallel rank holds.
        realign: whether 8-bit blocks may be cut anew.
    """

    def __init__(self, catalog: Catalog, sharing: Sharing, realign: bool = True) -> None:
        self._catalog = catalog
        self._realign = realign
        self._tiled: set[tuple[str, str]] = set()
        self.sharing = sharing
        self.slots: list[Slot] = []
        self.copies: list[Copy] = []
        self.recodes: list[Recode] = []
        self.blocks = 0

    def add_masters(self, flat: FlatPartition, held: Sequence[Fragment]) -> None:
        """The master weights of one flat partition, filled from ``held``, which is in flat order."""
        parts = self._parts(held, lambda name: weights_key(self._catalog, name))
        self._add_elements(flat, LiveState(MASTER, flat.dtype), parts, flat.numel)

    def add_state(
        self, flat: FlatPartition, link: StateLink, fragments: Sequence[Fragment], held: Sequence[Fragment]
    ) -> None:
        """One optimizer state of one flat partition.

        Args:
            flat: the partition.
            link: the live state, and the saved one that it takes.
            fragments: all that lies in the partition, in flat order.
            held: those whose states are restored.
        """
        live, held = link.live, held if link.source else ()
        if live.layout == SCRATCH:
            return
        if live.layout == REPLICATED:
            assert link.replicated is not None
            self._add_replicated(flat, live, link.replicated)
        elif live.layout == WHOLE:
            self._add_whole_state(flat, live, self._parts(held, lambda name: link.source))
        elif live.layout == TOUCHED:
            parts, numel = self._touched(fragments, held, link.source)
            self._add_elements(flat, live, parts, numel)
        else:
            self._add_elements(flat, live, self._parts(held, lambda name: link.source), flat.numel)

    def _parts(self, held: Sequence[Fragment], key_of: Callable[[str], str]) -> list[_Part]:
        return [_Part(part, self._tensor(part.name, key_of(part.name)), part.flat_offset) for part in held]

    def _touched(self, fragments: Sequence[Fragment], held: Sequence[Fragment], key: str) -> tuple[list[_Part], int]:
        """Whole parameters, one behind the other: those that are restored, and the size of all."""
        restored = {part.name for part in held}
        parts, position = [], 0
        for part in fragments:
            numel = math.prod(part.shape)
            if part.name in restored:
                whole = replace(part, range=FlatRange(0, numel))
                parts.append(_Part(whole, self._tensor(part.name, key), position))
            position += numel
        return parts, position

    def _add_elements(self, flat: FlatPartition, live: LiveState, parts: Sequence[_Part], numel: int) -> None:
        """A tensor of ``rows`` times ``numel`` elements, into which the parts go, in order of their offsets."""
        for part in parts:
            _check_shape(part.fragment.name, part.tensor, _state_shape(part.fragment.shape, live.rows))
        if live.blocks is not None or any(_is_coded(part.tensor) for part in parts):
            self._add_coded(flat, live, parts, numel)
            return
        dtype = live.dtype or (parts[0].tensor.dtype if parts else flat.dtype)
        slot = len(self.slots)
        mine = self.sharing.mine(slot, live.rows * numel, dtype) if flat.replicated else None
        for part in parts:
            self._check_dtype(part, live.key, dtype)
            for row in range(live.rows):
                self._cover(part.tensor, _in_row(part.fragment, row), slot, row * numel + part.offset, mine)
        gaps = _gaps(parts, live.rows, numel)
        shape = () if live.layout != TOUCHED else (numel,)
        self.slots.append(
            Slot(
                live.key,
                flat.index,
                "",
                live.rows * numel,
                dtype,
                gaps,
                flat.replicated,
                live.layout,
                live.rows,
                shape,
                live.initial,
            )
        )

    def _check_dtype(self, part: _Part, key: str, dtype: str) -> None:
        tensor = part.tensor
        if not converts_exactly(_VALUES_DTYPE if _is_coded(tensor) else tensor.dtype, dtype):
            raise MismatchError(
                f"{key} of this parameter would lose precision",
                parameter=part.fragment.name,
                file=self._catalog.files[tensor.extents[0].file].path if tensor.extents else None,
                expected=f"{dtype}, which the live optimizer keeps",
                found=f"{tensor.dtype} in the checkpoint",
                remedy="resume with the dtype of master weights and states that the checkpoint was saved with",
            )

    def _add_coded(self, flat: FlatPartition, live: LiveState, parts: Sequence[_Part], numel: int) -> None:
        """A state that is quantized in the checkpoint, in the live optimizer, or in both."""
        slot, target = len(self.slots), live.blocks
        for part in parts:
            if part.tensor.extents:  # of nothing it cannot be told whether it was quantized
                self._check_dtype(part, live.key, live.dtype if target is None else _VALUES_DTYPE)
        fill = live.initial if target is None else target.codebook.zero
        gaps = _gaps(parts, live.rows, numel)
        self.slots.append(
            Slot(
                live.key,
                flat.index,
                "",
                live.rows * numel,
                live.dtype,
                gaps,
                flat.replicated,
                rows=live.rows,
                fill=fill,
            )
        )
        together = [(slot, live.rows * numel, live.dtype)]
        blocks = 0
        if target is not None:
            blocks = target.blocks(numel)
            scales = live.rows * blocks
            together.append((slot + 1, scales, _SCALES_DTYPE))
            every = (FlatRange(0, scales),)  # of blocks without an element in the checkpoint
            self.slots.append(
                Slot(target.scales, flat.index, "", scales, _SCALES_DTYPE, every, flat.replicated, rows=live.rows)
            )
            self.blocks += scales
        if flat.replicated and not self.sharing.whole(together):
            return
        for row in range(live.rows):
            where = Row(slot, row * numel, numel, target, slot + 1, row * blocks)
            pieces = (piece for part in parts for piece in _source_pieces(part, row))
            copies, recodes = plan_row(where, pieces)
            self.copies += copies
            self.recodes += recodes
            if not self._realign:
                self._refuse_recut(live, parts, recodes, blocks)

    def _refuse_recut(self, live: LiveState, parts: Sequence[_Part], recodes: Sequence[Recode], blocks: int) -> None:
        recut = sum(map(recut_blocks, recodes))
        if recut:
            raise MismatchError(
                f"8-bit blocks of {live.key} would have to be quantized anew, which changes them a little",
                parameter=parts[0].fragment.name,
                file=self._catalog.source.folder,
                expected='blocks that lie whole on both sides, since "eight_bit_realign" is "error"',
                found=f"{recut} of {blocks} blocks of this partition mix elements of several saved blocks",
                remedy=(
                    '"elastic_checkpoint": {"eight_bit_realign": "requantize"}; or load at the topology it was saved '
                    'with; runs that are started with "align_partitions" never meet this'
                ),
            )

    def _add_whole_state(self, flat: FlatPartition, live: LiveState, parts: Sequence[_Part]) -> None:
        numel, slot = math.prod(live.shape), len(self.slots)
        dtype = live.dtype or (parts[0].tensor.dtype if parts else flat.dtype)
        mine = self.sharing.mine(slot, numel, dtype) if flat.replicated else None
        for part in parts:  # one, or none
            _check_shape(part.fragment.name, part.tensor, live.shape)
            self._check_dtype(part, live.key, dtype)
            self._cover(part.tensor, FlatRange(0, numel), slot, 0, mine)
        gaps = () if parts else (FlatRange(0, numel),)
        self.slots.append(
            Slot(live.key, flat.index, "", numel, dtype, gaps, flat.replicated, WHOLE, 1, live.shape, live.initial)
        )

    def _add_replicated(self, flat: FlatPartition, live: LiveState, saved: ReplicatedState) -> None:
        """Every rank reads it by itself: it is small."""
        if (live.dtype, live.shape) != (saved.dtype, saved.shape):
            raise MismatchError(
                f"optimizer state {live.key!r}, which is one for all partitions, is of another kind",
                file=self._catalog.files[saved.file].path,
                expected=f"{live.dtype} of shape {live.shape} in the live optimizer",
                found=f"{saved.dtype} of shape {saved.shape} in the checkpoint",
                remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
            )
        numel, slot = math.prod(saved.shape), len(self.slots)
        self.copies.append(Copy(saved.file, saved.byte_offset, slot, 0, numel, saved.dtype))
        self.slots.append(Slot(live.key, flat.index, "", numel, saved.dtype, (), False, REPLICATED, 1, saved.shape))

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
        for part, byte_offset, extent in _pieces(tensor, wanted):
            position = slot_offset + part.start - wanted.start
            self.copies.append(Copy(extent.file, byte_offset, slot, position, part.numel, tensor.dtype))


def _state_shape(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return shape if rows == 1 else (rows, *shape)


def _in_row(fragment: Fragment, row: int) -> FlatRange:
    """The elements of a fragment in one row of a state with several."""
    base = row * math.prod(fragment.shape)
    return FlatRange(base + fragment.range.start, base + fragment.range.stop)


def _is_coded(tensor: LogicalTensor) -> bool:
    return any(extent.code is not None for extent in tensor.extents)


def _source_pieces(part: _Part, row: int) -> Iterator[Piece]:
    """The source elements of one part in one row; ``start`` counts from the start of the row."""
    wanted = _in_row(part.fragment, row)
    for held, byte_offset, extent in _pieces(part.tensor, wanted):
        skipped = held.start - extent.range.start
        code = None if extent.code is None else replace(extent.code, position=extent.code.position + skipped)
        start = part.offset + held.start - wanted.start
        yield Piece(extent.file, byte_offset, start, held.numel, part.tensor.dtype, code)


def _gaps(parts: Sequence[_Part], rows: int, numel: int) -> tuple[FlatRange, ...]:
    """Elements of a slot into which no part goes."""
    gaps = []
    for row in range(rows):
        position = 0
        for part in parts:
            if part.offset < position:
                raise AssertionError(f"fragments of {part.fragment.name} overlap")
            if part.offset > position:
                gaps.append(FlatRange(row * numel + position, row * numel + part.offset))
            position = part.offset + part.fragment.range.numel
        if position < numel:
            gaps.append(FlatRange(row * numel + position, (row + 1) * numel))
    return tuple(gaps)


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


def _pieces(tensor: LogicalTensor, wanted: FlatRange) -> Iterator[tuple[FlatRange, int, Extent]]:
    """The parts of ``wanted`` that the extents hold: (range, byte offset, extent), by ascending start."""
    itemsize = ITEMSIZE[tensor.dtype]
    extents = tensor.extents
    first = max(bisect_right(extents, wanted.start, key=lambda extent: extent.range.start) - 1, 0)
    for extent in extents[first:]:
        if extent.range.start >= wanted.stop:
            return
        part = extent.range.intersect(wanted)
        if part is not None:
            yield part, extent.byte_offset + (part.start - extent.range.start) * itemsize, extent


def _check_shape(name: str, tensor: LogicalTensor, live_shape: tuple[int, ...]) -> None:
    if tensor.shape != live_shape:
        raise MismatchError(
            f"shape of {'this ' + tensor.key if tensor.key in (BUFFER, FROZEN) else tensor.key} differs",
            parameter=name,
            expected=f"{live_shape} in the live model",
            found=f"{tensor.shape} in the checkpoint",
            remedy="build the model with the sizes it was saved with; no loader option makes shapes fit",
        )

"""Collects the slots of one rank's plan, and what fills them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastic_ckpt.core.dtypes import converts_by_rounding, converts_exactly, is_floating
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, ReplicatedState, TensorMetadata
from elastic_ckpt.core.read_plan import ReadItem, RequantizeItem, Slot
from elastic_ckpt.core.state_kinds import REPLICATED, SCRATCH, TOUCHED, WHOLE, LiveState
from elastic_ckpt.core.strided import ShardSources, copied
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.planning.matching import weights_key
from elastic_ckpt.planning.parts import (
    Part,
    cannot_be_blended,
    cannot_be_cut,
    gaps_of,
    is_coded,
    source_pieces,
    state_shape,
)
from elastic_ckpt.planning.quantized_items import Row, plan_row, recut_blocks
from elastic_ckpt.planning.shares import Sharing
from elastic_ckpt.planning.state_matching import StateLink
from elastic_ckpt.planning.strips import check_tiling, strips

_SCALES_DTYPE = "float32"
#: What codes stand for.
_VALUES_DTYPE = "float32"


class PlanBuilder:
    """Collects slots, copies and recodes.

    Args:
        metadata: what the checkpoint holds.
        sharing: deals out what every data-parallel rank holds.
        realign: whether 8-bit blocks may be cut anew.
        rounding: whether masters and states may be rounded to the dtype that the live engine keeps them in.
        resharding: how parameters and buffers come from shards that were cut otherwise, by (name, key of the state);
            the key is empty where it is the same for all. All others come from the shard of ``tp_rank``.
        tp_rank: this rank's place among the tensor-parallel ones.
    """

    def __init__(
        self,
        metadata: CheckpointMetadata,
        sharing: Sharing,
        realign: bool = True,
        resharding: Mapping[tuple[str, str], ShardSources] | None = None,
        tp_rank: int = 0,
        rounding: bool = True,
    ) -> None:
        self._catalog = metadata
        self._rounding = rounding
        self._realign = realign
        self._resharding = resharding or {}
        self._tp_rank = tp_rank
        self._tiled: set[tuple[str, str]] = set()
        self.sharing = sharing
        self.slots: list[Slot] = []
        self.copies: list[ReadItem] = []
        self.recodes: list[RequantizeItem] = []
        self.blocks = 0
        #: key, saved dtype and live dtype of what is rounded
        self.rounded: dict[tuple[str, str, str], None] = {}

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

    def _parts(self, held: Sequence[Fragment], key_of: Callable[[str], str]) -> list[Part]:
        return [self._part(part, key_of(part.name), part.flat_offset) for part in held]

    def _part(self, fragment: Fragment, key: str, offset: int) -> Part:
        tensor = self._tensor(fragment.name, key)
        return Part(fragment, tensor, offset, self._transfer(tensor, key, math.prod(fragment.shape)))

    def _transfer(self, tensor: TensorMetadata, key: str, numel: int) -> ShardSources:
        """Where this rank's shard of a tensor comes from."""
        name = tensor.name
        found = self._resharding.get((name, key)) or self._resharding.get((name, ""))
        return found or copied(self._tp_rank if tensor.shards else 0, numel)

    def _is_resharded(self, name: str) -> bool:
        return (name, "") in self._resharding

    def _touched(self, fragments: Sequence[Fragment], held: Sequence[Fragment], key: str) -> tuple[list[Part], int]:
        """Whole parameters, one behind the other: those that are restored, and the size of all."""
        restored = {part.name for part in held}
        parts, position = [], 0
        for part in fragments:
            numel = math.prod(part.shape)
            if part.name in restored:
                whole = replace(part, range=FlatRange(0, numel))
                if self._is_resharded(part.name):
                    raise cannot_be_cut(part.name, key)
                parts.append(self._part(whole, key, position))
            position += numel
        return parts, position

    def _add_elements(self, flat: FlatPartition, live: LiveState, parts: Sequence[Part], numel: int) -> None:
        """A tensor of ``rows`` times ``numel`` elements, into which the parts go, in order of their offsets."""
        for part in parts:
            if not self._is_resharded(part.fragment.name):
                self._check_shape(part.tensor, state_shape(part.fragment.shape, live.rows))
        if live.blocks is not None or any(is_coded(part.tensor) for part in parts):
            self._add_coded(flat, live, parts, numel)
            return
        dtype = live.dtype or (parts[0].tensor.dtype if parts else flat.dtype)
        slot = len(self.slots)
        mine = self.sharing.mine(slot, live.rows * numel, dtype) if flat.replicated else None
        for part in parts:
            self._check_dtype(part, live.key, part.tensor.dtype, dtype)
            for row in range(live.rows):
                self._cover(part, row, live.rows, slot, numel, mine)
        gaps = gaps_of(parts, live.rows, numel)
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

    def _check_dtype(self, part: Part, key: str, saved: str, dtype: str) -> None:
        tensor = part.tensor
        if converts_exactly(saved, dtype):
            return
        rounds = converts_by_rounding(saved, dtype) and not is_coded(tensor)
        if rounds and self._rounding:
            self.rounded[key, saved, dtype] = None
            return
        remedy = "resume with the dtype of master weights and states that the checkpoint was saved with"
        if rounds:
            remedy += '; or "elastic_checkpoint": {"on_precision_loss": "warn"}, which rounds them'
        raise MismatchError(
            f"{key} of this parameter would lose precision",
            parameter=part.fragment.name,
            file=self._catalog.files[tensor.chunks[0].file].path if tensor.chunks else None,
            expected=f"{dtype}, which the live optimizer keeps",
            found=f"{tensor.dtype} in the checkpoint",
            remedy=remedy,
        )

    def _add_coded(self, flat: FlatPartition, live: LiveState, parts: Sequence[Part], numel: int) -> None:
        """A state that is quantized in the checkpoint, in the live optimizer, or in both."""
        slot, target = len(self.slots), live.blocks
        for part in parts:
            if part.transfer.blend:
                raise cannot_be_blended(part.fragment.name, live.key)
            if part.tensor.chunks:  # of nothing it cannot be told whether it was quantized
                expected = live.dtype if target is None else _VALUES_DTYPE
                self._check_dtype(part, live.key, _values_dtype(part.tensor), expected)
        fill = live.initial if target is None else target.codebook.zero
        gaps = gaps_of(parts, live.rows, numel)
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
            pieces = (piece for part in parts for piece in source_pieces(part, row, live.rows))
            copies, recodes = plan_row(where, pieces)
            self.copies += copies
            self.recodes += recodes
            if not self._realign:
                self._refuse_recut(live, parts, recodes, blocks)

    def _refuse_recut(
        self, live: LiveState, parts: Sequence[Part], recodes: Sequence[RequantizeItem], blocks: int
    ) -> None:
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
                    'with; under "align_partitions", a change of the data-parallel degree alone never needs it'
                ),
            )

    def _add_whole_state(self, flat: FlatPartition, live: LiveState, parts: Sequence[Part]) -> None:
        numel, slot = math.prod(live.shape), len(self.slots)
        dtype = live.dtype or (parts[0].tensor.dtype if parts else flat.dtype)
        mine = self.sharing.mine(slot, numel, dtype) if flat.replicated else None
        for part in parts:  # one, or none
            if self._is_resharded(part.fragment.name):
                raise cannot_be_cut(part.fragment.name, live.key)
            self._check_shape(part.tensor, live.shape)
            self._check_dtype(part, live.key, _values_dtype(part.tensor), dtype)
            whole = Fragment(part.fragment.name, live.shape, FlatRange(0, numel), flat.index, 0)
            shard = self._tp_rank if part.tensor.shards else 0
            self._cover(Part(whole, part.tensor, 0, copied(shard, numel)), 0, 1, slot, numel, mine)
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
        self.copies.append(ReadItem(saved.file, saved.byte_offset, slot, 0, numel, saved.dtype))
        self.slots.append(Slot(live.key, flat.index, "", numel, saved.dtype, (), False, REPLICATED, 1, saved.shape))

    def add_whole(self, whole: WholeTensor) -> str:
        """A buffer or a frozen parameter; returns the dtype that it was saved in."""
        key = weights_key(self._catalog, whole.name) if whole.key == FROZEN else whole.key
        tensor = self._tensor(whole.name, key)
        if not self._is_resharded(whole.name):
            self._check_shape(tensor, whole.shape)
        if tensor.dtype != whole.dtype and not (is_floating(tensor.dtype) and is_floating(whole.dtype)):
            raise MismatchError(
                f"dtype of this {whole.key} differs",
                parameter=whole.name,
                expected=f"{whole.dtype} in the live model",
                found=f"{tensor.dtype} in the checkpoint",
            )
        slot = len(self.slots)
        replicated = whole.replicated and not (whole.key == BUFFER and self._catalog.buffers_of_this_rank)
        mine = self.sharing.mine(slot, whole.range.numel, whole.dtype) if replicated else None
        fragment = Fragment(whole.name, whole.shape, whole.range, -1, 0)
        part = Part(fragment, tensor, 0, self._transfer(tensor, key, math.prod(whole.shape)))
        self._cover(part, 0, 1, slot, whole.range.numel, mine)
        gaps = gaps_of([part], 1, whole.range.numel)
        self.slots.append(Slot(whole.key, -1, whole.name, whole.range.numel, whole.dtype, gaps, replicated))
        return tensor.dtype

    def _tensor(self, name: str, key: str) -> TensorMetadata:
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
            check_tiling(self._catalog, tensor)
            self._tiled.add((name, key))
        return tensor

    def _check_shape(self, tensor: TensorMetadata, live_shape: tuple[int, ...]) -> None:
        saved = tensor.shard_shapes[self._tp_rank if tensor.shards else 0]
        if saved != live_shape:
            raise MismatchError(
                f"shape of {'this ' + tensor.key if tensor.key in (BUFFER, FROZEN) else tensor.key} differs",
                parameter=tensor.name,
                expected=f"{live_shape} in the live model",
                found=f"{saved} in the checkpoint",
                remedy="build the model with the sizes it was saved with; no loader option makes shapes fit",
            )

    def _cover(self, part: Part, row: int, rows: int, slot: int, row_numel: int, mine: FlatRange | None) -> None:
        """Append what writes one row of a part to the slot; chunks tile their shard, so each element once.

        Args:
            part: what to write.
            row, rows: which row, of how many.
            slot: where it goes.
            row_numel: elements of a row of the slot.
            mine: elements of the slot that this rank reads; ``None``: all.
        """
        offset = part.place(row, row_numel)
        wanted = part.fragment.range
        if mine is not None:
            inside = FlatRange(wanted.start + offset, wanted.stop + offset).intersect(mine)
            if inside is None:
                return
            wanted = FlatRange(inside.start - offset, inside.stop - offset)
        found = strips(part.tensor, part.transfer, wanted, row, rows)
        if part.transfer.blend:
            pieces = sorted((piece for strip in found for piece in strip.pieces(offset)), key=lambda piece: piece.start)
            scale = part.transfer.scale
            self.recodes.append(
                RequantizeItem(slot, wanted.start + offset, wanted.numel, None, -1, 0, tuple(pieces), scale)
            )
            return
        for strip in found:
            band = strip.band
            self.copies.append(
                ReadItem(
                    strip.chunk.file,
                    strip.byte_offset,
                    slot,
                    band.target + offset,
                    band.width,
                    strip.dtype,
                    band.rows,
                    band.source_stride if band.rows > 1 else 0,
                    band.target_stride if band.rows > 1 else 0,
                )
            )


def _values_dtype(tensor: TensorMetadata) -> str:
    """Of what a saved tensor holds, or its codes stand for."""
    return _VALUES_DTYPE if is_coded(tensor) else tensor.dtype

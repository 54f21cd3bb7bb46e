"""Parts of saved tensors that go into one slot of a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import Fragment
from elastic_ckpt.core.metadata import TensorMetadata
from elastic_ckpt.core.read_plan import Piece
from elastic_ckpt.core.strided import ShardSources
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.strips import Strip, strips


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one parameter in a slot: which ones, from which tensor, and where they go in a row of it."""

    fragment: Fragment
    tensor: TensorMetadata
    offset: int
    transfer: ShardSources

    def strips(self, row: int, rows: int) -> Iterator[Strip]:
        """Where they lie in the checkpoint."""
        return strips(self.tensor, self.transfer, self.fragment.range, row, rows)

    def place(self, row: int, row_numel: int) -> int:
        """What has to be added to a place in the live shard to come to one in the slot."""
        return row * row_numel + self.offset - self.fragment.range.start


def state_shape(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Shape of a state with so many rows of a parameter."""
    return shape if rows == 1 else (rows, *shape)


def is_coded(tensor: TensorMetadata) -> bool:
    """Whether it is quantized in the checkpoint."""
    return any(chunk.code is not None for chunk in tensor.chunks)


def source_pieces(part: Part, row: int, rows: int) -> list[Piece]:
    """The source elements of one part in one row, ascending; ``start`` counts from the start of the row."""
    pieces = [piece for strip in part.strips(row, rows) for piece in strip.pieces(part.place(0, 0))]
    return sorted(pieces, key=lambda piece: piece.start)


def gaps_of(parts: Sequence[Part], rows: int, numel: int) -> tuple[FlatRange, ...]:
    """Elements of a slot into which no part goes."""
    gaps = []
    for row in range(rows):
        position = 0
        for part in parts:
            if part.offset < position:
                raise AssertionError(f"fragments of {part.fragment.name} overlap")
            if part.offset > position:
                gaps.append(FlatRange(row * numel + position, row * numel + part.offset))
            for missing in part.transfer.missing:
                gap = missing.intersect(part.fragment.range)
                if gap is not None:
                    place = part.place(row, numel)
                    gaps.append(FlatRange(gap.start + place, gap.stop + place))
            position = part.offset + part.fragment.range.numel
        if position < numel:
            gaps.append(FlatRange(row * numel + position, (row + 1) * numel))
    return tuple(gaps)


def cannot_be_cut(name: str, key: str) -> MismatchError:
    """A state of a shape of its own, at another tensor-parallel degree."""
    return MismatchError(
        f"{key} is kept for a parameter as a whole, and cannot be cut for another tensor-parallel degree",
        parameter=name,
        expected="a state with one value for each element",
        found=f"{key}, of a shape of its own",
        remedy="load at the tensor-parallel degree it was saved with, or with load_optimizer_states=False",
    )


def cannot_be_blended(name: str, key: str) -> MismatchError:
    """A quantized state of which several copies would become one."""
    return MismatchError(
        f"{key} is quantized, and would have to be averaged or added up over tensor-parallel ranks",
        parameter=name,
        expected="a state of plain values",
        found="8-bit codes",
        remedy='"elastic_checkpoint": {"replicated_params": "first"}, or load_optimizer_states=False',
    )

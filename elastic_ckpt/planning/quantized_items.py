"""Plans one row of an optimizer state that is quantized on either side. Pure.

Blocks that are whole, and in the same grid, on both sides are plain copies of codes and scales. All others are
requantized (:class:`~elastic_ckpt.core.read_plan.RequantizeItem`); even there, a block whose source elements all have
one scale keeps its codes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.read_plan import Piece, ReadItem, RequantizeItem, clip
from elastic_ckpt.core.state_kinds import BlockFormat

_SCALE_DTYPE = "float32"


@dataclass(frozen=True)
class Row:
    """A row of a live state: its partition's elements, once.

    Attributes:
        slot: of codes or values.
        start: its first element in the slot.
        numel: its elements.
        target: how the live optimizer quantizes it; ``None``: it does not.
        scales_slot: slot of the scales.
        scales_start: place in it of the row's first scale.
    """

    slot: int
    start: int
    numel: int
    target: BlockFormat | None
    scales_slot: int = -1
    scales_start: int = 0


def plan_row(row: Row, pieces: Iterable[Piece]) -> tuple[list[ReadItem], list[RequantizeItem]]:
    """Copies and recodes that fill one row.

    Args:
        row: what to fill.
        pieces: its source elements in ascending order; ``start`` counts from the row's first element.
    """
    merged = list(_merge(pieces))
    if row.target is None:
        return _to_values(row, merged)
    copies: list[ReadItem] = []
    rest: list[tuple[int, int]] = []
    for piece in merged:
        first, last = _same_blocks(row, row.target, piece)
        if first < last:
            copies += _copy_blocks(row, row.target, piece, first, last)
        else:
            first = last = _ceil(piece.start + piece.numel, row.target.numel)
        rest.append((piece.start // row.target.numel, first))
        rest.append((last, _ceil(piece.start + piece.numel, row.target.numel)))
    starts = [piece.start for piece in merged]
    return copies, [_recode(row, row.target, merged, starts, first, last) for first, last in _union(rest)]


def recut_blocks(recode: RequantizeItem) -> int:
    """How many blocks of a recode mix elements of several source blocks, or take values that no code of theirs has."""
    if recode.target is None:
        return 0
    sources: dict[int, set[tuple[int, int, int]]] = {}
    numel = recode.target.numel
    for piece in recode.pieces:
        for start, stop, source in _source_blocks(piece, recode.target):
            for block in range((start - recode.start) // numel, _ceil(stop - recode.start, numel)):
                sources.setdefault(block, set()).add(source)
    return sum(len(found) > 1 or (-1, -1, -1) in found for found in sources.values())


def _source_blocks(piece: Piece, target: BlockFormat) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Elements of the slot that come from one source block: (start, stop, which block); of values, or codes of another
    map, it is no block whose codes could stay."""
    code, end = piece.code, piece.start + piece.numel
    if code is None or code.format.codebook != target.codebook:
        yield piece.start, end, (-1, -1, -1)
        return
    start = piece.start
    while start < end:
        position = code.position + start - piece.start
        block = position // code.format.numel
        stop = min(end, start + (block + 1) * code.format.numel - position)
        yield start, stop, (piece.file, code.scales_offset, block)
        start = stop


def _to_values(row: Row, pieces: Sequence[Piece]) -> tuple[list[ReadItem], list[RequantizeItem]]:
    copies = [
        ReadItem(p.file, p.byte_offset, row.slot, row.start + p.start, p.numel, p.dtype)
        for p in pieces
        if p.code is None
    ]
    coded = tuple(replace(p, start=row.start + p.start) for p in pieces if p.code is not None)
    return copies, [RequantizeItem(row.slot, row.start, row.numel, None, -1, 0, coded)] if coded else []


def _same_blocks(row: Row, target: BlockFormat, piece: Piece) -> tuple[int, int]:
    """The blocks of the row ``[first, last)`` that a piece holds whole, and in the same grid."""
    code = piece.code
    if code is None or code.format.numel != target.numel or code.format.codebook != target.codebook:
        return 0, 0
    if (piece.start - code.position) % target.numel:
        return 0, 0
    end = piece.start + piece.numel
    last = _ceil(end, target.numel) if end == row.numel else end // target.numel
    return _ceil(piece.start, target.numel), last


def _copy_blocks(row: Row, target: BlockFormat, piece: Piece, first: int, last: int) -> list[ReadItem]:
    start = first * target.numel
    numel = min(last * target.numel, row.numel) - start
    assert piece.code is not None
    block = (piece.code.position + start - piece.start) // target.numel
    codes = piece.byte_offset + (start - piece.start) * ITEMSIZE[piece.dtype]
    scales = piece.code.scales_offset + block * ITEMSIZE[_SCALE_DTYPE]
    return [
        ReadItem(piece.file, codes, row.slot, row.start + start, numel, piece.dtype),
        ReadItem(piece.file, scales, row.scales_slot, row.scales_start + first, last - first, _SCALE_DTYPE),
    ]


def _recode(
    row: Row, target: BlockFormat, pieces: Sequence[Piece], starts: Sequence[int], first: int, last: int
) -> RequantizeItem:
    """The blocks ``[first, last)`` of the row; ``starts`` are those of the pieces."""
    start, stop = first * target.numel, min(last * target.numel, row.numel)
    near = pieces[max(bisect_right(starts, start) - 1, 0) : bisect_left(starts, stop)]
    clipped = (clip(piece, start, stop) for piece in near)
    inside = tuple(replace(piece, start=row.start + piece.start) for piece in clipped if piece.numel > 0)
    return RequantizeItem(
        row.slot, row.start + start, stop - start, target, row.scales_slot, row.scales_start + first, inside
    )


def _merge(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces that touch on both sides, as neighbouring parameters of one partition do."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and _continues(last, piece):
            last = replace(last, numel=last.numel + piece.numel)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _continues(left: Piece, right: Piece) -> bool:
    if left.code is not None and right.code is not None:
        same_grid = replace(left.code, position=left.code.position + left.numel) == right.code
    else:
        same_grid = left.code is right.code
    return (
        same_grid
        and (left.file, left.dtype) == (right.file, right.dtype)
        and left.start + left.numel == right.start
        and left.byte_offset + left.numel * ITEMSIZE[left.dtype] == right.byte_offset
    )


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join overlapping and neighbouring intervals; empty ones vanish."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _ceil(value: int, step: int) -> int:
    return -(-value // step)

"""Plans one row of an optimizer state that is quantized in the checkpoint, in the live optimizer, or in both. Pure.

Whole blocks in the same grid on both sides are plain copies of codes and scales. All others are requantized
(:class:`~elastic_ckpt.core.read_plan.RequantizeItem`); a block whose source elements share one scale keeps its codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import SCALE_DTYPE, ReadItem, RequantizeItem, join_neighbours
from elastic_ckpt.core.state_kinds import BlockFormat


def split_row(row: RequantizeItem) -> tuple[list[ReadItem], list[RequantizeItem]]:
    """Split a row, of which no two sources write the same element, into plain copies and items to requantize."""
    row = replace(row, sources=tuple(join_neighbours(row.sources)))
    if row.target is None:
        coded = tuple(item for item in row.sources if item.code is not None)
        plain = [item for item in row.sources if item.code is None]
        return plain, [replace(row, sources=coded)] if coded else []
    copies: list[ReadItem] = []
    rest: list[tuple[int, int]] = []
    for item in row.sources:
        start, stop = item.slot_offset - row.start, item.slot_stop - row.start
        first, last = _same_blocks(row, row.target, item)
        if first < last:
            copies += _copy_blocks(row, row.target, item, first, last)
        else:
            first = last = row.target.blocks(stop)
        rest += [(start // row.target.numel, first), (last, row.target.blocks(stop))]
    step = row.target.numel
    parts = [(row.start + first * step, min(row.start + last * step, row.stop)) for first, last in _union(rest)]
    return copies, [row.part(start, stop) for start, stop in parts]


def requantized_blocks(item: RequantizeItem) -> int:
    """Number of blocks that mix elements of several source blocks, or take values that none of their codes has."""
    if item.target is None:
        return 0
    sources: dict[int, set[tuple[int, int, int]]] = {}
    numel = item.target.numel
    for source in item.sources:
        for start, stop, source_block in _source_blocks(source, item.target):
            for block in range((start - item.start) // numel, item.target.blocks(stop - item.start)):
                sources.setdefault(block, set()).add(source_block)
    return sum(len(found) > 1 or (-1, -1, -1) in found for found in sources.values())


def _source_blocks(source: ReadItem, target: BlockFormat) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Elements of the slot by source block: (start, stop, block). Values, and codes of another codebook, have none."""
    code = source.code
    if code is None or code.format.codebook != target.codebook:
        yield source.slot_offset, source.slot_stop, (-1, -1, -1)
        return
    start = source.slot_offset
    while start < source.slot_stop:
        position = code.position + start - source.slot_offset
        block = position // code.format.numel
        stop = min(source.slot_stop, start + (block + 1) * code.format.numel - position)
        yield start, stop, (source.file, code.scales_offset, block)
        start = stop


def _same_blocks(row: RequantizeItem, target: BlockFormat, item: ReadItem) -> tuple[int, int]:
    """The blocks of the row ``[first, last)`` that a source has whole, in the same grid."""
    code, start, stop = item.code, item.slot_offset - row.start, item.slot_stop - row.start
    if code is None or code.format.numel != target.numel or code.format.codebook != target.codebook:
        return 0, 0
    if (start - code.position) % target.numel:
        return 0, 0
    return target.blocks(start), target.blocks(stop) if stop == row.numel else stop // target.numel


def _copy_blocks(row: RequantizeItem, target: BlockFormat, item: ReadItem, first: int, last: int) -> list[ReadItem]:
    start = row.start + first * target.numel
    codes = item.clip(start, min(row.start + last * target.numel, row.stop))
    assert codes.code is not None
    scales = codes.code.scales_offset + codes.code.position // target.numel * ITEMSIZE[SCALE_DTYPE]
    return [
        replace(codes, code=None),
        ReadItem(item.file, scales, row.scales_slot, row.scales_start + first, last - first, SCALE_DTYPE),
    ]


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined

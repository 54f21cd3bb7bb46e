"""Computes the sizes of the reader's reads from a plan, without files or memory. Pure.

Does with numbers, per item, what :mod:`elastic_ckpt.io.coalesce` does with buffers, per row: a strided item of a
hundred thousand rows takes no longer than one of two. A test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan
from elastic_ckpt.io.coalesce import MAX_BUFFERS, ReadOptions
from elastic_ckpt.io.requantize import nbytes_read, parts_of


def read_sizes(plan: ReadPlan, options: ReadOptions, on_accelerator: bool) -> Counter[int]:
    """Number of reads of each size, in bytes; a part of a requantize item counts as one.

    ``on_accelerator``: whether ``preadv`` cannot write into the slots, so that all reads go through bounce buffers.
    """
    sizes: Counter[int] = Counter()
    direct: list[ReadItem] = []
    for item in plan.items:
        itemsize = ITEMSIZE[item.dtype]
        if on_accelerator or item.dtype != plan.slots[item.slot].dtype:
            step_nbytes = max(options.staged_nbytes // itemsize, 1) * itemsize
            whole, rest = divmod(item.numel * itemsize, step_nbytes)
            sizes[step_nbytes] += whole * item.rows
            sizes[rest] += item.rows
        else:
            direct.append(item)
    for requantize in plan.requantize_items:
        sizes.update(map(nbytes_read, parts_of(requantize, options.requantize_nbytes)))
    _count_joined(direct, options, sizes)
    return Counter({nbytes: count for nbytes, count in sizes.items() if nbytes and count})


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one item: ``count`` of ``nbytes`` each, ``stride`` bytes apart; gaps up to ``most_gap`` are read over."""

    nbytes: int
    stride: int
    count: int
    most_gap: int

    @property
    def buffers(self) -> int:
        """Buffers that each row but the first adds to a read: itself, and the gap before it."""
        return 1 + (self.stride > self.nbytes)

    def span(self, count: int) -> int:
        """Bytes from the start of the first to the end of the last of ``count`` rows."""
        return self.nbytes + (count - 1) * self.stride

    def fitting(self, room_nbytes: int, room_buffers: int) -> int:
        """Number of rows that fit into these bytes and, after the first, these buffers."""
        if room_nbytes < self.nbytes or room_buffers < 0:
            return 0
        if self.count == 1 or not 0 <= self.stride - self.nbytes <= self.most_gap:
            return 1
        return min(1 + (room_nbytes - self.nbytes) // self.stride, 1 + room_buffers // self.buffers, self.count)


def _count_joined(items: Iterable[ReadItem], options: ReadOptions, sizes: Counter[int]) -> None:
    """Count reads: neighbours in the file, or nearly so, are merged; what is longer than a chunk is split."""
    chunk_nbytes, most_gap = options.chunk_nbytes, options.gap_nbytes
    file, end, nbytes, buffers = -1, 0, 0, 0  # the read that the next item may still join
    for item in items:
        rows = _Rows(item.numel * ITEMSIZE[item.dtype], item.file_stride * ITEMSIZE[item.dtype], item.rows, most_gap)
        if not rows.nbytes:
            continue
        gap, left = item.byte_offset - end, rows.count
        if item.file == file and 0 <= gap <= most_gap:
            first = 1 + (gap > 0)
            count = rows.fitting(chunk_nbytes - nbytes - gap, MAX_BUFFERS - buffers - first)
            if count:
                nbytes += gap + rows.span(count)
                buffers += first + (count - 1) * rows.buffers
                left -= count
        end = item.byte_offset + rows.span(rows.count)
        if not left:
            continue
        sizes[nbytes] += 1
        file = item.file
        if rows.nbytes > chunk_nbytes:
            whole, rest = divmod(rows.nbytes, chunk_nbytes)
            nbytes, buffers = rest or chunk_nbytes, 1  # the end of the last row, which the next item may join
            sizes[chunk_nbytes] += whole * left - (0 if rest else 1)
            sizes[rest] += left - 1
            continue
        at_once = rows.fitting(chunk_nbytes, MAX_BUFFERS - 1)
        whole = (left - 1) // at_once
        sizes[rows.span(at_once)] += whole
        rest = left - whole * at_once
        nbytes, buffers = rows.span(rest), 1 + (rest - 1) * rows.buffers
    sizes[nbytes] += 1

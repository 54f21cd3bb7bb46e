"""Draws the scatter of a load as SVG: which bytes of which file go where in the memory of which rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from elastic_ckpt.cli.output import printable
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.report import saved_topology, size
from elastic_ckpt.tools.virtual import VirtualJob, bytes_by_file

#: Pixels.
_WIDTH, _HEIGHT, _MARGIN, _GAP, _BAR, _CHARACTER = 960, 400, 16, 8, 26, 6.4
_FILES_AT, _RANKS_AT = 96, 324
#: Copies of one file and tensor that are closer than this in both rows are one ribbon.
_JOINED = 0.5
_COLORS = ("#0b6e4f", "#e09f3e", "#4a6fb5", "#c1121f", "#7b5ea7", "#3d9ca8", "#8a6d3b", "#5c677d")


class _Bar(NamedTuple):
    """A file or the memory of a rank: its bytes, where it is drawn, and what is written at it."""

    nbytes: int
    left: float
    width: float
    label: str

    def at(self, byte: float) -> float:
        """Where a byte of it is drawn."""
        return self.left + byte * self.width / max(self.nbytes, 1)


def write_scatter(job: VirtualJob, ranks: Sequence[int], path: Path) -> None:
    """Plan ``ranks``, and write the diagram to ``path``. Raises :class:`ConfigError` if it cannot be written there."""
    drawn = scatter(job, [(rank, job.planned(rank)[1].reads) for rank in ranks])
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        expected = "a path in a folder that is there"
        raise ConfigError("the diagram cannot be written", str(path), expected, str(error)) from error


def scatter(job: VirtualJob, plans: Sequence[tuple[int, ReadPlan]]) -> str:
    """The diagram of the plans of some ranks."""
    source, metadata_files = job.metadata.source, job.metadata.files
    read = {rank: bytes_by_file(plan) for rank, plan in plans}
    numbers = sorted({file for by_file in read.values() for file in by_file})
    names = [os.path.relpath(metadata_files[number].path, source.folder) for number in numbers]
    sizes = [metadata_files[number].nbytes for number in numbers]
    files = _row(sizes, [f"{name}, {size(nbytes)}" for name, nbytes in zip(names, sizes, strict=True)])
    memory = [_slot_starts(plan)[-1] for _, plan in plans]
    ranks = _row(memory, [f"rank {rank} reads {size(sum(read[rank].values()))}" for rank, _ in plans])
    total = size(sum(chain.from_iterable(each.values() for each in read.values())))
    of = "" if len(plans) == job.topology.ranks else f" of {job.topology.ranks}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#ffffff"/>',
        _text(_MARGIN, 32, f"{saved_topology(source)}  →  {job.topology}", 'font-size="17" font-weight="bold"'),
        _text(_MARGIN, 54, f"{total} of {len(numbers)} files go to {len(plans)}{of} ranks, to each what it owns"),
    ]
    for (rank, plan), bar in zip(plans, ranks, strict=True):
        for at, number in enumerate(numbers):
            if nbytes := read[rank].get(number):
                title = escape(printable(f"rank {rank} reads {nbytes:,} bytes of {names[at]}"))
                color, ribbons = _COLORS[at % len(_COLORS)], "".join(_ribbons(plan, number, files[at], bar))
                parts.append(f'<g fill="{color}" fill-opacity="0.5"><title>{title}</title>{ribbons}</g>')
    for at, bar in enumerate(files):
        parts += _drawn(bar, _FILES_AT, _COLORS[at % len(_COLORS)], _FILES_AT - 8)
    for (_, plan), bar in zip(plans, ranks, strict=True):
        parts += [*_drawn(bar, _RANKS_AT, "#333333", _RANKS_AT + _BAR + 18), *_slot_names(plan, bar)]
    return "\n".join([*parts, "</svg>\n"])


def _row(sizes: Sequence[int], labels: Sequence[str]) -> list[_Bar]:
    """Bars beside each other, as wide as they have bytes."""
    space = _WIDTH - 2 * _MARGIN
    gap = min(_GAP, space / (4 * max(len(sizes), 1)))
    scale = (space - gap * (len(sizes) - 1)) / max(sum(sizes), 1)
    lefts = (_MARGIN + before * scale + at * gap for at, before in enumerate(accumulate(sizes, initial=0)))
    return [
        _Bar(nbytes, left, nbytes * scale, label) for nbytes, left, label in zip(sizes, lefts, labels, strict=False)
    ]


def _slot_starts(plan: ReadPlan) -> list[int]:
    """Bytes of memory before each slot, and of all."""
    return list(accumulate((slot.numel * ITEMSIZE[slot.dtype] for slot in plan.slots), initial=0))


def _ribbons(plan: ReadPlan, file: int, source: _Bar, target: _Bar) -> Iterator[str]:
    """Paths from the ranges of a file to those of a rank; what is strided is drawn as the range that it spans."""
    starts, spans, last_slot = _slot_starts(plan), list[list[float]](), -1
    sources = chain.from_iterable(each.sources for each in plan.requantize_items)
    items = (item for item in chain(plan.items, sources) if item.file == file)
    for item in sorted(items, key=lambda item: (item.slot, item.byte_offset)):
        width, to = ITEMSIZE[item.dtype], ITEMSIZE[plan.slots[item.slot].dtype]
        numel = (item.rows - 1) * item.file_stride + item.numel
        begin, end = source.at(item.byte_offset), source.at(item.byte_offset + numel * width)
        first = target.at(starts[item.slot] + item.slot_offset * to)
        behind = target.at(starts[item.slot] + item.slot_stop * to)
        if item.slot == last_slot and begin - spans[-1][1] < _JOINED and abs(first - spans[-1][3]) < _JOINED:
            spans[-1][1], spans[-1][3] = max(spans[-1][1], end), behind
        else:
            spans.append([begin, end, first, behind])
        last_slot = item.slot
    top, bottom, middle = _FILES_AT + _BAR, _RANKS_AT, (_FILES_AT + _BAR + _RANKS_AT) / 2
    for begin, end, first, behind in spans:
        down = f"M{begin:.1f} {top}C{begin:.1f} {middle:g} {first:.1f} {middle:g} {first:.1f} {bottom}"
        yield f'<path d="{down}H{behind:.1f}C{behind:.1f} {middle:g} {end:.1f} {middle:g} {end:.1f} {top}Z"/>'


def _drawn(bar: _Bar, top: float, color: str, text_at: float) -> Iterator[str]:
    box = f'x="{bar.left:.1f}" y="{top}" width="{max(bar.width, 0.5):.1f}" height="{_BAR}"'
    yield f'<rect {box} rx="2" fill="{color}"><title>{escape(printable(bar.label))}</title></rect>'
    if len(bar.label) * _CHARACTER < bar.width:
        yield _text(bar.left, text_at, bar.label)


def _slot_names(plan: ReadPlan, bar: _Bar) -> Iterator[str]:
    """What is in the memory of a rank: masters, states, buffers, where there is room to write it."""
    starts = _slot_starts(plan)
    for slot, start, stop in zip(plan.slots, starts, starts[1:], strict=False):
        left = bar.at(start)
        if start:
            yield f'<rect x="{left:.1f}" y="{_RANKS_AT}" width="1" height="{_BAR}" fill="#ffffff"/>'
        text = slot.name or ("masters" if slot.key == "fp32" else slot.key)
        if bar.at(stop) - left > (len(text) + 2) * _CHARACTER:
            yield _text(left + 5, _RANKS_AT + _BAR - 9, text, 'fill="#ffffff"')


def _text(x: float, y: float, text: str, style: str = 'fill="#333333"') -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(printable(text))}</text>'

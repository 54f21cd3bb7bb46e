"""The plot of ``elastic-ckpt plan``, which needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.core.text import printable
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.report import saved_topology, size, title
from elastic_ckpt.tools.virtual import VirtualJob, bytes_by_file

_COLORS = ("#0b6e4f", "#e09f3e", "#4a6fb5", "#c1121f", "#7b5ea7", "#3d9ca8", "#8a6d3b")
_INK = "#333333"
#: Where the row of files is, as a fraction of the plot's height.
_FILES = 0.7
#: Where the row of ranks is.
_RANKS = 0.12
#: How high a row is.
_BAR = 0.07
#: How wide a character is, as a fraction of the plot's width.
_CHARACTER = 0.0072
#: Reads that are closer than this in file and memory are one ribbon.
_JOINED = 0.0005
#: The ribbon's outline: curves (4) and lines (2).
_OUTLINE = (1, 4, 4, 4, 2, 4, 4, 4, 2)


def draw(job: VirtualJob, ranks: Sequence[int], path: Path) -> None:
    """Draw which bytes of which file go where in the memory of some ranks.

    Raises :class:`ConfigError` if ``path`` cannot be written, or its suffix is that of no format.
    """
    source = job.metadata.source
    plans = [job.planned(rank)[1].reads for rank in ranks]
    read = list(map(bytes_by_file, plans))
    numbers = sorted(set().union(*read))
    figure = Figure((9.6, 4))
    axes = figure.add_axes((0.02, 0, 0.96, 1), xlim=(0, 1), ylim=(0, 1))
    axes.set_axis_off()
    of = f" of {job.topology.ranks}" * (len(ranks) < job.topology.ranks)
    about = f"{size(sum(sum(each.values()) for each in read))} of {len(numbers)} files go to {len(ranks)}{of} ranks"
    axes.text(0, 0.92, f"{saved_topology(source)}  →  {job.topology}", color=_INK, fontsize=13, fontweight="bold")
    axes.text(0, 0.86, f"{about}, each reads only its own bytes", color=_INK, fontsize=9)
    colors = [_COLORS[at % len(_COLORS)] for at in range(len(numbers))]
    files = [job.metadata.files[n] for n in numbers]
    labels = [f"{os.path.relpath(file.path, source.folder)}, {size(file.nbytes)}" for file in files]
    starts, file_scale = _bars(axes, _FILES, [file.nbytes for file in files], labels, 0.09, color=colors)
    targets = [target for plan in plans for target in plan.targets]
    sizes = [target.numel * ITEMSIZE[target.dtype] for target in targets]
    labels = [target.name or title(target.key) for target in targets]
    begins, scale = _bars(axes, _RANKS, sizes, labels, 0.025, "white", color=_INK)
    owned = [sum(target.numel * ITEMSIZE[target.dtype] for target in plan.targets) for plan in plans]
    labels = [f"rank {rank} reads {size(sum(each.values()))}" for rank, each in zip(ranks, read, strict=True)]
    _bars(axes, _RANKS, owned, labels, -0.05, color="none", linewidth=4)
    for plan in plans:
        for number, start, color in zip(numbers, starts, colors, strict=False):
            drawn = list(ribbons(plan, number, start, begins, file_scale, scale))
            axes.add_collection(PathCollection(drawn, color=color, alpha=0.5, linewidth=0))
        begins = begins[len(plan.targets) :]
    try:
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(path)
    except (OSError, ValueError) as error:
        expected = "a path in a folder that exists, which ends with .svg, .png or .pdf"
        raise ConfigError("the plot cannot be written", str(path), expected, str(error)) from error


def _bars(
    axes: Any, y: float, sizes: Sequence[int], labels: Sequence[str], labels_at: float, ink: str = _INK, **style: Any
) -> tuple[Any, float]:
    """Draw bars of so many bytes, and the labels for which there is room; returns their bounds and a byte's width."""
    scale = 1 / max(sum(sizes), 1)
    bounds = np.cumsum([0, *sizes]) * scale
    axes.barh([y] * len(sizes), np.diff(bounds), _BAR, bounds[:-1], align="edge", edgecolor="white", **style)
    for left, right, label in zip(bounds, bounds[1:], labels, strict=False):
        if len(label) * _CHARACTER < right - left:
            axes.text(left + 0.006, y + labels_at, printable(label), color=ink, fontsize=9, parse_math=False)
    return bounds, scale


def ribbons(
    plan: ReadPlan, file: int, start: float, begins: Sequence[float], file_scale: float, scale: float
) -> Iterator[Outline]:
    """Outlines of the reads from one file; what is strided in it is drawn as the range that it spans."""
    items = chain(plan.items, *(each.sources for each in plan.requantize_items))
    spans: list[list[float]] = [[-1.0] * 5]
    for item in sorted((item for item in items if item.file == file), key=attrgetter("target", "byte_offset")):
        numel = (item.rows - 1) * item.file_stride + item.numel
        width = ITEMSIZE[plan.targets[item.target].dtype] * scale
        begin = start + item.byte_offset * file_scale
        end = begin + numel * ITEMSIZE[item.dtype] * file_scale
        first, behind = (begins[item.target] + at * width for at in (item.target_offset, item.target_stop))
        last = spans[-1]
        if item.target == last[4] and begin - last[1] < _JOINED and abs(first - last[3]) < _JOINED:
            last[1] = max(last[1], end)
            last[3] = behind
        else:
            spans.append([begin, end, first, behind, item.target])
    top = _FILES
    middle = (_FILES + _RANKS + _BAR) / 2
    bottom = _RANKS + _BAR
    for begin, end, first, behind, _ in spans[1:]:
        down = [(begin, top), (begin, middle), (first, middle), (first, bottom)]
        yield Outline([*down, (behind, bottom), (behind, middle), (end, middle), (end, top), (begin, top)], _OUTLINE)

"""What stays flat, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.flat_cases import FILES, FlatPoint, growth, lines_of

_COLORS = ("#0b6e4f", "#4a6fb5", "#e09f3e", "#c1121f", "#8fa8d6", "#5fb49c")
_MEANING = {FILES: "ranks that saved"}


def tables(points: Sequence[FlatPoint]) -> list[Table]:
    """A table for each series, with how fast each cost follows what is varied."""
    return [_table(series, lines) for series, lines in lines_of(points).items()]


def _table(series: str, lines: dict[str, list[FlatPoint]]) -> Table:
    table = Table(title=f"more {series}", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("", no_wrap=True)
    names = (_MEANING.get(series, series), "files", "metadata s", "plan s", "commit s", "whole load s")
    for name in (*names, "metadata KiB a rank", "files opened a rank"):
        table.add_column(name, justify="right")
    for line, points in lines.items():
        for number, point in enumerate(points):
            seconds = [f"{point.phases[phase]:.3f}" for phase in ("metadata", "plan", "commit")]
            figures = [str(point.case.varied), str(point.files), *seconds, f"{point.seconds:.3f}"]
            counted = [f"{point.metadata_nbytes / 1024:,.0f}", str(point.opened)]
            table.add_row("" if number else line, *figures, *counted)
        if len(points) > 1:
            table.add_row("  grows by the power", "", "", *_growths(points), style="italic", end_section=True)
    return table


def _growths(points: Sequence[FlatPoint]) -> list[str]:
    costs = [[point.phases[phase] for point in points] for phase in ("metadata", "plan", "commit")]
    costs.append([point.seconds for point in points])
    costs += [[float(point.metadata_nbytes) for point in points], [float(point.opened) for point in points]]
    varied = [float(point.case.varied) for point in points]
    return [f"{growth(list(zip(varied, cost, strict=True))):.2f}" for cost in costs]


def draw(points: Sequence[FlatPoint], path: Path) -> None:
    """Write the picture: a column for each series, seconds of metadata above, of planning below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    series = lines_of(points)
    figure = Figure(figsize=(4.4 * len(series), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(series), squeeze=False, sharex="col", sharey="row")
    for column, (name, lines) in enumerate(series.items()):
        for row, phase in enumerate(("metadata", "plan")):
            _draw_lines(panels[row][column], lines, phase)
        panels[0][column].set_title(f"more {name}", fontsize=11, fontweight="bold", loc="left")
        panels[1][column].set_xlabel(_MEANING.get(name, name))
        panels[0][column].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.08), ncols=2)
    panels[0][0].set_ylabel("seconds, metadata")
    panels[1][0].set_ylabel("seconds, planning")
    figure.savefig(path, dpi=150)


def _draw_lines(axes: Any, lines: dict[str, list[FlatPoint]], phase: str) -> None:
    for color, (line, points) in zip(_COLORS, lines.items(), strict=False):
        varied = [point.case.varied for point in points]
        axes.plot(varied, [point.phases[phase] for point in points], "o-", color=color, label=line, markersize=4)
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415  an optional package

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    if lines:
        varied = sorted({point.case.varied for points in lines.values() for point in points})
        axes.set_xticks(varied, [f"{value:,}" for value in varied])
    axes.grid(color="#dddddd", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

"""What was measured, as a picture: every contender against the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CONTENDERS, FLOORS, RESUME
from benchmarks.results import CaseResult, Summary, find, over_floor, summarize
from benchmarks.table import machine_line

_COLORS = {
    "native": "#0b6e4f",
    "unverified": "#9db8ad",
    "universal": "#5fb49c",
    "dcp": "#e09f3e",
    "ds-native": "#8fa8d6",
    "ds-universal": "#4a6fb5",
    "ds-convert": "#1f3a6e",
}
_FLOOR_COLOR = "#c1121f"
_INK, _FAINT = "#222222", "#dddddd"
_BAR = 0.82
_TIMES = "\N{MULTIPLICATION SIGN}"


def hindrance() -> str:
    """Why no picture can be drawn; empty where one can. Asked before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415  an optional package
    except ImportError as error:
        return f"no picture will be drawn: {error}; pip install matplotlib"
    return ""


def chart_rows(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """Cases by size of the model: each size is a panel of its own."""
    rows: dict[str, list[CaseResult]] = {}
    for result in results:
        if summarize(result):
            rows.setdefault(result.case.params, []).append(result)
    return rows


def bars_of(result: CaseResult, kind: str) -> list[Summary]:
    """What is drawn of a case: everything but floors, which are lines."""
    return [each for each in summarize(result) if each.kind == kind and each.contender not in FLOORS]


def draw(results: Sequence[CaseResult], machine: Mapping[str, str | int], page_state: str, path: Path) -> None:
    """Write the picture: a panel for each size of model, a group of bars for each case, lines for the floor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = chart_rows(results)
    widest = max(sum(len(bars_of(result, RESUME)) + 1.2 for result in row) for row in rows.values())
    figure = Figure(figsize=(min(max(0.42 * widest + 1.5, 10.0), 22.0), 0.9 + 3.9 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (params, row) in zip(panels, rows.items(), strict=True):
        _draw_panel(axes, params, row)
        axes.set_xlim(-1.0, widest - 1.2)  # bars of one width in all panels
    figure.suptitle(
        "Seconds to bring a training state back: lower is better", fontsize=13, fontweight="bold", color=_INK
    )
    _draw_legend(figure, [each for row in rows.values() for each in row])
    panels[-1].set_xlabel(
        machine_line(machine, page_state).replace("; ", "\n", 1), fontsize=7, color="#666666", labelpad=10
    )
    figure.savefig(path, dpi=160)


def _draw_panel(axes: Any, params: str, row: Sequence[CaseResult]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415

    place, ticks, names = 0.0, [], []
    for result in row:
        bars, summaries = bars_of(result, RESUME), summarize(result)
        for number, bar in enumerate(bars):
            _draw_bar(axes, place + number, bar, over_floor(bar, summaries))
        floor = find(summaries, "floor")
        left, right = place - 0.5, place + len(bars) - 0.5
        if floor is not None:
            axes.hlines(floor.seconds.median, left, right, color=_FLOOR_COLOR, linewidth=1.6, zorder=4)
            _label(axes, f"{_seconds(floor.seconds.median)}", (left, floor.seconds.median), "right", _FLOOR_COLOR)
        ticks.append((left + right) / 2)
        case = result.case
        names.append(f"ZeRO-{case.stage}\nDP {case.saved_dp} → {case.dp}")
        place += len(bars) + 1.2
    axes.set_yscale("log")
    axes.set_xticks(ticks, names, fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.4, high * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("seconds, log scale", fontsize=9)
    gigabytes = row[0].case.state_nbytes / 1e9
    axes.set_title(
        f"{params} parameters, {gigabytes:.1f} GB of masters and states", fontsize=10, loc="left", color=_INK
    )
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Any, place: float, bar: Summary, ratio: float | None) -> None:
    seconds = bar.seconds
    axes.bar(place, seconds.median, width=_BAR, color=_COLORS[bar.contender], zorder=2)
    axes.vlines(place, seconds.least, seconds.most, color=_INK, linewidth=0.9, zorder=3)
    text = _seconds(seconds.median) + (f"\n{_TIMES}{ratio:.{1 if ratio < 10 else 0}f}" if ratio is not None else "")
    _label(axes, text, (place, seconds.most), "center", _INK)


def _seconds(value: float) -> str:
    """Two digits, or all before the point."""
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} s"


def _label(axes: Any, text: str, place: tuple[float, float], side: str, color: str) -> None:
    offset, vertical = ((0, 3), "bottom") if side == "center" else ((-2, 0), "center")
    axes.annotate(text, place, offset, textcoords="offset points", ha=side, va=vertical, fontsize=6.5, color=color)


def _draw_legend(figure: Any, results: Sequence[CaseResult]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = {bar.contender for result in results for bar in bars_of(result, RESUME)}
    handles: list[Any] = [Patch(color=_COLORS[key], label=CONTENDERS[key].title) for key in _COLORS if key in shown]
    label = f"floor: preadv of the same bytes into memory of the same kind ({_TIMES}1)"
    handles.append(Line2D([], [], color=_FLOOR_COLOR, linewidth=1.6, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)

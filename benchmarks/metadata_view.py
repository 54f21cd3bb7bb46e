"""What reading metadata costs, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.metadata import MetadataPoint

_COLORS = {"elastic_ckpt": "#0b6e4f", "torch.load": "#4a6fb5", "zipfile": "#c1121f"}


def table(points: Sequence[MetadataPoint]) -> Table:
    """A row for each case and reader."""
    view = Table(title="metadata, medians", title_justify="left", title_style="bold", header_style="bold")
    view.add_column("files x parameters", no_wrap=True)
    view.add_column("reader", no_wrap=True)
    for name in ("gc", "wall ms", "CPU ms", "us of CPU a parameter", "torch.load / this", "extra MiB"):
        view.add_column(name, justify="right")
    torch = {(point.case, point.collection): point.cpu.median for point in points if point.reader == "torch.load"}
    last = None
    for point in points:
        case = point.case
        if last not in (None, case):
            view.add_section()
        title = "" if case == last else f"{case.files} x {case.parameters:,} {case.form}"
        last, cpu = case, point.cpu.median
        figures = [f"{1e3 * point.wall.median:,.1f}", f"{1e3 * cpu:,.1f}"]
        figures.append(f"{1e6 * cpu / (case.files * case.parameters):.1f}")
        figures.append(f"{torch[case, point.collection] / cpu:.1f}")
        view.add_row(title, point.reader, point.collection, *figures, f"{point.peak_nbytes / (1 << 20):,.1f}")
    return view


def draw(points: Sequence[MetadataPoint], path: Path) -> None:
    """Write the picture: a panel for each form of file, CPU seconds of one file over its parameters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    forms = list(dict.fromkeys(point.case.form for point in points))
    figure = Figure(figsize=(4.8 * len(forms), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(forms), squeeze=False, sharey=True)[0]
    for axes, form in zip(panels, forms, strict=True):
        _draw_panel(axes, [point for point in points if (point.case.form, point.case.files) == (form, 1)])
        axes.set_title(f"a file of {form}", fontsize=11, loc="left")
    panels[0].set_ylabel("seconds of CPU")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Any, points: Sequence[MetadataPoint]) -> None:
    for reader, color in _COLORS.items():
        for collection, line in (("off", "o-"), ("on", "o:")):
            mine = [point for point in points if (point.reader, point.collection) == (reader, collection)]
            label = f"{reader}, gc {collection}"
            varied = [point.case.parameters for point in mine]
            axes.plot(varied, [point.cpu.median for point in mine], line, color=color, label=label, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.grid(color="#dddddd", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

"""Plots the bytes that each rank reads from each file. Needs matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_ckpt.cli.plan_view import saved_topology
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.tools.virtual import VirtualJob
from elastic_ckpt.tools.virtual.forecast import RankForecast

#: Up to this many rows or columns are all labelled; of more, a few.
_MOST_NAMED, _FEW_NAMED = 40, 16
_FORMATS = (".png", ".pdf", ".svg")


def refuse_without_matplotlib() -> None:
    """Raise :class:`ConfigError`, before anything is planned, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            expected="matplotlib",
            found="nothing of this name",
            remedy="pip install matplotlib (or elastic_ckpt[plots])",
        )


def bytes_matrix(ranks: Sequence[RankForecast]) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Bytes by rank (row) and file (column), float64, and the indices of the files; unread files are left out."""
    files = sorted({file for each in ranks for file in each.by_file})
    rows = [[each.by_file.get(file, 0) for file in files] for each in ranks]
    return np.array(rows, dtype=np.float64), files


def draw(job: VirtualJob, ranks: Sequence[RankForecast], path: Path) -> None:
    """Write the plot to ``path``. Raises :class:`ConfigError` if it cannot be written there."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415  an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    matrix, files = bytes_matrix(ranks)
    width, height = (min(max(0.28 * count, 4.0), 11.0) + 3.0 for count in reversed(matrix.shape))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    shown = np.ma.masked_equal(matrix / 2**20, 0)
    norm = LogNorm() if shown.count() and shown.min() < shown.max() else None
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
    figure.colorbar(image, ax=axes, label="MiB read")
    _name_ticks(axes.yaxis, [f"rank {each.rank}" for each in ranks])
    names = [os.path.relpath(job.metadata.files[file].path, job.metadata.source.folder) for file in files]
    _name_ticks(axes.xaxis, [name.removesuffix("_states.pt") for name in names])
    axes.tick_params(axis="x", labelrotation=90)
    per_stage = job.topology.dp * job.topology.tp
    for border in range(per_stage, min(job.topology.ranks, len(ranks)), per_stage):
        axes.axhline(border - 0.5, color="grey", linewidth=0.5)
    axes.set_title(f"{saved_topology(job.metadata.source)}  →  {job.topology}")
    axes.set_xlabel(f"source files ({len(files)})")
    axes.set_ylabel(f"ranks ({len(ranks)})")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the picture cannot be written",
            file=str(path),
            expected=f"a path in a folder that is there, ending in {', '.join(_FORMATS)}",
            found=str(error),
        ) from error


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    step = 1 if len(names) <= _MOST_NAMED else -(-len(names) // _FEW_NAMED)
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7)

"""Compare the losses of a job that ran through with those of one that was resumed: a table, a picture, a verdict."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot

INK = "#1f2933"
REFERENCE = "#9fb8d6"
RESUMED = "#d1495b"
ROW_EVERY = 5


@dataclass(frozen=True)
class Curve:
    """The losses of one job.

    Attributes:
        label: how the job ran.
        losses: step -> loss, by step.
    """

    label: str
    losses: dict[int, float]


def read_curve(path: str, label: str) -> Curve:
    """Read the CSV file of step and loss that ``demo_train.py`` writes."""
    with open(path, newline="", encoding="utf-8") as stream:
        return Curve(label, {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)})


def differences(uninterrupted: Curve, resumed: Curve) -> dict[int, float]:
    """Absolute difference of the losses at each step that was resumed; infinite where one is not a number.

    Raises:
        ValueError: the resumed job did not go from some step to the uninterrupted job's last one.
    """
    steps = list(resumed.losses)
    if not steps or list(uninterrupted.losses)[-len(steps) :] != steps:
        raise ValueError(f"the resumed steps {steps[:1]}..{steps[-1:]} are not the end of the uninterrupted job")
    apart = {step: abs(resumed.losses[step] - uninterrupted.losses[step]) for step in steps}
    return {step: math.inf if math.isnan(difference) else difference for step, difference in apart.items()}


def loss_table(uninterrupted: Curve, resumed: Curve, apart: dict[int, float]) -> Table:
    """Every fifth step, and the first one after the resume."""
    table = Table(title="loss, uninterrupted and resumed", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column(f"uninterrupted\n{uninterrupted.label}", justify="right")
    table.add_column(f"resumed\n{resumed.label}", justify="right", style="bold")
    table.add_column("absolute\ndifference", justify="right")
    first = min(apart)
    for step, loss in uninterrupted.losses.items():
        if step == first:
            table.add_section()
        if step % ROW_EVERY == 0 or step in (1, first):
            after = (f"{resumed.losses[step]:.6f}", f"{apart[step]:.1e}") if step in apart else ("", "")
            table.add_row(str(step), f"{loss:.6f}", *after)
    return table


def draw(uninterrupted: Curve, resumed: Curve, apart: dict[int, float], png: Path) -> None:
    """Both curves with the resume point, and below them the absolute difference per step."""
    style: dict[Any, Any] = {
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    resume_at = min(apart) - 1
    worst = max(apart.values())
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(
            2, 1, sharex=True, figsize=(10, 6.4), height_ratios=(3, 1), layout="constrained"
        )
        figure.suptitle(
            f"Saved with {uninterrupted.label}, resumed with {resumed.label}",
            x=0.01,
            ha="left",
            fontsize=14,
            fontweight="bold",
        )
        above.plot(
            *zip(*uninterrupted.losses.items(), strict=True),
            color=REFERENCE,
            linewidth=6,
            solid_capstyle="round",
            label=f"uninterrupted, {uninterrupted.label}",
        )
        above.plot(
            *zip(*resumed.losses.items(), strict=True),
            color=RESUMED,
            linewidth=1.6,
            label=f"resumed at step {resume_at}, {resumed.label}",
        )
        above.set_ylabel("loss")
        above.legend(frameon=False, loc="upper right")
        above.annotate(
            f"checkpoint of step {resume_at}",
            xy=(resume_at, 1),
            xycoords=above.get_xaxis_transform(),
            xytext=(-8, -8),
            textcoords="offset points",
            ha="right",
            va="top",
        )
        below.bar(apart.keys(), apart.values(), color=RESUMED, width=0.8)
        below.annotate(
            f"largest: {worst:.1e}",
            xy=(resume_at, 1),
            xycoords=below.get_xaxis_transform(),
            xytext=(-8, -8),
            textcoords="offset points",
            ha="right",
            va="top",
        )
        below.set_ylabel("absolute\ndifference")
        below.set_xlabel("step")
        below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        below.set_xlim(0, max(apart) + 1)
        for axes in (above, below):
            axes.axvline(resume_at, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            axes.grid(axis="y", color=INK, alpha=0.12)
            axes.set_axisbelow(True)
        figure.align_ylabels()
        figure.savefig(png, dpi=150)


def main() -> None:
    """Print the table, write the picture, and exit with an error if the curves differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uninterrupted", nargs=2, metavar=("CSV", "LABEL"), required=True)
    parser.add_argument("--resumed", nargs=2, metavar=("CSV", "LABEL"), required=True)
    parser.add_argument("--png", type=Path, required=True, help="picture to write")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference that is allowed")
    arguments = parser.parse_args()
    uninterrupted = read_curve(*arguments.uninterrupted)
    resumed = read_curve(*arguments.resumed)
    apart = differences(uninterrupted, resumed)
    console = Console()
    console.print(loss_table(uninterrupted, resumed, apart))
    draw(uninterrupted, resumed, apart, arguments.png)
    console.print(f"picture: {arguments.png.resolve()}", highlight=False, soft_wrap=True)
    worst = max(apart.values())
    agree = worst <= arguments.tolerance
    verdict = "the curves agree" if agree else f"THE CURVES DIFFER by more than {arguments.tolerance:g}"
    console.print(f"largest difference over {len(apart)} steps: {worst:.2e}: {verdict}", highlight=False)
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()

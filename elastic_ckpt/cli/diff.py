"""``elastic-ckpt diff``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from elastic_ckpt.cli import AsJson, Config, Preset, TrustPickle, app
from elastic_ckpt.cli.output import console, end_with, errors_end_the_command, print_json
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.report import size
from elastic_ckpt.tools.comparison import Comparison, compare
from elastic_ckpt.tools.opened import config_of, open_folder

_SHOWN = 50
_Checkpoint = Annotated[
    Path, typer.Argument(help="Folder with a [bold]latest[/] file, or the folder of one tag.", show_default=False)
]


@app.command("diff", epilog="Example: [bold]elastic-ckpt diff checkpoints/step100 universal/step100[/]")
def diff(
    a: _Checkpoint,
    b: _Checkpoint,
    config: Config = None,
    preset: Preset = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by logical tensor, whatever their topologies, ZeRO stages and formats.

    Masters, optimizer states, buffers, frozen weights, steps, hyperparameters, counters and the lr scheduler. Exit
    code 1 where anything differs or is missing.
    """
    with errors_end_the_command(as_json):
        policy = "first" if config is None else None  # copies that differ are no reason to refuse
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle, replicated_params=policy)
        notes: tuple[str, ...] = ()
        try:
            first, second = (open_folder(str(path), None, options) for path in (a, b))
        except MismatchError as error:  # states that only a load can name
            first, second = (open_folder(str(path), None, options, with_states=False) for path in (a, b))
            notes = (f"optimizer states are not compared: {error.problem} ({error.file})",)
        outcome = compare(first, second, options.reading.threads, False if as_json else None)
        outcome = replace(outcome, notes=(*outcome.notes, *notes))
    if as_json:
        print_json(outcome)
    else:
        _show(outcome)
    end_with(found=bool(outcome.differences))


def _show(outcome: Comparison) -> None:
    read = f"({size(outcome.nbytes)} read)"
    if not outcome.differences:
        console.print(f"[green]equal[/]: {outcome.equal} tensors and other values {read}")
    else:
        shown = outcome.differences[:_SHOWN]
        table = Table(title=f"{len(outcome.differences)} differences, {outcome.equal} equal {read}")
        for column in ("name", "of it", "", "values in A and B"):
            table.add_column(column, overflow="fold")
        for difference in shown:
            words = (difference.name, difference.key, difference.what, difference.detail)
            table.add_row(*map(escape, words))
        console.print(table)
        if len(shown) < len(outcome.differences):
            console.print(f"and {len(outcome.differences) - len(shown)} more: --json has all")
    for note in outcome.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)

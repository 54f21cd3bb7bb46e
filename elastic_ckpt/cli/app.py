"""``elastic-ckpt``: puts the commands together.

Exit codes of all: 0, all is well; 1, something was found (damage, a difference, a load that would be refused); 2, wrong
usage; 3, the checkpoint cannot be read.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(
    name="elastic-ckpt",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(version("elastic_ckpt"))
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at DeepSpeed checkpoints, plan their load on another topology, verify, convert and compare them."""

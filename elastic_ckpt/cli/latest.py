"""``elastic-ckpt latest``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from elastic_ckpt.cli import AsJson, Config, Folder, TrustPickle, app
from elastic_ckpt.cli.output import console, end_with, error_console, errors_end_the_command, print_json
from elastic_ckpt.tools.latest import newest_whole
from elastic_ckpt.tools.opened import config_of

_EXAMPLE = "Example: [bold]deepspeed train.py --resume $(elastic-ckpt latest /ckpt)[/]"


@app.command("latest", epilog=_EXAMPLE)
def latest(
    folder: Folder,
    full: Annotated[bool, typer.Option("--full", help="Compare every byte with its checksum.")] = False,
    config: Config = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Print the path of the newest whole checkpoint of a folder, whatever its latest file says.

    Folders of tags, and those of Hugging Face's Trainer (checkpoint-20), Accelerate and Lightning. Newer ones that are
    not whole go to standard error, with the reason. Ends with 1 if none is whole.
    """
    with errors_end_the_command(as_json):
        newest, skipped = newest_whole(str(folder), config_of(config, trust_pickle=trust_pickle or None), full)
    if as_json:
        print_json({"newest": newest, "skipped": skipped})
        end_with(found=newest is None)
        return
    for each in skipped:
        text = f"not whole: {escape(each.path)}: {escape(each.problem or '')}"
        error_console.print(text, soft_wrap=True, highlight=False)
    if newest is not None and newest.path.isprintable():
        console.print(escape(newest.path), soft_wrap=True, highlight=False)
    elif newest is not None:
        error_console.print(f"{escape(newest.path)}: its name has control characters: rename it, or take --json")
    end_with(found=newest is None or not newest.path.isprintable())

"""``elastic-ckpt inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_ckpt.cli.app import AsJson, Config, Folder, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.inspect_view import file_tree, parameter_table, report
from elastic_ckpt.cli.output import end_with, errors_end_the_command, plain, print_json, print_wide
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import config_of

_EXAMPLE = "Example: [bold]elastic-ckpt inspect checkpoints --params[/]"


@app.command("inspect", epilog=_EXAMPLE)
def inspect(
    folder: Folder,
    tag: Tag = None,
    config: Config = None,
    preset: Preset = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter and buffer.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show the files, and what each holds.")] = False,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, who saved it, and what is odd about it.

    Reads metadata only: whether copies of a tensor agree, verify --full tells.

    Of a checkpoint that cannot be read as a whole: what file names tell.

    Exit code 1: a load would be refused, or lose something.
    """
    with errors_end_the_command(as_json):
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None)
        inspection = inspect_folder(str(folder), tag, options)
    if as_json:
        print_json({"ok": inspection.ok, **plain(inspection)})
    else:
        print_wide(report(inspection))
        print_wide([parameter_table(inspection)] if params else [])
        print_wide([file_tree(inspection)] if tree else [])
    end_with(found=not inspection.ok)

"""``elastic-ckpt convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Replicated, Tag, TrustPickle, app
from elastic_ckpt.cli.output import errors_end_the_command, print_written
from elastic_ckpt.tools.conversion import convert as convert_to_universal
from elastic_ckpt.tools.opened import config_of, open_folder

_EXAMPLE = "Example: [bold]elastic-ckpt convert checkpoints universal/global_step100[/]"


@app.command("convert", epilog=_EXAMPLE)
def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make. latest_universal beside it names it.")],
    to: Annotated[str, typer.Option("--to", help="universal, or dcp (torch.distributed.checkpoint).")] = "universal",
    tag: Tag = None,
    config: Config = None,
    preset: Preset = None,
    replicated: Replicated = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=64, help="Tensors in memory, each for a file to write (universal).")
    ] = 4,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Write a universal checkpoint that DeepSpeed loads by itself, or one for torch.distributed.checkpoint.

    elastic_ckpt needs no conversion to load a checkpoint; this is for jobs that run without it.
    """
    if to not in ("universal", "dcp"):
        raise typer.BadParameter(f"there is no format {to!r}: universal, dcp", param_hint="--to")
    with errors_end_the_command(as_json):
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None, replicated_params=replicated)
        opened = open_folder(str(folder), tag, options)
        progress = False if as_json else None
        if to == "dcp":
            from elastic_ckpt.tools.conversion.dcp import convert_to_dcp  # noqa: PLC0415  a second of imports

            report = convert_to_dcp(opened, out, progress)
        else:
            report = convert_to_universal(opened, out, threads, progress)
    print_written(report, "elastic_ckpt: checkpoint converted", as_json)

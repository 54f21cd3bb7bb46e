"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with a [bold]latest[/] file, or the folder of one tag.")
]
Tag = Annotated[str | None, typer.Option("--tag", help="Which checkpoint of the folder; default: the latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output, and nothing else there.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help='DeepSpeed config; its "elastic_checkpoint" section counts, as in a load.'),
]
Preset = Annotated[
    str | None, typer.Option("--preset", help='Rules of a code base ("tp_preset"): bloom, gpt-neox, megatron-core ...')
]
TrustPickle = Annotated[bool, typer.Option("--trust-pickle", help="Let checkpoint files run code while they are read.")]

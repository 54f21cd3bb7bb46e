"""``elastic-ckpt fetch``: files of a checkpoint in an object store, for programs that look for them in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from elastic_ckpt.cli.output import Answer, reads_checkpoint, table
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.report import size
from elastic_ckpt.tools.fetch import fetch as fetch_files


@reads_checkpoint("fetch", epilog="Example: elastic-ckpt fetch s3://bucket/run/checkpoint-500 out/checkpoint-500")
def fetch(
    config: ElasticConfig,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a folder in an object store.")],
    folder: Annotated[Path, typer.Argument(help="Where its files go; it is made.")],
    everything: Annotated[bool, typer.Option("--all", help="Tensors too, which a load reads from the store.")] = False,
) -> Answer:
    """Bring a checkpoint's small files from an object store, once on each node: what frameworks look for in a folder.

    Tensors stay where they are: with the URL under "fallback_dirs", resuming from FOLDER reads them from there.
    """
    fetched = fetch_files(url, folder.absolute(), config.storage_options, everything)
    rows = [
        ("brought", f"{len(fetched.names)} files, {size(fetched.nbytes)}"),
        ("left in the store", f"{len(fetched.left)} files of tensors, {size(fetched.left_nbytes)}"),
        ("to read them", escape(f'"elastic_checkpoint": {{"fallback_dirs": ["{url}"]}}') if fetched.left else "-"),
    ]
    return Answer(asdict(fetched), (table("Fetched", rows=rows),))

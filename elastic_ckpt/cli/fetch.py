"""``elastic-ckpt fetch``: files of a checkpoint in an object store, for programs that look for them in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastic_ckpt.cli.output import Answer, reads_checkpoint
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.text import counted
from elastic_ckpt.report import literal, size, table
from elastic_ckpt.tools.fetch import fetch as fetch_files


@reads_checkpoint("fetch", epilog="Example: elastic-ckpt fetch s3://bucket/run/checkpoint-500 out/checkpoint-500")
def fetch(
    config: ElasticConfig,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder in an object store.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Local folder for the files, created if needed.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Fetch tensors too, which a load otherwise reads from the store.")
    ] = False,
) -> Answer:
    """Download a checkpoint's small files from an object store, for frameworks that expect a local folder.

    Run it once on each node. Tensors stay in the store: with the URL in "fallback_dirs", a job that resumes from FOLDER
    reads them from there.
    """
    fetched = fetch_files(url, folder.absolute(), config.storage_options, everything)
    rows = [
        ("brought", f"{counted(len(fetched.names), 'file')}, {size(fetched.nbytes)}"),
        ("left in the store", f"{counted(len(fetched.left), 'file')} with tensors, {size(fetched.left_nbytes)}"),
        ("to read them", literal(f'"elastic_checkpoint": {{"fallback_dirs": ["{url}"]}}') if fetched.left else "-"),
    ]
    return Answer(asdict(fetched), (table("Fetched", rows=rows),))

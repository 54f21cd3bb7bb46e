"""``elastic-ckpt export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Replicated, Tag, TrustPickle, app
from elastic_ckpt.cli.output import errors_end_the_command, print_written
from elastic_ckpt.tools.export import Dtype
from elastic_ckpt.tools.export import export as run_export
from elastic_ckpt.tools.opened import config_of

_EXAMPLE = "Example: [bold]elastic-ckpt export checkpoints my-model --dtype bf16[/]"


@app.command("export", epilog=_EXAMPLE)
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    tag: Tag = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Of all parameters. Default: as saved, fp32 masters; buffers always are."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of one file: 5GB or 500MB.")] = "5GB",
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Regular expression: only tensors whose names contain it.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Regular expression: no tensors whose names contain it.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help='Only this PEFT adapter ("default"), as PEFT loads it.')
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Optimizer states too, as optimizer.safetensors.")
    ] = False,
    with_config: Annotated[
        Path | None, typer.Option("--with-config", help="Folder: copies the model's config and tokenizer from there.")
    ] = None,
    config: Config = None,
    preset: Preset = None,
    replicated: Replicated = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Write consolidated weights, as Hugging Face Transformers loads them, from any checkpoint.

    Parameters are the fp32 master weights; frozen parameters and buffers are included. Of tied parameters one is
    written; the others are named in the file's metadata.
    """
    with errors_end_the_command(as_json):
        report = run_export(
            folder,
            out,
            tag=tag,
            dtype=dtype,
            max_shard_size=max_shard_size,
            include=include or (),
            exclude=exclude or (),
            adapter=adapter,
            optimizer=optimizer,
            with_config=with_config,
            config=config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None, replicated_params=replicated),
            progress=False if as_json else None,
        )
    print_written(report, "elastic_ckpt: weights exported", as_json)

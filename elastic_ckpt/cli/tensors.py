"""``elastic-ckpt convert``, ``export`` and ``diff``, which read whole tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Replicated, Tag, TrustPickle, app
from elastic_ckpt.cli.output import console, end_with, errors_end_the_command, print_json, table
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.report import size
from elastic_ckpt.tools.comparison import Comparison, compare
from elastic_ckpt.tools.conversion import convert as convert_to_universal
from elastic_ckpt.tools.export import Dtype
from elastic_ckpt.tools.export import export as run_export
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.output_folder import WriteReport

_SHOWN = 50
_Checkpoint = Annotated[
    Path, typer.Argument(help="Folder with a [bold]latest[/] file, or the folder of one tag.", show_default=False)
]


@app.command("convert", epilog="Example: [bold]elastic-ckpt convert checkpoints universal/global_step100[/]")
def convert(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder to create; of a universal checkpoint, latest_universal beside it names it."
        ),
    ],
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
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle, replicated_params=replicated)
        opened = open_folder(str(folder), tag, options)
        progress = False if as_json else None
        if to == "dcp":
            from elastic_ckpt.tools.conversion.dcp import convert_to_dcp  # noqa: PLC0415  a second of imports

            report = convert_to_dcp(opened, out, progress)
        else:
            report = convert_to_universal(opened, out, threads, progress)
    _print_written(report, "elastic_ckpt: checkpoint converted", as_json)


@app.command("export", epilog="Example: [bold]elastic-ckpt export checkpoints my-model --dtype bf16[/]")
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
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
            config=config_of(config, tp_preset=preset, trust_pickle=trust_pickle, replicated_params=replicated),
            progress=False if as_json else None,
        )
    _print_written(report, "elastic_ckpt: weights exported", as_json)


def _print_written(report: WriteReport, title: str, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    facts = table(title)
    facts.add_row("folder", escape(report.folder))
    facts.add_row("written", f"{report.tensors} tensors, {report.files} files, {size(report.nbytes)}")
    facts.add_row("seconds", f"{report.seconds:.1f}")
    for note in report.notes:
        facts.add_row("note", escape(note))
    console.print(facts)


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

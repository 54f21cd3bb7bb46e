"""``elastic-ckpt convert``, ``export``, ``diff`` and ``explain``, which read whole tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import RenderableType
from rich.markup import escape

from elastic_ckpt.cli.output import EXIT_FOUND, Answer, Folders, Replicated, Tag, reads_checkpoint, table
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.resume_sheet import Deviation
from elastic_ckpt.errors import shortened
from elastic_ckpt.report import size
from elastic_ckpt.tools.comparison import compare, open_both
from elastic_ckpt.tools.conversion import convert as convert_to_universal
from elastic_ckpt.tools.explain import changes
from elastic_ckpt.tools.explain import explain as explain_runs
from elastic_ckpt.tools.export import Dtype
from elastic_ckpt.tools.export import export as run_export
from elastic_ckpt.tools.opened import open_folder, seen_together
from elastic_ckpt.tools.output_folder import WriteReport

_SHOWN = 50
_Format = Literal["universal", "dcp"]
_Checkpoint = Annotated[
    str, typer.Argument(help="Folder with a [bold]latest[/] file, or the folder of one tag.", show_default=False)
]


@reads_checkpoint("convert", epilog="Example: [bold]elastic-ckpt convert checkpoints universal/global_step100[/]")
def convert(
    config: ElasticConfig,
    folders: Folders,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder to create; of a universal checkpoint, latest_universal beside it names it."
        ),
    ],
    to: Annotated[_Format, typer.Option("--to", help="dcp: torch.distributed.checkpoint.")] = "universal",
    tag: Tag = None,
    replicated: Replicated = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=64, help="Tensors in memory, each for a file to write (universal).")
    ] = 4,
) -> Answer:
    """Write a universal checkpoint that DeepSpeed loads by itself, or one for torch.distributed.checkpoint.

    elastic_ckpt needs no conversion to load a checkpoint; this is for jobs that run without it.
    """
    opened = open_folder(folders[0], tag, config)
    if to == "dcp":
        from elastic_ckpt.tools.conversion.dcp import convert_to_dcp  # noqa: PLC0415  a second of imports

        report = convert_to_dcp(opened, out, None)
    else:
        report = convert_to_universal(opened, out, threads, None)
    return _written(report, "elastic_ckpt: checkpoint converted")


@reads_checkpoint("export", epilog="Example: [bold]elastic-ckpt export checkpoints my-model --dtype bf16[/]")
def export(
    config: ElasticConfig,
    folders: Folders,
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
    replicated: Replicated = None,
) -> Answer:
    """Write consolidated weights, as Hugging Face Transformers loads them, from any checkpoint.

    Parameters are the fp32 master weights; frozen parameters and buffers are included. Of tied parameters one is
    written; the others are named in the file's metadata.
    """
    report = run_export(
        folders[0],
        out,
        tag=tag,
        dtype=dtype,
        max_shard_size=max_shard_size,
        include=include or (),
        exclude=exclude or (),
        adapter=adapter,
        optimizer=optimizer,
        config=config,
    )
    return _written(report, "elastic_ckpt: weights exported")


def _written(report: WriteReport, title: str) -> Answer:
    what = f"{report.tensors} tensors, {report.files} files, {size(report.nbytes)}"
    facts = [("folder", escape(report.folder)), ("written", what), ("seconds", f"{report.seconds:.1f}")]
    return Answer(report, [table(title, rows=[*facts, *(("note", escape(note)) for note in report.notes)])])


@reads_checkpoint(
    "diff",
    epilog="Example: [bold]elastic-ckpt diff checkpoints/step100 universal/step100[/]",
    policy="first",  # copies that differ are no reason to refuse
)
def diff(config: ElasticConfig, a: _Checkpoint, b: _Checkpoint) -> Answer:
    """Compare two checkpoints by logical tensor, whatever their topologies, ZeRO stages and formats.

    Masters, optimizer states, buffers, frozen weights, steps, hyperparameters, counters and the lr scheduler. Exit
    code 1 where anything differs or is missing.
    """
    with seen_together(a, config), seen_together(b, config):
        first, second, notes = open_both(a, b, config)
        outcome = compare(first, second, config.reading.threads, None)
    outcome = replace(outcome, notes=(*outcome.notes, *notes))
    found, read = outcome.differences, f"({size(outcome.nbytes)} read)"
    parts: list[RenderableType] = [f"equal: {outcome.equal} tensors and other values {read}"]
    if found:
        rows = [[*map(escape, (each.name, each.key, each.what, each.detail))] for each in found[:_SHOWN]]
        title = f"{len(found)} differences, {outcome.equal} equal {read}"
        parts = [table(title, "name", "of it", "", "values in A and B", rows=rows)]
    if len(found) > _SHOWN:
        parts.append(f"and {len(found) - _SHOWN} more: --json has all")
    return Answer(outcome, [*parts, *(f"note: {note}" for note in outcome.notes)], exit_code=EXIT_FOUND if found else 0)


@reads_checkpoint("explain", epilog="Example: [bold]elastic-ckpt explain run resumed-run[/]", policy="first")
def explain(
    config: ElasticConfig,
    a: _Checkpoint,
    b: Annotated[str | None, typer.Argument(help="Of another run. Without it: what A changed on its way.")] = None,
) -> Answer:
    """Name the component in which a run deviates from another, or that it has changed on its way.

    Weights, optimizer, lr, hyperparameters, batch, data order, RNG, precision, code versions: as tensors and resume
    sheets tell. Of two runs, at the first step in common where anything deviates. Exit code 1 if anything does.
    """
    with seen_together(a, config), seen_together(b or a, config):
        if b is None:
            steps, changed = changes(a, config)
            rows = [[f"{each.first} -> {each.second}", *_words(each.deviation)] for each in changed]
            found = [table("What has changed", "steps", "component", "how", rows=rows)] if rows else ["nothing changed"]
            sheets = f"steps with a resume sheet: {shortened(map(str, steps)) or 'none'}"
            return Answer({"steps": steps, "changes": changed}, [sheets, *found], exit_code=EXIT_FOUND if rows else 0)
        outcome = explain_runs(a, b, config)
    verdict = f"nothing deviates at the steps {shortened(map(str, outcome.steps))}"
    parts: list[RenderableType] = [f"note: {note}" for note in outcome.notes]
    if outcome.step is not None:
        verdict = f"at step {outcome.step}, the first of {len(outcome.steps)} in common where they deviate: "
        verdict += ", ".join(outcome.named)
        parts.insert(0, table("A -> B", "component", "how", rows=map(_words, outcome.deviations)))
    document = {"named": outcome.named, **vars(outcome)}
    return Answer(document, [verdict, *parts], exit_code=0 if outcome.step is None else EXIT_FOUND)


def _words(deviation: Deviation) -> list[str]:
    return [escape(deviation.component), escape(deviation.detail)]

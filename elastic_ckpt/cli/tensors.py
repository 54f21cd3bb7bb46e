"""``elastic-ckpt convert``, ``export``, ``diff`` and ``explain``, which read whole tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer
from rich.console import RenderableType

from elastic_ckpt.cli.output import EXIT_FOUND, Answer, Folders, Replicated, Tag, reads_checkpoint
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.resume_sheet import Deviation
from elastic_ckpt.core.text import counted, printable
from elastic_ckpt.errors import shortened
from elastic_ckpt.report import literal, size, table, title
from elastic_ckpt.storage import is_url
from elastic_ckpt.tools.comparison import DIFFERS, MISSING, compare, open_both
from elastic_ckpt.tools.conversion import convert as convert_to_universal
from elastic_ckpt.tools.explain import changes
from elastic_ckpt.tools.explain import explain as explain_runs
from elastic_ckpt.tools.export import Dtype
from elastic_ckpt.tools.export import export as run_export
from elastic_ckpt.tools.opened import open_folder, seen_together
from elastic_ckpt.tools.output_folder import WriteReport

_SHOWN = 50
_Format = Literal["universal", "dcp"]


def _checkpoint(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar,
        help="The folder passed to [bold]load_checkpoint[/], or the folder of one tag.",
        show_default=False,
    )


@reads_checkpoint("convert", epilog="Example: [bold]elastic-ckpt convert checkpoints universal/global_step100[/]")
def convert(
    config: ElasticConfig,
    folders: Folders,
    out: Annotated[
        str,  # which tells universal from ./universal
        typer.Argument(
            metavar="OUT",
            help="Folder to create. If OUT is only [bold]universal[/] or [bold]dcp[/], it is TAG_universal or TAG_dcp "
            "next to the checkpoint. With a slash at the end, a universal checkpoint is written to OUT/TAG_universal. "
            "The file latest_universal next to it names it, unless that folder has files that are not checkpoints.",
        ),
    ],
    to: Annotated[_Format, typer.Option("--to", help="Format. dcp is torch.distributed.checkpoint.")] = "universal",
    tag: Tag = None,
    replicated: Replicated = None,
    threads: Annotated[
        int,
        typer.Option("--threads", min=1, max=64, help="Number of tensors in memory, and of files written, at a time."),
    ] = 4,
) -> Answer:
    """Convert a checkpoint to DeepSpeed's universal format, or to torch.distributed.checkpoint.

    elastic_ckpt loads any checkpoint without conversion; this is for jobs that run without elastic_ckpt.
    """
    opened = open_folder(folders[0], tag, config)
    if out in get_args(_Format):
        if to not in ("universal", out) or is_url(opened.found.folder):
            raise typer.BadParameter(f"'{out}' is the format, not a folder: write ./{out}", param_hint="OUT")
        to = cast(_Format, out)
        out = f"{opened.found.folder}_{out}"
    elif to == "universal" and out.endswith(os.sep):  # the folder passed to load_checkpoint
        out += f"{os.path.basename(opened.found.folder)}_universal"
    if to == "dcp":
        from elastic_ckpt.tools.conversion.dcp import convert_to_dcp  # noqa: PLC0415  a second of imports

        report = convert_to_dcp(opened, Path(out), None)
    else:
        report = convert_to_universal(opened, Path(out), threads, None)
    return _written(report, "elastic_ckpt: checkpoint converted")


@reads_checkpoint("export", epilog="Example: [bold]elastic-ckpt export checkpoints my-model --dtype bf16[/]")
def export(
    config: ElasticConfig,
    folders: Folders,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    tag: Tag = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Dtype of parameters, not of buffers. Default: as saved (masters: fp32)."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Largest file: 5GB or 500MB.")] = "5GB",
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Regular expression: export only tensors whose names match.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Regular expression: leave out tensors whose names match.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help='Export only this PEFT adapter ("default"), for PEFT to load.')
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Export optimizer states too, to optimizer.safetensors.")
    ] = False,
    replicated: Replicated = None,
) -> Answer:
    """Export consolidated weights in the layout of Hugging Face Transformers.

    Weights are the fp32 masters; frozen parameters and buffers are included. Tied parameters are written once, and
    their other names are in the file's metadata.
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
    what = f"{counted(report.tensors, 'tensor')}, {counted(report.files, 'file')}, {size(report.nbytes)}"
    facts = [("folder", literal(report.folder)), ("written", what), ("seconds", f"{report.seconds:.1f}")]
    if report.to_load is not None:
        facts.append(("to load it", literal(report.to_load)))
    return Answer(report, [table(title, rows=[*facts, *(("note", literal(note)) for note in report.notes)])])


@reads_checkpoint(
    "diff",
    epilog="Example: [bold]elastic-ckpt diff checkpoints/step100 universal/step100[/]",
    policy="first",  # copies that differ are no reason to refuse
)
def diff(config: ElasticConfig, a: Annotated[str, _checkpoint("A")], b: Annotated[str, _checkpoint("B")]) -> Answer:
    """Compare two checkpoints tensor by tensor, across topologies, ZeRO stages and formats.

    It compares masters, optimizer states, buffers, frozen weights, steps, hyperparameters, counters and the lr
    scheduler. A summary by kind comes first.

    Where optimizer-states files are missing on one side, as when they were deleted to save space, the weights, buffers
    and counters are compared, and the optimizer states count as missing.

    Exit code 1: something differs or is missing.
    """
    with seen_together(a, config), seen_together(b, config):
        first, second, without = open_both(a, b, config)
        outcome = compare(first, second, config.reading.threads, None, without)
    found = outcome.differences
    read = f"({size(outcome.nbytes)} read)"
    parts: list[RenderableType] = [f"equal: {counted(outcome.equal, 'tensor')} and other values {read}"]
    if found:
        kinds = [
            (literal(title(kind)), *(f"{value:.3g}" if isinstance(value, float) else value for value in each.values()))
            for kind, each in outcome.kinds.items()
        ]
        head = f"{counted(len(found), 'difference')}, {outcome.equal:,} equal {read}"
        parts = [table(head, "kind", ">equal", f">{DIFFERS}", f">{MISSING}", ">largest difference", rows=kinds)]
        rows = [[*map(literal, (each.name, each.key, each.what, each.detail))] for each in found[:_SHOWN]]
        parts += [table("Differences", "name", "of it", "", "values in A and B", rows=rows)]
    if len(found) > _SHOWN:
        parts.append(f"and {len(found) - _SHOWN} more: --json has all")
    parts += [f"note: {printable(note)}" for note in outcome.notes]
    return Answer(outcome, parts, exit_code=EXIT_FOUND if found else 0)


@reads_checkpoint("explain", epilog="Example: [bold]elastic-ckpt explain run resumed-run[/]", policy="first")
def explain(
    config: ElasticConfig,
    a: Annotated[str, _checkpoint("A")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The other run. Without it, the command shows what changed during A."),
    ] = None,
) -> Answer:
    """Name the component in which two runs deviate, or what has changed during one run.

    Components are weights, optimizer, lr, hyperparameters, batch, data order, RNG, precision and code versions. The
    command compares tensors and resume sheets. For two runs, it shows the first common step at which they deviate.

    Exit code 1: something deviates or has changed.
    """
    with seen_together(a, config), seen_together(b or a, config):
        if b is None:
            steps, changed = changes(a, config)
            rows = [[f"{each.first} -> {each.second}", *_words(each.deviation)] for each in changed]
            nothing = "nothing changed" if len(steps) > 1 else "nothing to compare: two such steps are needed"
            found = [table("What has changed", "steps", "component", "how", rows=rows)] if rows else [nothing]
            sheets = f"steps with a resume sheet: {shortened(map(str, steps)) or 'none'}"
            return Answer({"steps": steps, "changes": changed}, [sheets, *found], exit_code=EXIT_FOUND if rows else 0)
        outcome = explain_runs(a, b, config)
    every = "step" if len(outcome.steps) == 1 else "steps"
    verdict = f"nothing deviates at {every} {shortened(map(str, outcome.steps))}"
    parts: list[RenderableType] = [f"note: {printable(note)}" for note in outcome.notes]
    if outcome.step is not None:
        verdict = f"at step {outcome.step}, the first of {counted(len(outcome.steps), 'common step')} to deviate: "
        verdict += ", ".join(outcome.named)
        parts.insert(0, table("A -> B", "component", "how", rows=map(_words, outcome.deviations)))
    document = {"named": outcome.named, **vars(outcome)}
    return Answer(document, [verdict, *parts], exit_code=0 if outcome.step is None else EXIT_FOUND)


def _words(deviation: Deviation) -> list[str]:
    return [literal(deviation.component), literal(deviation.detail)]

"""``elastic-ckpt inspect``, and its tables, which fit in 100 columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import (
    end_with,
    errors_end_the_command,
    plain,
    print_json,
    print_wide,
    table,
)
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.errors import shortened
from elastic_ckpt.report import size
from elastic_ckpt.tools.files import FileEntry
from elastic_ckpt.tools.findings import ERROR, WARNING
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.inspection.facts import (
    TRAINED,
    Inspection,
    ParameterEntry,
    SavedRun,
    Shape,
    StateSummary,
)
from elastic_ckpt.tools.opened import config_of

_EXAMPLE = "Example: [bold]elastic-ckpt inspect checkpoints --params[/]"
_NAMES_SHOWN = 4
_STYLES = {ERROR: "bold red", WARNING: "yellow"}
_ABOUT = "Metadata only: copies of a tensor were not compared. elastic-ckpt verify --full does that."
_KINDS = {"layer": "of layers", "parameter": "of parameters", "optimizer": "of the optimizer", "expert": "of experts"}
#: Hyperparameters that are shown first, in this order.
_FIRST = ("name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum")


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


def clean(value: Any) -> str:
    """Text from a checkpoint on one line, with markup escaped."""
    return escape(str(value).replace("\n", "\\n"))


def report(inspection: Inspection) -> Iterator[RenderableType]:
    """The report without the long lists."""
    yield _overview(inspection)
    if inspection.readable:
        yield _contents(inspection)
    if inspection.groups:
        yield _groups(inspection)
    if inspection.rules.uses or inspection.rules.patterns or inspection.rules.undecided:
        yield _rules(inspection)
    if inspection.findings:
        yield _findings(inspection)
    yield Text(_ABOUT, style="dim")


def _overview(inspection: Inspection) -> Table:
    run, files = inspection.run, inspection.files
    batch = f"{run.micro_batch or '?'} a rank x {run.accumulation_steps or '?'} micro-batches x DP {run.dp or '?'}"
    scheduler = "none" if inspection.readable else None
    if run.lr_scheduler is not None:
        scheduler = clean(_pairs(run.lr_scheduler)) or "yes"
    counts, nbytes = Counter(entry.kind for entry in files), Counter[str]()
    for entry in files:
        nbytes[entry.kind] += entry.nbytes
    kinds = [f"{count} {_KINDS.get(kind, kind)} ({size(nbytes[kind])})" for kind, count in counts.items()]
    overflowed = ", last step overflowed" if run.overflow else ""
    rows = {
        "folder": clean(inspection.folder),
        "format": f"{inspection.format}, tag {clean(inspection.tag)}",
        "saved": ", ".join(_saved(run)) or "not known",
        "precision": run.precision + _told_by(", ".join(run.precision_from)),
        "optimizer": clean(run.optimizer + _told_by(run.optimizer_from)),
        "batch": None if run.global_batch is None else f"{run.global_batch} samples a step = {batch}",
        "lr scheduler": scheduler,
        "loss scale": None if run.loss_scale is None else clean(_pairs(run.loss_scale)) + overflowed,
        "client state": clean(shortened(run.client_state, 12)) or None,
        "experts": ", ".join(f"{count} layers of {number}" for number, count in Counter(run.experts).items()) or None,
        "files": f"{len(files)}, {size(nbytes.total())}: {', '.join(kinds)}",
        "missing": f"[bold red]{clean(shortened(inspection.missing, 8))}[/]" if inspection.missing else None,
    }
    shown = table("elastic_ckpt: checkpoint")
    for title, row in rows.items():
        if row is not None:
            shown.add_row(title, row)
    return shown


def _saved(run: SavedRun) -> Iterator[str]:
    if run.step is not None:
        skipped = f", {run.skipped_steps} skipped" if run.skipped_steps else ""
        yield f"step {run.step}" + (f" ({run.samples} samples{skipped})" if run.samples is not None else skipped)
    if run.zero_stage is not None:
        yield f"ZeRO-{run.zero_stage}"
    degrees = (("DP", run.dp), ("SP", run.sp), ("TP", run.tp), ("PP", run.pp), ("EP", run.ep))
    yield from (f"{name}={degree}" for name, degree in degrees if degree)
    if run.ds_version:
        yield f"DeepSpeed {clean(run.ds_version)}"


def _told_by(source: str) -> str:
    return f" (according to: {source})" if source else ""


def _contents(inspection: Inspection) -> Table:
    shown = table("What it holds", "what", "kind", "dtype", ">tensors", ">elements", ">bytes")
    roles = {
        "fp32 masters": inspection.masters,
        "weights": inspection.weights,
        "frozen parameters": inspection.frozen,
        "buffers": inspection.buffers,
    }
    for title, total in roles.items():
        if total.tensors:
            numbers = (str(total.tensors), f"{total.numel:,}", size(total.nbytes))
            shown.add_row(title, "", ", ".join(total.dtypes), *numbers)
    for state in inspection.states:
        sizes = (f"{state.numel:,}", size(state.nbytes)) if state.numel else ("", "")
        shown.add_row(clean(state.key), _kind(state), state.dtype, str(state.parameters or ""), *sizes)
    if inspection.aliases:
        ties = [f"{name} = {holder}" for name, holder in inspection.aliases.items()]
        shown.add_row("tied names", clean(shortened(ties, _NAMES_SHOWN)), "", str(len(ties)), "", "")
    return shown


def _kind(state: StateSummary) -> str:
    kind = state.kind
    kind += f", {state.rows} rows" if state.rows > 1 else ""
    kind += f" of {state.block_numel}" if state.block_numel else ""
    kind += f" = {' to '.join(f'{value:g}' for value in state.values)}" if state.values else ""
    return kind + (f": {clean(state.why)}" if state.why else "")


def _groups(inspection: Inspection) -> Table:
    shown = table("Param groups", ">group", ">members", ">elements", "hyperparameters")
    for group in inspection.groups:
        saved = group.hyperparameters
        keys = [key for key in dict.fromkeys((*_FIRST, *saved)) if key in saved]
        ordered = {key: saved[key] for key in keys if saved[key] is not None and saved[key] is not False}
        numel = "" if group.numel is None else f"{group.numel:,}"
        shown.add_row(str(group.number), str(group.members), numel, clean(_pairs(ordered)) or "none saved")
    return shown


def _rules(inspection: Inspection) -> Table:
    rules = inspection.rules
    shown = table("Tensor-parallel rules", "rule", "by", ">parameters", "such as")
    uses = [(clean(use["rule"]), clean(use["origin"]), use["parameters"]) for use in rules.uses]
    uses += [("[yellow]not known[/]", "nobody", rules.undecided)] if rules.undecided else []
    for rule, origin, names in uses:
        shown.add_row(rule, origin, str(len(names)), clean(shortened(names, 2)))
    declared = [f"{count} patterns of {kind}" for kind, count in rules.patterns.items()]
    declared += [f"{rules.recorded} recorded maps"] if rules.recorded else []
    declared += [f"{rules.vocabulary_rows} rows of vocabulary"] if rules.vocabulary_rows else []
    if declared:
        shown.caption = f"The checkpoint declares {', '.join(declared)}."
    return shown


def _findings(inspection: Inspection) -> Table:
    shown = table("Findings")
    for finding in inspection.findings:
        lines = [clean(finding.text)]
        for name in ("parameter", "file", "expected", "found", "remedy"):
            value = getattr(finding, name)
            if value is not None and str(value) not in finding.text:
                lines.append(f"[dim]{name}:[/] {clean(value)}")
        style = _STYLES.get(finding.level)
        shown.add_row(f"[{style}]{finding.level}[/]" if style else finding.level, "\n".join(lines))
    return shown


def parameter_table(inspection: Inspection) -> Table:
    """Every parameter and buffer."""
    states = {entry.states for entry in inspection.parameters if entry.role == TRAINED}
    differ = len(states) > 1
    columns = ("name", "shape", "dtype", ">group", *(["states"] if differ else []), ">elements")
    shown = table(f"{len(inspection.parameters)} parameters and buffers", *columns)
    for column in shown.columns:
        column.ratio = {"name": 3, "shape": 2, "states": 2}.get(str(column.header))
    if len(states) == 1:
        shown.caption = f"Each trained one has {clean(', '.join(*states)) or 'no optimizer states'}."
    for entry in inspection.parameters:
        about = [entry.role] if entry.role != TRAINED else []
        about += [f"tied: {', '.join(entry.tied)}"] if entry.tied else []
        about += [f"{entry.copies} copies"] if entry.copies > 1 else []
        name = clean(entry.name) + (f"\n[dim]{clean('; '.join(about))}[/]" if about else "")
        group = "" if entry.group is None else str(entry.group)
        own = [clean(", ".join(entry.states))] if differ else []
        shown.add_row(name, _shapes(entry), entry.dtype, group, *own, f"{entry.numel:,}")
    return shown


def _shapes(entry: ParameterEntry) -> str:
    whole = "?" if entry.shape is None else _shape(entry.shape)
    if len(entry.shards) == 1:
        return whole
    counted = (f"{count} x {_shape(shard)}" for shard, count in Counter(entry.shards).items())
    return f"{whole}\n[dim]{', '.join(counted)}[/]" + (f"\n[dim]{clean(entry.rule)}[/]" if entry.rule else "")


def _shape(shape: Shape) -> str:
    return escape(str(list(shape)))


def file_tree(inspection: Inspection) -> Tree:
    """The files of the tag's folder and their contents."""
    total = sum(entry.nbytes for entry in inspection.files)
    tree = Tree(f"[bold]{clean(inspection.folder)}[/] {size(total)}")
    folders: dict[str, list[FileEntry]] = defaultdict(list)
    for entry in inspection.files:
        folder = entry.name.rpartition("/")[0]
        if folder:
            folders[folder].append(entry)
        else:
            tree.add(f"{clean(entry.name)} [dim]{size(entry.nbytes)}; {clean('; '.join(_about(entry)))}[/]")
    for folder, entries in folders.items():
        inside = [entry.name.rpartition("/")[2] for entry in entries]
        nbytes = size(sum(entry.nbytes for entry in entries))
        tree.add(f"{clean(folder)}/ [dim]{nbytes}; {clean(shortened(inside, 8))}[/]")
    for name in inspection.missing:
        tree.add(f"[bold red]{clean(name)} is missing[/]")
    return tree


def _about(entry: FileEntry) -> Iterator[str]:
    yield entry.kind if entry.layer is None else f"layer {entry.layer}"
    ranks = {"DP": entry.dp, "TP": entry.tp, "PP": entry.pp}
    known = [f"{name} {rank}" for name, rank in ranks.items() if rank is not None]
    if known:
        yield ", ".join(known)
    elif entry.mp is not None:
        yield f"model-parallel rank {entry.mp}"
    titles = {MASTER: "masters", BUFFER: "buffers", FROZEN: "frozen"}
    if entry.tensors:
        yield ", ".join(f"{count} {titles.get(key, key)}" for key, count in entry.tensors.items())


def _pairs(values: Mapping[str, Any]) -> str:
    shown = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    return ", ".join(f"{key}={text if len(text) <= 60 else text[:57] + '...'}" for key, text in shown.items())

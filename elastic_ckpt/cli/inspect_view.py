"""An inspection for the eye: tables that fit in 100 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from tqdm import tqdm

from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.tools.findings import ERROR, WARNING, Finding
from elastic_ckpt.tools.inspection.facts import (
    TRAINED,
    FileEntry,
    Inspection,
    ParameterEntry,
    SavedRun,
    Shape,
    StateSummary,
    Totals,
)
from elastic_ckpt.tools.inspection.files import sizes_by_kind

_NAMES_SHOWN = 4
_STYLES = {ERROR: "bold red", WARNING: "yellow"}
_ABOUT = "Metadata only: copies of a tensor were not compared. elastic-ckpt verify --full does that."
_KINDS = {"layer": "of layers", "parameter": "of parameters", "optimizer": "of the optimizer", "expert": "of experts"}
#: Hyperparameters that say more than the rest, in this order.
_FIRST = ("name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum")


def clean(value: Any) -> str:
    """Text of a checkpoint, for a terminal: neither markup nor control characters take effect."""
    return escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)))


def size(nbytes: int) -> str:
    """Bytes, for people."""
    return tqdm.format_sizeof(nbytes, "B")


def report(inspection: Inspection) -> list[RenderableType]:
    """The whole report but the long lists."""
    parts: list[RenderableType] = [_overview(inspection)]
    if inspection.readable:
        parts.append(_contents(inspection))
    if inspection.groups:
        parts.append(_groups(inspection))
    if inspection.rules.uses or inspection.rules.patterns or inspection.rules.undecided:
        parts.append(_rules(inspection))
    if inspection.findings:
        parts.append(_findings(inspection.findings))
    parts.append(Text(_ABOUT, style="dim"))
    return parts


def _facts_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _overview(inspection: Inspection) -> Table:
    table = _facts_table("elastic_ckpt: checkpoint")
    run = inspection.run
    table.add_row("folder", clean(inspection.folder))
    table.add_row("format", f"{inspection.format}, tag {clean(inspection.tag)}")
    table.add_row("saved", ", ".join(_saved(run)) or "not known")
    table.add_row("precision", _precision(run))
    table.add_row(
        "optimizer", clean(run.optimizer + (f" (told by: {run.optimizer_from})" if run.optimizer_from else ""))
    )
    if run.global_batch is not None:
        parts = f"{run.micro_batch or '?'} a rank x {run.accumulation_steps or '?'} micro-batches x DP {run.dp or '?'}"
        table.add_row("batch", f"{run.global_batch} samples a step = {parts}")
    if run.lr_scheduler is not None:
        table.add_row("lr scheduler", clean(_pairs(run.lr_scheduler)) or "yes")
    elif inspection.readable:
        table.add_row("lr scheduler", "none")
    if run.loss_scale is not None:
        table.add_row("loss scale", clean(_pairs(run.loss_scale)) + (", last step overflowed" if run.overflow else ""))
    if run.client_state:
        table.add_row("client state", clean(_names(run.client_state, 12)))
    kinds = [
        f"{count} {_KINDS.get(kind, kind)} ({size(nbytes)})"
        for kind, (count, nbytes) in sizes_by_kind(inspection.files).items()
    ]
    total = sum(entry.nbytes for entry in inspection.files)
    table.add_row("files", f"{len(inspection.files)}, {size(total)}: {', '.join(kinds)}")
    if inspection.missing:
        table.add_row("missing", f"[bold red]{clean(_names(inspection.missing, 8))}[/]")
    return table


def _saved(run: SavedRun) -> Iterator[str]:
    if run.step is not None:
        skipped = f", {run.skipped_steps} skipped" if run.skipped_steps else ""
        yield f"step {run.step}" + (f" ({run.samples} samples{skipped})" if run.samples is not None else skipped)
    if run.zero_stage is not None:
        yield f"ZeRO-{run.zero_stage}"
    degrees = (("DP", run.dp), ("SP", run.sp), ("TP", run.tp), ("PP", run.pp))
    yield from (f"{name}={degree}" for name, degree in degrees if degree)
    if run.ds_version:
        yield f"DeepSpeed {clean(run.ds_version)}"


def _precision(run: SavedRun) -> str:
    return run.precision + (f" (told by: {', '.join(run.precision_from)})" if run.precision_from else "")


def _contents(inspection: Inspection) -> Table:
    table = Table(title="What it holds", title_justify="left")
    for heading in ("what", "kind", "dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("tensors", "elements", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    roles = (
        ("fp32 masters", inspection.masters),
        ("weights", inspection.weights),
        ("frozen parameters", inspection.frozen),
        ("buffers", inspection.buffers),
    )
    for title, total in roles:
        if total.tensors:
            table.add_row(title, "", *_totals(total))
    for state in inspection.states:
        table.add_row(clean(state.key), *_state(state))
    if inspection.aliases:
        ties = [f"{name} = {holder}" for name, holder in inspection.aliases.items()]
        table.add_row("tied names", clean(_names(ties, _NAMES_SHOWN)), "", str(len(ties)), "", "")
    return table


def _totals(total: Totals) -> tuple[str, str, str, str]:
    return ", ".join(total.dtypes), str(total.tensors), f"{total.numel:,}", size(total.nbytes)


def _state(state: StateSummary) -> tuple[str, ...]:
    kind = state.kind
    kind += f", {state.rows} rows" if state.rows > 1 else ""
    kind += f" of {state.block_numel}" if state.block_numel else ""
    kind += f" = {' to '.join(f'{value:g}' for value in state.values)}" if state.values else ""
    kind += f": {clean(state.why)}" if state.why else ""
    numbers = (f"{state.numel:,}", size(state.nbytes)) if state.numel else ("", "")
    return kind, state.dtype, str(state.parameters) if state.parameters else "", *numbers


def _groups(inspection: Inspection) -> Table:
    table = Table(title="Param groups", title_justify="left")
    table.add_column("group", justify="right")
    table.add_column("members", justify="right")
    table.add_column("elements", justify="right")
    table.add_column("hyperparameters", overflow="fold")
    for group in inspection.groups:
        values = group.hyperparameters
        telling = [key for key, value in values.items() if value is not None and value is not False]
        ordered = {key: values[key] for key in dict.fromkeys((*_FIRST, *telling)) if key in telling}
        numel = "" if group.numel is None else f"{group.numel:,}"
        table.add_row(str(group.number), str(group.members), numel, clean(_pairs(ordered)) or "none saved")
    return table


def _rules(inspection: Inspection) -> Table:
    rules = inspection.rules
    table = Table(title="Tensor-parallel rules", title_justify="left")
    for heading in ("rule", "by"):
        table.add_column(heading, overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("such as", overflow="fold")
    for use in rules.uses:
        shown = clean(_names(use.parameters, 2))
        table.add_row(clean(use.rule), clean(use.origin), str(len(use.parameters)), shown)
    if rules.undecided:
        shown = clean(_names(rules.undecided, 2))
        table.add_row("[yellow]not known[/]", "nobody", str(len(rules.undecided)), shown)
    said = [f"{count} patterns of {kind}" for kind, count in rules.patterns.items()]
    said += [f"{rules.recorded} recorded maps"] if rules.recorded else []
    said += [f"{rules.vocabulary_rows} rows of vocabulary"] if rules.vocabulary_rows else []
    if said:
        table.caption = f"The checkpoint declares {', '.join(said)}."
        table.caption_justify = "left"
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = _facts_table("Findings")
    for finding in findings:
        lines = [clean(finding.text)]
        for name in ("parameter", "file", "expected", "found", "remedy"):
            value = getattr(finding, name)
            if value is not None and str(value) not in finding.text:
                lines.append(f"[dim]{name}:[/] {clean(value)}")
        style = _STYLES.get(finding.level)
        table.add_row(f"[{style}]{finding.level}[/]" if style else finding.level, "\n".join(lines))
    return table


def parameter_table(inspection: Inspection) -> Table:
    """Every parameter and buffer."""
    table = Table(title=f"{len(inspection.parameters)} parameters and buffers", title_justify="left")
    table.add_column("name", overflow="fold", ratio=3)
    table.add_column("shape", overflow="fold", ratio=2)
    table.add_column("dtype")
    table.add_column("group", justify="right")
    states = {entry.states for entry in inspection.parameters if entry.role == TRAINED}
    if len(states) > 1:
        table.add_column("states", overflow="fold", ratio=2)
    elif states:
        table.caption = f"Each trained one has {clean(', '.join(next(iter(states))) or 'no optimizer states')}."
        table.caption_justify = "left"
    table.add_column("elements", justify="right", no_wrap=True)
    for entry in inspection.parameters:
        about = [entry.role] if entry.role != TRAINED else []
        about += [f"tied: {', '.join(entry.tied)}"] if entry.tied else []
        about += [f"{entry.copies} copies"] if entry.copies > 1 else []
        name = clean(entry.name) + (f"\n[dim]{clean('; '.join(about))}[/]" if about else "")
        group = "" if entry.group is None else str(entry.group)
        differing = [clean(", ".join(entry.states))] if len(states) > 1 else []
        table.add_row(name, _shapes(entry), entry.dtype, group, *differing, f"{entry.numel:,}")
    return table


def _shapes(entry: ParameterEntry) -> str:
    """The whole, and below it the shards."""
    whole = "?" if entry.shape is None else _shape(entry.shape)
    if len(entry.shards) == 1:
        return whole
    kinds = dict.fromkeys(entry.shards)
    counted = (f"{entry.shards.count(shard)} x {_shape(shard)}" for shard in kinds)
    return f"{whole}\n[dim]{', '.join(counted)}[/]" + (f"\n[dim]{clean(entry.rule)}[/]" if entry.rule else "")


def _shape(shape: Shape) -> str:
    return escape(str(list(shape)))


def file_tree(inspection: Inspection) -> Tree:
    """The files of the tag's folder, and what each holds."""
    total = sum(entry.nbytes for entry in inspection.files)
    tree = Tree(f"[bold]{clean(inspection.folder)}[/] {size(total)}")
    folders: dict[str, list[FileEntry]] = {}
    for entry in inspection.files:
        folder, slash, _ = entry.name.rpartition("/")
        if slash:
            folders.setdefault(folder, []).append(entry)
        else:
            tree.add(f"{clean(entry.name)} [dim]{size(entry.nbytes)}; {clean('; '.join(_about(entry)))}[/]")
    for folder, entries in folders.items():
        inside = [entry.name.rpartition("/")[2] for entry in entries]
        nbytes = size(sum(entry.nbytes for entry in entries))
        tree.add(f"{clean(folder)}/ [dim]{nbytes}; {clean(_names(inside, 8))}[/]")
    for name in inspection.missing:
        tree.add(f"[bold red]{clean(name)} is missing[/]")
    return tree


def _about(entry: FileEntry) -> Iterator[str]:
    yield entry.kind if entry.layer is None else f"layer {entry.layer}"
    places = [
        f"{name} {rank}" for name, rank in (("DP", entry.dp), ("TP", entry.tp), ("PP", entry.pp)) if rank is not None
    ]
    if places:
        yield ", ".join(places)
    elif entry.mp is not None:
        yield f"model-parallel rank {entry.mp}"
    titles = {MASTER: "masters", BUFFER: "buffers", FROZEN: "frozen"}
    held = [f"{count} {titles.get(key, key)}" for key, count in entry.tensors.items()]
    if held:
        yield ", ".join(held)


def _names(names: Iterable[str], most: int) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."

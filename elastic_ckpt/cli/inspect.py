"""``elastic-ckpt inspect``, and its tables, which fit in 100 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from elastic_ckpt.cli.output import EXIT_FOUND, Answer, Folder, Tag, reads_checkpoint, table
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import shortened
from elastic_ckpt.report import size, title
from elastic_ckpt.tools.inspection import ERROR, TRAINED, inspect_folder

_ABOUT = "Metadata only: elastic-ckpt verify lists all problems of a checkpoint, with --full those of every byte."
#: Hyperparameters that are shown first, in this order.
_FIRST = ("name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum")


@reads_checkpoint("inspect", epilog="Example: [bold]elastic-ckpt inspect checkpoints --params[/]")
def inspect(
    config: ElasticConfig,
    folder: Folder,
    tag: Tag = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter and buffer.")] = False,
) -> Answer:
    """Show what a checkpoint's metadata says: who saved it, and what it holds.

    Exit code 1: something in it is damaged, or not supported.
    """
    found = inspect_folder(str(folder), tag, config)
    return Answer(found, report(found, params), exit_code=0 if found["ok"] else EXIT_FOUND)


def clean(value: Any) -> str:
    """Text from a checkpoint on one line, with markup escaped."""
    return escape(str(value).replace("\n", "\\n"))


def report(found: Mapping[str, Any], params: bool) -> Iterator[RenderableType]:
    """All tables, in order."""
    yield _overview(found)
    rows: list[tuple[Any, ...]] = []
    for each in found["contents"]:
        values = " to ".join(f"{value:g}" for value in each["values"])
        kind = each["kind"] + (f" = {values}" if values else "")
        sizes = (f"{each['numel']:,}", size(each["nbytes"])) if each["numel"] else ("", "")
        rows.append((clean(title(each["key"])), kind, each["dtype"], f"{each['tensors']:,}", *sizes))
    yield table("What it holds", "what", "kind", "dtype", ">number", ">elements", ">bytes", rows=rows)
    if found["groups"]:
        rows = []
        for number, group in enumerate(found["groups"]):
            known = group["hyperparameters"].items()
            saved = {key: value for key, value in known if value is not None and value is not False}
            ordered = {key: saved[key] for key in dict.fromkeys((*_FIRST, *saved)) if key in saved}
            rows.append((number, group["members"], f"{group['numel']:,}", clean(_pairs(ordered)) or "none saved"))
        yield table("Param groups", ">group", ">members", ">elements", "hyperparameters", rows=rows)
    rows = []
    for finding in found["findings"]:
        details = {name: getattr(finding, name) for name in ("parameter", "file", "expected", "found", "remedy")}
        texts = {name: str(value) for name, value in details.items() if value is not None}
        lines = [f"[dim]{name}:[/] {clean(text)}" for name, text in texts.items() if text not in finding.text]
        level = "[bold red]error[/]" if finding.level == ERROR else finding.level
        rows.append((level, "\n".join([clean(finding.text), *lines])))
    if rows:
        yield table("Findings", rows=rows)
    if params:
        yield _parameters(found)
    yield Text(_ABOUT, style="dim")


def _overview(found: Mapping[str, Any]) -> Table:
    run, source, files = found["run"], found["source"], found["files"]
    steps = f"step {run.get('global_steps', '?')}"
    if "global_samples" in run:
        steps += f" ({run['global_samples']} samples, {run['skipped_steps']} skipped)"
    by = f", DeepSpeed {source['ds_version']}" if source["ds_version"] else ""
    batch = f"{run['micro_batch'] or '?'} a rank x {run['accumulation_steps'] or '?'} micro-batches"
    experts = Counter(found["experts"].values())
    scale = run["loss_scale"]
    facts = {
        "folder": clean(source["folder"]),
        "format": f"{source['format']}, tag {clean(source['tag'])}",
        "saved": clean(f"{steps}, {found['topology']}{by}"),
        "optimizer": run["optimizer"] and clean(run["optimizer"]),
        "batch": run["global_batch"] and f"{run['global_batch']} samples a step: {batch}",
        "lr scheduler": clean(_pairs(run["lr_scheduler"])),
        "loss scale": scale and clean(_pairs(scale)) + (", last step overflowed" if run["overflow"] else ""),
        "experts": ", ".join(f"{count} layers of {number}" for number, count in sorted(experts.items())),
        "tied names": clean(shortened([f"{name} = {holder}" for name, holder in found["aliases"].items()], 4)),
        "files": f"{len(files)}, {size(sum(file['nbytes'] for file in files))}",
    }
    return table("elastic_ckpt: checkpoint", rows=facts.items())


def _parameters(found: Mapping[str, Any]) -> Table:
    entries, rows = found["parameters"], []
    for entry in entries:
        about = [entry["role"]] if entry["role"] != TRAINED else []
        about += [f"tied: {', '.join(entry['tied'])}"] if entry["tied"] else []
        about += [f"{entry['copies']} copies"] if entry["copies"] > 1 else []
        name = clean(entry["name"]) + (f"\n[dim]{clean('; '.join(about))}[/]" if about else "")
        group = "" if entry["group"] is None else entry["group"]
        shape = escape("?" if entry["shape"] is None else str(list(entry["shape"])))
        if len(entry["shards"]) > 1:
            counted = (f"{count} x {list(shard)}" for shard, count in Counter(entry["shards"]).items())
            shape += f"\n[dim]{escape(', '.join(counted))}[/]"
        states = clean(", ".join(entry["states"]))
        rows.append((name, shape, entry["dtype"], group, states, f"{entry['numel']:,}"))
    columns = ("name", "shape", "dtype", ">group", "states", ">elements")
    shown = table(f"{len(entries)} parameters and buffers", *columns, rows=rows)
    for column in shown.columns:
        column.ratio = {"name": 3, "shape": 2, "states": 2}.get(str(column.header))
    return shown


def _pairs(values: Any) -> str:
    """The short entries of a mapping on one line."""
    if not isinstance(values, Mapping):
        return "" if values is None else type(values).__name__
    shown = ((key, f"{value:g}" if isinstance(value, float) else str(value)) for key, value in values.items())
    return ", ".join(f"{key}={text if len(text) <= 60 else text[:57] + '...'}" for key, text in shown)

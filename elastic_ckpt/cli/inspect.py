"""``elastic-ckpt inspect``, whose tables fit in 100 columns, ``verify`` and ``latest``: is a checkpoint whole?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from elastic_ckpt.cli.output import EXIT_FOUND, EXIT_UNREADABLE, Answer, Folders, Tag, plain, reads_checkpoint
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.text import counted, printable
from elastic_ckpt.errors import shortened
from elastic_ckpt.report import literal, size, table, title
from elastic_ckpt.tools.incomplete import TRAINED
from elastic_ckpt.tools.inspection import ERROR, inspect_folder
from elastic_ckpt.tools.latest import newest_whole
from elastic_ckpt.tools.verification import verify as verify_checkpoint

_ABOUT = "Only metadata was read. elastic-ckpt verify lists all problems; with --full, it checks every byte."
#: Hyperparameters that are shown first, in this order.
_FIRST = ("name", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum")


@reads_checkpoint("inspect", epilog="Example: [bold]elastic-ckpt inspect checkpoints --params[/]")
def inspect(
    config: ElasticConfig,
    folders: Folders,
    tag: Tag = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter and buffer instead.")] = False,
) -> Answer:
    """Show what a checkpoint holds and how it was saved, from its metadata.

    Exit code 1: part of it is damaged or not supported.
    """
    found = inspect_folder(folders[0], tag, config)
    return Answer(found, report(found, params), exit_code=0 if found["ok"] else EXIT_FOUND)


def report(found: Mapping[str, Any], params: bool) -> Iterator[RenderableType]:
    """All tables: findings first, then the list of parameters, or everything else."""
    rows: list[tuple[Any, ...]] = []
    for each in found["findings"]:
        details = {name: getattr(each, name) for name in ("parameter", "file", "expected", "found", "remedy")}
        lines = [f"[dim]{name}:[/] {literal(text)}" for name, text in details.items() if text and text not in each.text]
        level = "[bold red]error[/]" if each.level == ERROR else each.level
        rows.append((level, "\n".join([literal(each.text), *lines])))
    if rows:
        yield table("Findings", rows=rows)
    if params:
        yield _parameters(found)
        return
    yield _overview(found)
    rows = []
    for each in found["contents"][:_MOST_ROWS]:
        values = " to ".join(f"{value:g}" for value in each["values"])
        kind = each["kind"] + (f" = {values}" if values else "")
        nbytes = size(each["nbytes"]) if each["nbytes"] else ""
        sizes = (f"{each['numel']:,}", nbytes) if each["numel"] else ("", "")
        rows.append(
            (literal(title(each["key"][:_MOST_NAME_LENGTH])), kind, each["dtype"], f"{each['tensors']:,}", *sizes)
        )
    if rows:
        yield table("Contents", "what", "kind", "dtype", ">number", ">elements", ">bytes", rows=rows)
    if found["groups"]:
        rows = []
        for number, group in enumerate(found["groups"][:_MOST_ROWS]):
            known = group["hyperparameters"].items()
            saved = {key: value for key, value in known if value is not None and value is not False}
            ordered = {key: saved[key] for key in dict.fromkeys((*_FIRST, *saved)) if key in saved}
            rows.append((number, group["members"], f"{group['numel']:,}", literal(_pairs(ordered)) or "none saved"))
        more = len(found["groups"]) - len(rows)
        yield table(
            "Param groups" + (f" ({more} more with --json)" if more else ""),
            ">group",
            ">members",
            ">elements",
            "hyperparameters",
            rows=rows,
        )
    yield Text(_ABOUT, style="dim")


#: Rows of a table that a terminal shows; JSON has all.
_MOST_ROWS = 500
#: Characters of a name that a terminal shows.
_MOST_NAME_LENGTH = 200


def _overview(found: Mapping[str, Any]) -> Table:
    run = found["run"]
    source = found["source"]
    files = found["files"]
    steps = f"step {run.get('global_steps', '?')}"
    if "global_samples" in run:
        steps += f" ({run['global_samples']} samples, {run['skipped_steps']} skipped)"
    by = f", DeepSpeed {source['ds_version'][:_MOST_NAME_LENGTH]}" if source["ds_version"] else ""
    steps_of_rank = run["accumulation_steps"]
    batch = f"{run['micro_batch'] or '?'} per rank x {steps_of_rank or '?'} micro-batch{'es' * (steps_of_rank != 1)}"
    experts = Counter(found["experts"].values())
    scale = run["loss_scale"]
    facts = {
        "folder": literal(source["folder"]),
        "format": f"{source['format']}, tag {literal(source['tag'])}",
        "saved": literal(f"{steps}, {found['topology']}{by}"),
        "optimizer": run["optimizer"] and literal(run["optimizer"]),
        "batch": run["global_batch"] and f"{run['global_batch']} samples per step: {batch}",
        "lr scheduler": literal(_pairs(run["lr_scheduler"])),
        "loss scale": scale and literal(_pairs(scale)) + (", last step overflowed" if run["overflow"] else ""),
        "experts": ", ".join(f"{counted(count, 'layer')} of {number}" for number, count in sorted(experts.items())),
        "tied names": literal(shortened([f"{name} = {holder}" for name, holder in found["aliases"].items()], 4)),
        "files": f"{len(files)}, {size(sum(file['nbytes'] for file in files))}",
    }
    return table("elastic_ckpt: checkpoint", rows=facts.items())


def _parameters(found: Mapping[str, Any]) -> Table:
    entries = found["parameters"]
    rows = []
    for entry in entries:
        about = [entry["role"]] if entry["role"] != TRAINED else []
        about += [f"tied: {', '.join(entry['tied'])}"] if entry["tied"] else []
        about += [f"{entry['copies']} copies"] if entry["copies"] > 1 else []
        name = literal(entry["name"]) + (f"\n[dim]{literal('; '.join(about))}[/]" if about else "")
        group = "" if entry["group"] is None else entry["group"]
        shape = literal("?" if entry["shape"] is None else str(list(entry["shape"])))
        if len(entry["shards"]) > 1:
            counted = (f"{count} x {list(shard)}" for shard, count in Counter(entry["shards"]).items())
            shape += f"\n[dim]{literal(', '.join(counted))}[/]"
        states = literal(", ".join(entry["states"]))
        rows.append((name, shape, entry["dtype"], group, states, f"{entry['numel']:,}"))
    columns = ("name", "shape", "dtype", ">group", "states", ">elements")
    shown = table(f"Parameters and buffers: {len(entries):,}", *columns, rows=rows)
    for column in shown.columns:
        column.ratio = {"name": 3, "shape": 2, "states": 2}.get(str(column.header))
    return shown


def _pairs(values: Any) -> str:
    """The short entries of a mapping on one line."""
    if not isinstance(values, Mapping):
        return "" if values is None else type(values).__name__
    shown = ((key, f"{value:g}" if isinstance(value, float) else str(value)) for key, value in values.items())
    most = islice(shown, _MOST_ROWS)
    return ", ".join(f"{str(key)[:60]}={text if len(text) <= 60 else text[:57] + '...'}" for key, text in most)


@reads_checkpoint("verify", epilog="Example: elastic-ckpt verify /ckpt --full --tp-preset megatron-core")
def verify(
    config: ElasticConfig,
    folders: Folders,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Read every byte: check CRC32 sums, NaN and infinite values, and copies that differ.",
        ),
    ] = False,
    tag: Tag = None,
) -> Answer:
    """Check a checkpoint for missing, damaged and mixed-up files, and print each problem on one line.

    Without --full, only metadata is read: every file opens, none is missing or from another save, and each element is
    stored exactly once. Notes, such as files that are not DeepSpeed's, go to standard error.

    Exit code 1: something is wrong. 3: no problem was found, but this version could not check part of the checkpoint.
    Each such part is a line "not-checked".
    """
    found = verify_checkpoint(folders[0], tag, config, full, threads=min(os.cpu_count() or 1, 16), show_progress=None)
    listed = {
        name: [{"code": f.kind, "message": f.message, "file": f.file, "parameter": f.parameter} for f in findings]
        for name, findings in (
            ("findings", found.findings),
            ("unchecked", found.unchecked),
            ("notes", found.notes),
        )
    }
    counts = f"{counted(found.files, 'file')}, {counted(found.tensors, 'tensor')}"
    checked = f"{counts}, {'' if full else 'metadata of '}{counted(found.nbytes, 'byte')}"
    lines = [finding.line(found.folder) for finding in found.problems]
    return Answer(
        {"ok": found.ok, **plain(found), **listed},
        lines or [f"ok: {checked} checked in {found.seconds:.2f} s"],
        [f"note: {note.line(found.folder)}" for note in found.notes],
        exit_code=EXIT_FOUND if found.findings else EXIT_UNREADABLE if found.unchecked else 0,
    )


@reads_checkpoint("latest", epilog="Example: [bold]deepspeed train.py --resume $(elastic-ckpt latest /ckpt)[/]")
def latest(
    config: ElasticConfig,
    folders: Folders,
    full: Annotated[bool, typer.Option("--full", help="Check every byte against its checksum.")] = False,
) -> Answer:
    """Print the path of the newest complete checkpoint in a folder, whatever its latest file says.

    It looks at folders of tags and at those of Hugging Face's Trainer (checkpoint-20), Accelerate and Lightning. Newer
    checkpoints that are incomplete or could not be checked are listed on standard error, with the reason. If there is
    only a suspicion, such as files that may be of two saves, the checkpoint is printed, and standard error names the
    suspicion.

    Exit code 1: no checkpoint is complete. 3: none is known to be complete, and at least one could not be checked.
    """
    newest, skipped = newest_whole(folders[0], config, full)
    path = newest.path if newest else ""
    words = {False: "not complete", True: "not checked"}
    notes = [printable(f"{words[each.unchecked]}: {each.path}: {each.problem}") for each in skipped]
    if newest is not None and newest.suspicion is not None:
        notes.append(printable(f"maybe damaged: {newest.path}: {newest.suspicion}"))
    exit_code = EXIT_UNREADABLE if any(each.unchecked for each in skipped) else EXIT_FOUND
    if path != printable(path):
        notes = [*notes, f"{printable(path)}: its name has control characters: rename it"]
        path = ""
    return Answer({"newest": newest, "skipped": skipped}, [path] if path else [], notes, 0 if path else exit_code)

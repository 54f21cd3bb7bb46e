"""``elastic-ckpt plan``: its tables, which fit in 100 columns, and its plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from tqdm import tqdm

from elastic_ckpt.cli.output import EXIT_FOUND, Answer, Folders, Tag, reads_checkpoint, refusal, table
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ConfigError, ElasticCkptError, MismatchError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import saved_topology, size, source_dict, title
from elastic_ckpt.storage import medium_of
from elastic_ckpt.storage.local import OBJECT_STORE
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob, forecast

_MOST_RANKS = 1 << 20
#: Ranks planned of a larger job, unless all are asked for.
_MOST_BY_DEFAULT = 64
_LEAST_WIDTH = 72
_NOTES_SHOWN = 12
#: Keys of a forecast, and their titles.
_READS = {
    "nbytes_read": "bytes read",
    "nbytes_compared": "bytes compared before",
    "nbytes_received": "bytes received",
    "reads": "reads",
    "files": "files read from",
    "memory": "bytes of memory filled",
}


def _degree(option: str, what: str) -> Any:
    return typer.Option(option, min=1, max=_MOST_RANKS, help=f"{what}-parallel degree.")


@reads_checkpoint("plan", epilog="Example: [bold]elastic-ckpt plan /ckpt --dp 8 --tp 4 --pp 2[/]")
def plan(
    config: ElasticConfig,
    folders: Folders,
    dp: Annotated[int | None, _degree("--dp", "Data")] = None,
    tp: Annotated[int | None, _degree("--tp", "Tensor")] = None,
    pp: Annotated[int | None, _degree("--pp", "Pipeline")] = None,
    ep: Annotated[int | None, _degree("--ep", "Expert")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Of load_module_only=True: no optimizer states.")
    ] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Plan this rank alone, in detail.")] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Plan and list every rank; by default, of a big job, {_MOST_BY_DEFAULT} of them."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw which bytes of which file go where: FILE.svg, .png, .pdf."),
    ] = None,
    tag: Tag = None,
) -> Answer:
    """Plan a load on another topology, without a GPU: what each rank would read, and the memory that it fills.

    The planner is the one of a load. Degrees and ZeRO stage that are not given are those of the save.

    Exit code 1: the load would be refused. It says why, and what would help.
    """
    if rank is not None and every:
        raise typer.BadParameter("--rank plans one rank; --all needs them all")
    try:
        metadata = open_folder(folders[0], tag, config, not weights_only).checkpoint.metadata
    except MismatchError as error:  # only live param groups could name the states
        error.remedy = f"--weights-only plans the weights alone: {error.remedy}"
        raise
    saved = metadata.source
    dp = dp or saved.partition_degree
    ep = ep or (math.gcd(saved.ep, dp) if any(map(expert_name, metadata.parameters)) else 1)
    stage = saved.zero_stage if zero is None else zero
    topology = Topology(dp, tp or saved.tp, pp or saved.pp, stage, alignment=max(config.align_partitions, 1), ep=ep)
    if topology.ranks > _MOST_RANKS:
        raise typer.BadParameter(f"{topology} would be {topology.ranks} ranks, and {_MOST_RANKS} are the most")
    if rank is not None and rank >= topology.ranks:
        raise typer.BadParameter(f"{topology} has the ranks 0 to {topology.ranks - 1}", param_hint="--rank")
    ranks = [rank] if rank is not None else some_of(topology.ranks, topology.ranks if every else _MOST_BY_DEFAULT)
    options = read_options(config, medium := medium_of(saved.folder, config.reading.storage))
    try:
        job = VirtualJob(metadata, topology, LoadOptions.of(config, optimizer_states=not weights_only))
        with tqdm(ranks, desc="planning", unit=" ranks", leave=False, disable=None) as bar:
            found = [{"rank": each, **forecast(*job.planned(each), options)} for each in bar]
    except ElasticCkptError as error:
        return refusal(error, EXIT_FOUND)
    if plot is not None:
        try:
            from elastic_ckpt.cli.plot import draw  # noqa: PLC0415  matplotlib is an extra
        except ImportError as error:
            remedy = "pip install elastic_ckpt[plots]"
            raise ConfigError("--plot needs matplotlib", found=str(error), remedy=remedy) from error
        draw(job, ranks, plot)
    shown = {"storage": str(medium), **document(job, found)}
    if every or rank is not None:
        return Answer(shown, report(job, shown, in_detail=True))
    return Answer({key: value for key, value in shown.items() if key != "ranks"}, report(job, shown, in_detail=False))


def some_of(ranks: int, most: int) -> list[int]:
    """At most so many ranks of a job: the first, the last, and others evenly between them."""
    if ranks <= most:
        return list(range(ranks))
    return [round(number * (ranks - 1) / (most - 1)) for number in range(most)]


def document(job: VirtualJob, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The forecasts of the planned ranks, and what they have in common, as plain data."""
    topology, spreads = job.topology, {}
    for key in _READS:
        values = [len(each[key]) if key == "files" else each[key] for each in found]
        mean = sum(values) / len(values)
        spreads[key] = {"least": min(values), "mean": mean, "most": max(values), "total": sum(values)}
    notes = list(dict.fromkeys(chain.from_iterable(each.pop("notes") for each in found)))
    if topology.pp > 1 and topology.zero_stage > 1:
        notes = [f"DeepSpeed's pipeline engine refuses ZeRO-{topology.zero_stage}: take stage 0 or 1", *notes]
    return {
        "source": source_dict(job.metadata.source) | {"files": len(job.metadata.files)},
        "target": dataclasses.asdict(topology) | {"ranks": topology.ranks},
        "ranks_planned": len(found),
        **spreads,
        "notes": notes,
        "ranks": found,
    }


def report(job: VirtualJob, shown: dict[str, Any], in_detail: bool) -> Iterator[RenderableType]:
    """All tables, in order."""
    source, files, ranks, notes = job.metadata.source, job.metadata.files, shown["ranks"], shown["notes"]
    about = f"{source.format}, tag {source.tag}, {len(files)} files, {size(sum(file.nbytes for file in files))}"
    by = f", DeepSpeed {source.ds_version}" if source.ds_version else ""
    facts = [("checkpoint", escape(f"{source.folder} ({about})")), ("saved", escape(f"{saved_topology(source)}{by}"))]
    facts += [("storage", shown["storage"]), ("resumed", f"{job.topology}: {job.topology.ranks} ranks")]
    if len(ranks) < job.topology.ranks:
        facts += [("planned", f"{len(ranks)} of them; --all plans every one")]
    facts += [("note", escape(note)) for note in notes[:_NOTES_SHOWN]]
    if len(notes) > _NOTES_SHOWN:
        facts += [("note", f"and {len(notes) - _NOTES_SHOWN} more, with --json")]
    yield table("elastic_ckpt: plan of a load", rows=facts, min_width=_LEAST_WIDTH)
    rows: list[tuple[Any, ...]] = []
    titles = _READS | ({"reads": "requests"} if shown["storage"] == str(OBJECT_STORE) else {})
    for key, what in titles.items():
        if shown[key]["most"] or key == "nbytes_read":
            texts = [f"{value:,.0f}" if key in ("reads", "files") else size(value) for value in shown[key].values()]
            rows.append((what, *texts[:3], "" if key == "files" else texts[3]))
    yield table("each rank", "", ">least", ">mean", ">most", ">all planned", rows=rows, min_width=_LEAST_WIDTH)
    most = max(ranks, key=lambda each: each["memory"])
    rows = []
    for key, dtype, tensors, numel, padding in (each.values() for each in most["filled"]):
        elements = f"{numel:,}" + (f", {padding:,} padding" if padding else "")
        rows.append((escape(title(key)), dtype, tensors, elements, size(numel * ITEMSIZE[dtype])))
    heading = f"memory that is filled; rank {most['rank']} has most"
    yield table(heading, "", ">dtype", ">tensors", ">elements", ">bytes", rows=rows, min_width=_LEAST_WIDTH)
    if in_detail:
        rows = []
        for each in ranks:
            at = (each["rank"], *(each["coordinates"][name] for name in ("pp_rank", "partition_rank", "tp_rank")))
            read = (size(each["nbytes_read"]), f"{each['reads']:,}", len(each["files"]))
            rows.append((*at, *read, size(each["memory"])))
        columns = ("rank", ">stage", ">dp", ">tp", ">read", ">reads", ">files", ">memory")
        yield table("ranks", *columns, rows=rows, min_width=_LEAST_WIDTH)

"""A survey of a job for the eye: tables that fit in 100 columns. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from elastic_ckpt.cli.plan_document import warnings_of
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, SourceFacts
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.tools.forecast import RankForecast
from elastic_ckpt.tools.virtual import VirtualJob
from elastic_ckpt.tools.virtual.survey import Setting, Survey, heaviest, spread

_LEAST_WIDTH = 72
#: Of long lists, so many rows.
_FILES_SHOWN, _NOTES_SHOWN = 16, 12
_DIVIDED = (
    "without ZeRO every data-parallel rank holds all of it",
    "ZeRO-1 divides masters and states over data-parallel ranks",
    "ZeRO-2 divides masters, states and gradients over data-parallel ranks",
    "ZeRO-3 divides all of it over data-parallel ranks",
)
_TITLES = {MASTER: "fp32 masters", BUFFER: "buffers", FROZEN: "frozen weights"}


def size(nbytes: float) -> str:
    """Bytes, for people."""
    return str(tqdm.format_sizeof(nbytes, "B"))


def report(job: VirtualJob, found: Survey, setting: Setting, name: str, in_detail: bool) -> Iterator[RenderableType]:
    """All tables, one behind the other."""
    yield _overview(job, found, setting, name)
    yield _reads(found)
    yield _memory(job, found, setting)
    yield _time(found, setting)
    if in_detail and len(found.ranks) == 1:
        yield from _details(job, found)
    elif in_detail:
        yield _every_rank(job, found, setting.cluster.ranks_per_node)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        show_header=bool(columns),
        header_style="bold",
        min_width=_LEAST_WIDTH,
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _facts(title: str) -> Table:
    table = _table(title)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _overview(job: VirtualJob, found: Survey, setting: Setting, name: str) -> Table:
    table, source = _facts("elastic_ckpt: plan of a load"), job.metadata.source
    files = len(job.metadata.files)
    total = sum(file.nbytes for file in job.metadata.files)
    table.add_row("checkpoint", escape(f"{name} ({source.format}, tag {source.tag}, {files} files, {size(total)})"))
    table.add_row("saved", f"{saved_topology(source)}, DeepSpeed {escape(source.ds_version)}")
    offload = ", masters and states in host memory" if setting.offload else ""
    table.add_row("resumed", f"{job.topology}: {job.topology.ranks} ranks{offload}")
    planned = len(found.ranks)
    if planned < job.topology.ranks:
        table.add_row("planned", f"{planned} of them; --all plans every one")
    for warning in warnings_of(job.topology):
        table.add_row("[yellow]warning[/]", escape(warning))
    for note in found.notes[:_NOTES_SHOWN]:
        table.add_row("note", escape(note))
    if len(found.notes) > _NOTES_SHOWN:
        table.add_row("note", f"and {len(found.notes) - _NOTES_SHOWN} more, with --json")
    return table


def saved_topology(source: SourceFacts) -> str:
    """The topology of the run that saved the checkpoint."""
    sequence = source.sequence
    sp = f", SP={sequence.degree}" if sequence.degree > 1 else ""
    return f"ZeRO-{source.zero_stage}, DP={sequence.data_degree(source.dp)}{sp}, TP={source.tp}, PP={source.pp}"


def _reads(found: Survey) -> Table:
    one = len(found.ranks) == 1
    table = _table(*(("this rank", "", "") if one else ("each rank", "", "least", "mean", "most", "all planned")))
    rows: list[tuple[str, Callable[[RankForecast], int], Callable[[float], str]]] = [
        ("bytes read", lambda each: each.reads.nbytes, size),
        ("bytes compared before", lambda each: each.reads.nbytes_compared, size),
        ("bytes received", lambda each: each.reads.nbytes_received, size),
        ("reads", lambda each: each.reads.calls, _count),
        ("files read from", lambda each: each.reads.files, _count),
    ]
    for title, value, shown in rows:
        values = spread([value(each) for each in found.ranks])
        if values.most or title == "bytes read":
            total = "" if title == "files read from" else shown(values.total)
            spreads = () if one else (shown(values.least), shown(values.mean))
            table.add_row(title, *spreads, shown(values.most), *(() if one else (total,)))
    return table


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _memory(job: VirtualJob, found: Survey, setting: Setting) -> Table:
    """Of the rank that needs most."""
    most = heaviest(found.ranks)
    memory = most.memory
    host, device = ("host", "device") if setting.offload else ("device", "device")
    table = _table(f"memory for the state of training; rank {most.rank} needs most", "", "where", "dtype", "size")
    table.add_row("weights", device, setting.precision.weights, size(memory.weights))
    table.add_row("gradients", device, setting.precision.gradients, size(memory.gradients))
    table.add_row("masters", host, "float32", size(memory.masters))
    for key, dtype, nbytes in memory.states:
        table.add_row(escape(key), host, dtype, size(nbytes))
    if memory.others:
        table.add_row("buffers, frozen weights", device, "", size(memory.others))
    table.add_row("all", "device", "", size(memory.device), style="bold")
    if memory.host:
        table.add_row("all", "host", "", size(memory.host), style="bold")
    table.caption = f"{_DIVIDED[job.topology.zero_stage]}; without activations and communication buffers"
    return table


def _time(found: Survey, setting: Setting) -> Table:
    time, cluster = found.time, setting.cluster
    table = _facts("time")
    table.add_row("nodes", f"{cluster.nodes}, of {cluster.ranks_per_node} ranks each")
    how = "the most of those that were planned" if time.is_estimate else "the most"
    table.add_row("one node reads", f"{size(time.node_nbytes)} ({how})")
    table.add_row("reading", f"{time.reading:.1f} s, at {size(time.bandwidth)}/s a node (--bandwidth)", style="bold")
    table.caption = "left out: metadata, planning, the commit, and what ranks send each other"
    return table


def _every_rank(job: VirtualJob, found: Survey, per_node: int) -> Table:
    table = _table("ranks", "rank", "stage", "dp", "tp", "node", "read", "reads", "files", "device", "host")
    for each in found.ranks:
        place: RankCoordinates = job.topology.place(each.rank)
        numbers = (each.rank, place.pp_rank, place.dp_rank, place.tp_rank, each.rank // per_node)
        reads, memory = each.reads, each.memory
        sizes = (size(reads.nbytes), f"{reads.calls:,}", str(reads.files), size(memory.device), size(memory.host))
        table.add_row(*map(str, numbers), *sizes)
    return table


def _details(job: VirtualJob, found: Survey) -> Iterator[RenderableType]:
    """Of one rank: where it stands, what it fills, and from which files."""
    local_state, plan = found.last
    each = found.ranks[0]
    place = job.topology.place(each.rank)
    table = _table(
        f"rank {each.rank}: pipeline stage {place.pp_rank}, data-parallel rank {place.dp_rank}, "
        f"tensor-parallel rank {place.tp_rank}",
        "fills",
        "dtype",
        "tensors",
        "elements",
        "of them left alone",
    )
    for key, dtype, tensors, numel, gaps in _slots(plan):
        table.add_row(escape(_TITLES.get(key, key)), dtype, str(tensors), f"{numel:,}", f"{gaps:,}")
    fragments, flats = len(local_state.fragments), len(local_state.flats)
    strided = sum(copy.rows > 1 for copy in plan.copies)
    table.caption = (
        f"{fragments} pieces of parameters in {flats} flat partitions; {len(plan.copies)} copies, {strided} of them "
        f"strided; {len(plan.recodes)} tensors through another format or a mean; reads of "
        f"{size(each.reads.least_nbytes)} to {size(each.reads.most_nbytes)}"
    )
    yield table
    yield _files(job, each)


def _slots(plan: ReadPlan) -> list[tuple[str, str, int, int, int]]:
    """(key, dtype, tensors, elements, of them gaps)."""
    found: dict[tuple[str, str], list[int]] = {}
    for slot in plan.slots:
        sums = found.setdefault((slot.key, slot.dtype), [0, 0, 0])
        sums[0] += 1
        sums[1] += slot.numel
        sums[2] += sum(gap.numel for gap in slot.gaps)
    return [(key, dtype, *sums) for (key, dtype), sums in found.items()]  # type: ignore[misc]


def _files(job: VirtualJob, each: RankForecast) -> Table:
    table = _table("from these files", "file", "bytes")
    biggest = sorted(each.by_file.items(), key=lambda item: (-item[1], item[0]))
    for file, nbytes in biggest[:_FILES_SHOWN]:
        table.add_row(escape(os.path.relpath(job.metadata.files[file].path, job.metadata.source.folder)), size(nbytes))
    rest: Sequence[tuple[int, int]] = biggest[_FILES_SHOWN:]
    if rest:
        table.add_row(f"and {len(rest)} more", size(sum(nbytes for _, nbytes in rest)))
    return table

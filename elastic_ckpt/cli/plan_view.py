"""Renders a survey of a job: as tables that fit in 100 columns, as JSON, and as a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from elastic_ckpt.cli.output import table
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.report import saved_topology, size, source_dict
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.forecast import Memory, RankForecast, Survey, nodes_of, reading_time, spread

_LEAST_WIDTH = 72
#: Rows shown of long lists.
_FILES_SHOWN, _NOTES_SHOWN = 16, 12
_DIVIDED = (
    "without ZeRO every data-parallel rank holds all of it",
    "ZeRO-1 divides masters and states over data-parallel ranks",
    "ZeRO-2 divides masters, states and gradients over data-parallel ranks",
    "ZeRO-3 divides all of it over data-parallel ranks",
)
#: Up to this many rows or columns are all labelled; of more, a few.
_MOST_NAMED, _FEW_NAMED = 40, 16
_FORMATS = (".png", ".pdf", ".svg")
_TITLES = {MASTER: "fp32 masters", BUFFER: "buffers", FROZEN: "frozen weights"}
#: Key of the document, field of :class:`elastic_ckpt.tools.virtual.forecast.Reads`, and title.
_READS = (
    ("nbytes_read", "nbytes", "bytes read"),
    ("nbytes_compared", "nbytes_compared", "bytes compared before"),
    ("nbytes_received", "nbytes_received", "bytes received"),
    ("reads", "calls", "reads"),
    ("files", "files", "files read from"),
)


def document(job: VirtualJob, found: Survey, name: str, in_detail: bool) -> Mapping[str, Any]:
    """The survey as plain data; ``in_detail``: with every planned rank."""
    ranks, most, run = found.ranks, found.heaviest, found.run
    made: dict[str, Any] = {
        "name": name,
        "source": source_dict(job.metadata.source) | {"files": len(job.metadata.files)},
        "target": dataclasses.asdict(job.topology) | {"ranks": job.topology.ranks, "offload": run.offload},
        "precision": {"weights": run.weights, "gradients": run.gradients},
        "ranks_planned": len(ranks),
        **{key: _spread(found, field) for key, field, _ in _READS},
        "memory": _memory_document(most.memory) | {"rank": most.rank},
        "cluster": dataclasses.asdict(found.cluster) | {"ranks_per_node": found.cluster.ranks_per_node},
        "nodes": nodes_of(ranks, found.cluster),
        "seconds": reading_time(ranks, found.cluster),
        "warnings": _warnings(job.topology),
        "notes": found.notes,
    }
    if in_detail:
        made["ranks"] = [_rank_document(job, each) for each in ranks]
    return made


def _spread(found: Survey, field: str) -> dict[str, float]:
    return spread([getattr(each.reads, field) for each in found.ranks])


def _rank_document(job: VirtualJob, each: RankForecast) -> dict[str, Any]:
    files = {job.metadata.files[file].path: nbytes for file, nbytes in sorted(each.by_file.items())}
    at = job.topology.coordinates(each.rank)
    place = {key: getattr(at, key) for key in ("dp", "dp_rank", "tp", "tp_rank", "pp", "pp_rank", "ep", "ep_rank")}
    memory = _memory_document(each.memory)
    return {"rank": each.rank, "place": place, "reads": each.reads, "memory": memory, "files": files}


def _memory_document(memory: Memory) -> dict[str, Any]:
    states = [{"key": key, "dtype": dtype, "nbytes": nbytes} for key, dtype, nbytes in memory.states]
    return dataclasses.asdict(memory) | {"states": states, "device": memory.device, "host": memory.host}


def _warnings(topology: Topology) -> list[str]:
    """Topologies that DeepSpeed does not run, although the checkpoint could be loaded."""
    if topology.pp > 1 and topology.zero_stage > 1:
        return [
            f"DeepSpeed's pipeline engine refuses ZeRO-{topology.zero_stage}: with pipeline parallelism, take stage 0 "
            "or 1. What follows is what such a job would read"
        ]
    return []


def report(job: VirtualJob, found: Survey, name: str, in_detail: bool) -> Iterator[RenderableType]:
    """All tables, in order."""
    yield _overview(job, found, name)
    yield _reads(found)
    yield _memory(job, found)
    yield _time(found)
    if in_detail and len(found.ranks) == 1:
        yield _slots(job, found)
        yield _files(job, found.ranks[0])
    elif in_detail:
        yield _every_rank(job, found)


def _table(title: str, *columns: str) -> Table:
    return table(title, *columns, header_style="bold", min_width=_LEAST_WIDTH)


def _overview(job: VirtualJob, found: Survey, name: str) -> Table:
    shown, source = _table("elastic_ckpt: plan of a load"), job.metadata.source
    files = len(job.metadata.files)
    total = sum(file.nbytes for file in job.metadata.files)
    shown.add_row("checkpoint", escape(f"{name} ({source.format}, tag {source.tag}, {files} files, {size(total)})"))
    by = f", DeepSpeed {escape(source.ds_version)}" if source.ds_version else ""
    shown.add_row("saved", f"{saved_topology(source)}{by}")
    offload = ", masters and states in host memory" if found.run.offload else ""
    shown.add_row("resumed", f"{job.topology}: {job.topology.ranks} ranks{offload}")
    if len(found.ranks) < job.topology.ranks:
        shown.add_row("planned", f"{len(found.ranks)} of them; --all plans every one")
    for warning in _warnings(job.topology):
        shown.add_row("[yellow]warning[/]", escape(warning))
    for note in found.notes[:_NOTES_SHOWN]:
        shown.add_row("note", escape(note))
    if len(found.notes) > _NOTES_SHOWN:
        shown.add_row("note", f"and {len(found.notes) - _NOTES_SHOWN} more, with --json")
    return shown


def _reads(found: Survey) -> Table:
    one = len(found.ranks) == 1
    columns = ["this rank", "", ">"] if one else ["each rank", "", ">least", ">mean", ">most", ">all planned"]
    shown = _table(*columns)
    for key, field, title in _READS:
        values = _spread(found, field)
        if values["most"] or key == "nbytes_read":
            texts = {what: (size if "nbytes" in field else _count)(number) for what, number in values.items()}
            total = "" if key == "files" else texts["total"]
            shown.add_row(title, *([texts["most"]] if one else [texts["least"], texts["mean"], texts["most"], total]))
    return shown


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _memory(job: VirtualJob, found: Survey) -> Table:
    memory, run = found.heaviest.memory, found.run
    host = "host" if run.offload else "device"
    title = f"memory for the state of training; rank {found.heaviest.rank} needs most"
    shown = _table(title, "", ">where", ">dtype", ">size")
    shown.add_row("weights", "device", run.weights, size(memory.weights))
    shown.add_row("gradients", "device", run.gradients, size(memory.gradients))
    shown.add_row("masters", host, "float32", size(memory.masters))
    for key, dtype, nbytes in memory.states:
        shown.add_row(escape(key), host, dtype, size(nbytes))
    if memory.others:
        shown.add_row("buffers, frozen weights", "device", "", size(memory.others))
    shown.add_row("all", "device", "", size(memory.device), style="bold")
    if memory.host:
        shown.add_row("all", "host", "", size(memory.host), style="bold")
    shown.caption = f"{_DIVIDED[job.topology.zero_stage]}; without activations and communication buffers"
    return shown


def _time(found: Survey) -> Table:
    time, cluster = reading_time(found.ranks, found.cluster), found.cluster
    shown = _table("time")
    shown.add_row("nodes", f"{cluster.nodes}, of {cluster.ranks_per_node} ranks each")
    how = "the most of those that were planned" if time.is_estimate else "the most"
    shown.add_row("one node reads", f"{size(time.node_nbytes)} ({how})")
    shown.add_row("reading", f"{time.reading:.1f} s, at {size(time.bandwidth)}/s a node (--bandwidth)", style="bold")
    shown.caption = "left out: metadata, planning, the commit, and what ranks send each other"
    return shown


def _every_rank(job: VirtualJob, found: Survey) -> Table:
    shown = _table("ranks", "rank", ">stage", ">dp", ">tp", ">node", ">read", ">reads", ">files", ">device", ">host")
    for each in found.ranks:
        at, reads, memory = job.topology.coordinates(each.rank), each.reads, each.memory
        numbers = (each.rank, at.pp_rank, at.dp_rank, at.tp_rank, each.rank // found.cluster.ranks_per_node)
        sizes = (size(reads.nbytes), f"{reads.calls:,}", str(reads.files), size(memory.device), size(memory.host))
        shown.add_row(*map(str, numbers), *sizes)
    return shown


def _slots(job: VirtualJob, found: Survey) -> Table:
    (local_state, plan), each = found.last, found.ranks[0]
    at = job.topology.coordinates(each.rank)
    ranks = f"data-parallel rank {at.dp_rank}, tensor-parallel rank {at.tp_rank}"
    title = f"rank {each.rank}: pipeline stage {at.pp_rank}, {ranks}"
    shown = _table(title, "fills", ">dtype", ">tensors", ">elements", ">of them left alone")
    for (key, dtype), (tensors, numel, gaps) in _by_kind(plan).items():
        shown.add_row(escape(_TITLES.get(key, key)), dtype, str(tensors), f"{numel:,}", f"{gaps:,}")
    reads = plan.reads
    strided = sum(item.rows > 1 for item in reads.items)
    shown.caption = (
        f"{len(local_state.fragments)} pieces of parameters in {len(local_state.flats)} flat partitions; "
        f"{len(reads.items)} copies, {strided} of them strided; {len(reads.requantize_items)} tensors through "
        f"another format or a mean; reads of {size(each.reads.least_nbytes)} to {size(each.reads.most_nbytes)}"
    )
    return shown


def _by_kind(plan: LoadPlan) -> dict[tuple[str, str], list[int]]:
    """(key, dtype) -> tensors, elements, and elements that no read fills."""
    found: dict[tuple[str, str], list[int]] = {}
    for slot in plan.reads.slots:
        sums = found.setdefault((slot.key, slot.dtype), [0, 0, 0])
        sums[0] += 1
        sums[1] += slot.numel
        sums[2] += sum(gap.numel for gap in slot.gaps)
    return found


def _files(job: VirtualJob, each: RankForecast) -> Table:
    shown = _table("from these files", "file", ">bytes")
    biggest = sorted(each.by_file.items(), key=lambda item: (-item[1], item[0]))
    for file, nbytes in biggest[:_FILES_SHOWN]:
        shown.add_row(escape(os.path.relpath(job.metadata.files[file].path, job.metadata.source.folder)), size(nbytes))
    rest = [nbytes for _, nbytes in biggest[_FILES_SHOWN:]]
    if rest:
        shown.add_row(f"and {len(rest)} more", size(sum(rest)))
    return shown


def refuse_without_matplotlib() -> None:
    """Raise :class:`ConfigError`, before anything is planned, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            expected="matplotlib",
            found="nothing of this name",
            remedy="pip install matplotlib (or elastic_ckpt[plots])",
        )


def bytes_matrix(ranks: Sequence[RankForecast]) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Bytes by rank (row) and file (column), float64, and the indices of the files; unread files are left out."""
    files = sorted({file for each in ranks for file in each.by_file})
    rows = [[each.by_file.get(file, 0) for file in files] for each in ranks]
    return np.array(rows, dtype=np.float64), files


def draw(job: VirtualJob, ranks: Sequence[RankForecast], path: Path) -> None:
    """Write the plot to ``path``. Raises :class:`ConfigError` if it cannot be written there."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415  an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    matrix, files = bytes_matrix(ranks)
    width, height = (min(max(0.28 * count, 4.0), 11.0) + 3.0 for count in reversed(matrix.shape))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    shown = np.ma.masked_equal(matrix / 2**20, 0)
    norm = LogNorm() if shown.count() and shown.min() < shown.max() else None
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
    figure.colorbar(image, ax=axes, label="MiB read")
    _name_ticks(axes.yaxis, [f"rank {each.rank}" for each in ranks])
    names = [os.path.relpath(job.metadata.files[file].path, job.metadata.source.folder) for file in files]
    _name_ticks(axes.xaxis, [name.removesuffix("_states.pt") for name in names])
    axes.tick_params(axis="x", labelrotation=90)
    per_stage = job.topology.dp * job.topology.tp
    for border in range(per_stage, min(job.topology.ranks, len(ranks)), per_stage):
        axes.axhline(border - 0.5, color="grey", linewidth=0.5)
    axes.set_title(f"{saved_topology(job.metadata.source)}  →  {job.topology}")
    axes.set_xlabel(f"source files ({len(files)})")
    axes.set_ylabel(f"ranks ({len(ranks)})")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the picture cannot be written",
            file=str(path),
            expected=f"a path in a folder that is there, ending in {', '.join(_FORMATS)}",
            found=str(error),
        ) from error


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    step = 1 if len(names) <= _MOST_NAMED else -(-len(names) // _FEW_NAMED)
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7)

"""``elastic-ckpt plan``: its tables, which fit in 100 columns, and its diagram, an SVG."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from xml.sax.saxutils import escape as xml_escape

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import EXIT_FOUND, errors_end_the_command, print_json, print_wide, printable, table
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.errors import ConfigError, MismatchError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import saved_topology, size, source_dict, title
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.virtual import RankForecast, Topology, VirtualJob, bytes_by_file, forecast

_MOST_RANKS = 1 << 20
#: Ranks planned of a larger job, unless all are asked for.
_MOST_BY_DEFAULT = 64
_LEAST_WIDTH = 72
_NOTES_SHOWN = 12
#: Attribute of a forecast, and title.
_READS = (
    ("nbytes_read", "bytes read"),
    ("nbytes_compared", "bytes compared before"),
    ("nbytes_received", "bytes received"),
    ("reads", "reads"),
    ("files", "files read from"),
    ("memory", "bytes of memory filled"),
)
#: Pixels.
_WIDTH, _HEIGHT, _MARGIN, _GAP, _BAR, _CHARACTER = 960, 400, 16, 8, 26, 6.4
_FILES_AT, _RANKS_AT = 96, 324
#: Copies of one file and tensor that are closer than this in both rows are one ribbon.
_JOINED = 0.5
_COLORS = ("#0b6e4f", "#e09f3e", "#4a6fb5", "#c1121f", "#7b5ea7", "#3d9ca8", "#8a6d3b", "#5c677d")


def _degree(option: str, what: str) -> Any:
    return typer.Option(option, min=1, max=_MOST_RANKS, help=f"{what}-parallel degree.")


@app.command("plan", epilog="Example: [bold]elastic-ckpt plan /ckpt --dp 8 --tp 4 --pp 2[/]")
def plan(
    folder: Folder,
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
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw which bytes of which file go where in the planned ranks: an SVG.")
    ] = None,
    tag: Tag = None,
    config: Config = None,
    preset: Preset = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Plan a load on another topology, without a GPU: what each rank would read, and the memory that it fills.

    The planner is the one of a load. Degrees and ZeRO stage that are not given are those of the save.

    Exit code 1: the load would be refused. It says why, and what would help.
    """
    if rank is not None and every:
        raise typer.BadParameter("--rank plans one rank; --all needs them all")
    with errors_end_the_command(as_json):
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle)
        loading = LoadOptions.of(options, optimizer_states=not weights_only)
        try:
            metadata = open_folder(str(folder), tag, options, not weights_only).checkpoint.metadata
        except MismatchError as error:  # only live param groups could name the states
            error.remedy = f"--weights-only plans the weights alone: {error.remedy}"
            raise
    saved = metadata.source
    dp = dp or saved.partition_degree
    ep = ep or (math.gcd(saved.ep, dp) if any(map(expert_name, metadata.parameters)) else 1)
    stage = saved.zero_stage if zero is None else zero
    alignment = max(options.align_partitions, 1)
    topology = Topology(dp, tp or saved.tp, pp or saved.pp, stage, alignment=alignment, ep=ep)
    if topology.ranks > _MOST_RANKS:
        raise typer.BadParameter(f"{topology} would be {topology.ranks} ranks, and {_MOST_RANKS} are the most")
    if rank is not None and rank >= topology.ranks:
        raise typer.BadParameter(f"{topology} has the ranks 0 to {topology.ranks - 1}", param_hint="--rank")
    ranks = [rank] if rank is not None else some_of(topology.ranks, topology.ranks if every else _MOST_BY_DEFAULT)
    with errors_end_the_command(as_json, EXIT_FOUND):
        job = VirtualJob(metadata, topology, loading)
        with tqdm(ranks, desc="planning", unit=" ranks", leave=False, disable=True if as_json else None) as bar:
            found = [forecast(each, *job.planned(each), read_options(options)) for each in bar]
    if svg is not None:
        with errors_end_the_command(as_json):
            write_scatter(job, ranks, svg)
    in_detail = every or rank is not None
    if as_json:
        print_json(document(job, found, in_detail))
    else:
        print_wide(report(job, found, in_detail))


def some_of(ranks: int, most: int) -> list[int]:
    """At most so many ranks of a job: the first, the last, and others evenly between them."""
    if ranks <= most:
        return list(range(ranks))
    return [round(number * (ranks - 1) / (most - 1)) for number in range(most)]


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values), "total": sum(values)}


def _notes(job: VirtualJob, found: Sequence[RankForecast]) -> list[str]:
    topology, notes = job.topology, dict.fromkeys(note for each in found for note in each.notes)
    if topology.pp > 1 and topology.zero_stage > 1:
        return [f"DeepSpeed's pipeline engine refuses ZeRO-{topology.zero_stage}: take stage 0 or 1", *notes]
    return list(notes)


def document(job: VirtualJob, found: Sequence[RankForecast], in_detail: bool) -> dict[str, Any]:
    """The forecasts as plain data; ``in_detail``: with every planned rank."""
    files, fields = job.metadata.files, ("key", "dtype", "tensors", "numel", "padding")
    ranks = (
        {
            "rank": each.rank,
            "coordinates": dataclasses.asdict(job.topology.coordinates(each.rank)),
            **{key: getattr(each, key) for key, _ in _READS},
            "files": {files[file].path: nbytes for file, nbytes in sorted(each.by_file.items())},
            "filled": [dict(zip(fields, (*kind, *counts), strict=True)) for kind, counts in each.filled.items()],
        }
        for each in found
    )
    return {
        "source": source_dict(job.metadata.source) | {"files": len(files)},
        "target": dataclasses.asdict(job.topology) | {"ranks": job.topology.ranks},
        "ranks_planned": len(found),
        **{key: _spread([getattr(each, key) for each in found]) for key, _ in _READS},
        "notes": _notes(job, found),
        **({"ranks": list(ranks)} if in_detail else {}),
    }


def report(job: VirtualJob, found: Sequence[RankForecast], in_detail: bool) -> Iterator[RenderableType]:
    """All tables, in order."""
    yield _overview(job, found)
    shown = table("each rank", "", ">least", ">mean", ">most", ">all planned", min_width=_LEAST_WIDTH)
    for key, what in _READS:
        values = _spread([getattr(each, key) for each in found])
        if values["most"] or key == "nbytes_read":
            texts = [f"{value:,.0f}" if key in ("reads", "files") else size(value) for value in values.values()]
            shown.add_row(what, *texts[:3], "" if key == "files" else texts[3])
    yield shown
    most = max(found, key=lambda each: each.memory)
    heading = f"memory that is filled; rank {most.rank} has most"
    shown = table(heading, "", ">dtype", ">tensors", ">elements", ">bytes", min_width=_LEAST_WIDTH)
    for (key, dtype), (tensors, numel, padding) in most.filled.items():
        elements = f"{numel:,}" + (f", {padding:,} padding" if padding else "")
        shown.add_row(escape(title(key)), dtype, str(tensors), elements, size(numel * ITEMSIZE[dtype]))
    yield shown
    if in_detail:
        columns = ("rank", ">stage", ">dp", ">tp", ">read", ">reads", ">files", ">memory")
        shown = table("ranks", *columns, min_width=_LEAST_WIDTH)
        for each in found:
            at = job.topology.coordinates(each.rank)
            numbers = map(str, (each.rank, at.pp_rank, at.partition_rank, at.tp_rank))
            shown.add_row(*numbers, size(each.nbytes_read), f"{each.reads:,}", str(each.files), size(each.memory))
        yield shown


def _overview(job: VirtualJob, found: Sequence[RankForecast]) -> Table:
    source, files = job.metadata.source, job.metadata.files
    shown = table("elastic_ckpt: plan of a load", min_width=_LEAST_WIDTH)
    total = size(sum(file.nbytes for file in files))
    about = f"{source.folder} ({source.format}, tag {source.tag}, {len(files)} files, {total})"
    by = f", DeepSpeed {source.ds_version}" if source.ds_version else ""
    shown.add_row("checkpoint", escape(about))
    shown.add_row("saved", escape(f"{saved_topology(source)}{by}"))
    shown.add_row("resumed", f"{job.topology}: {job.topology.ranks} ranks")
    if len(found) < job.topology.ranks:
        shown.add_row("planned", f"{len(found)} of them; --all plans every one")
    notes = _notes(job, found)
    for note in notes[:_NOTES_SHOWN]:
        shown.add_row("note", escape(note))
    if len(notes) > _NOTES_SHOWN:
        shown.add_row("note", f"and {len(notes) - _NOTES_SHOWN} more, with --json")
    return shown


class _Bar(NamedTuple):
    """A file or the memory of a rank: its bytes, where it is drawn, and what is written at it."""

    nbytes: int
    left: float
    width: float
    label: str

    def at(self, byte: float) -> float:
        """Where a byte of it is drawn."""
        return self.left + byte * self.width / max(self.nbytes, 1)


def write_scatter(job: VirtualJob, ranks: Sequence[int], path: Path) -> None:
    """Plan ``ranks``, and write the diagram to ``path``. Raises :class:`ConfigError` if it cannot be written there."""
    drawn = scatter(job, [(rank, job.planned(rank)[1].reads) for rank in ranks])
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        expected = "a path in a folder that is there"
        raise ConfigError("the diagram cannot be written", str(path), expected, str(error)) from error


def scatter(job: VirtualJob, plans: Sequence[tuple[int, ReadPlan]]) -> str:
    """The diagram of the plans of some ranks."""
    source, metadata_files = job.metadata.source, job.metadata.files
    read = {rank: bytes_by_file(plan) for rank, plan in plans}
    numbers = sorted({file for by_file in read.values() for file in by_file})
    names = [os.path.relpath(metadata_files[number].path, source.folder) for number in numbers]
    sizes = [metadata_files[number].nbytes for number in numbers]
    files = _row(sizes, [f"{name}, {size(nbytes)}" for name, nbytes in zip(names, sizes, strict=True)])
    memory = [_target_starts(plan)[-1] for _, plan in plans]
    ranks = _row(memory, [f"rank {rank} reads {size(sum(read[rank].values()))}" for rank, _ in plans])
    total = size(sum(chain.from_iterable(each.values() for each in read.values())))
    of = "" if len(plans) == job.topology.ranks else f" of {job.topology.ranks}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#ffffff"/>',
        _text(_MARGIN, 32, f"{saved_topology(source)}  →  {job.topology}", 'font-size="17" font-weight="bold"'),
        _text(_MARGIN, 54, f"{total} of {len(numbers)} files go to {len(plans)}{of} ranks, to each what it owns"),
    ]
    for (rank, plan), bar in zip(plans, ranks, strict=True):
        for at, number in enumerate(numbers):
            if nbytes := read[rank].get(number):
                title = xml_escape(printable(f"rank {rank} reads {nbytes:,} bytes of {names[at]}"))
                color, ribbons = _COLORS[at % len(_COLORS)], "".join(_ribbons(plan, number, files[at], bar))
                parts.append(f'<g fill="{color}" fill-opacity="0.5"><title>{title}</title>{ribbons}</g>')
    for at, bar in enumerate(files):
        parts += _drawn(bar, _FILES_AT, _COLORS[at % len(_COLORS)], _FILES_AT - 8)
    for (_, plan), bar in zip(plans, ranks, strict=True):
        parts += [*_drawn(bar, _RANKS_AT, "#333333", _RANKS_AT + _BAR + 18), *_target_names(plan, bar)]
    return "\n".join([*parts, "</svg>\n"])


def _row(sizes: Sequence[int], labels: Sequence[str]) -> list[_Bar]:
    """Bars beside each other, as wide as they have bytes."""
    space = _WIDTH - 2 * _MARGIN
    gap = min(_GAP, space / (4 * max(len(sizes), 1)))
    scale = (space - gap * (len(sizes) - 1)) / max(sum(sizes), 1)
    lefts = (_MARGIN + before * scale + at * gap for at, before in enumerate(accumulate(sizes, initial=0)))
    return [
        _Bar(nbytes, left, nbytes * scale, label) for nbytes, left, label in zip(sizes, lefts, labels, strict=False)
    ]


def _target_starts(plan: ReadPlan) -> list[int]:
    """Bytes of memory before each target, and of all."""
    return list(accumulate((target.numel * ITEMSIZE[target.dtype] for target in plan.targets), initial=0))


def _ribbons(plan: ReadPlan, file: int, source: _Bar, target: _Bar) -> Iterator[str]:
    """Paths from the ranges of a file to those of a rank; what is strided is drawn as the range that it spans."""
    starts, spans, last_target = _target_starts(plan), list[list[float]](), -1
    sources = chain.from_iterable(each.sources for each in plan.requantize_items)
    items = (item for item in chain(plan.items, sources) if item.file == file)
    for item in sorted(items, key=lambda item: (item.target, item.byte_offset)):
        width, to = ITEMSIZE[item.dtype], ITEMSIZE[plan.targets[item.target].dtype]
        numel = (item.rows - 1) * item.file_stride + item.numel
        begin, end = source.at(item.byte_offset), source.at(item.byte_offset + numel * width)
        first = target.at(starts[item.target] + item.target_offset * to)
        behind = target.at(starts[item.target] + item.target_stop * to)
        if item.target == last_target and begin - spans[-1][1] < _JOINED and abs(first - spans[-1][3]) < _JOINED:
            spans[-1][1], spans[-1][3] = max(spans[-1][1], end), behind
        else:
            spans.append([begin, end, first, behind])
        last_target = item.target
    top, bottom, middle = _FILES_AT + _BAR, _RANKS_AT, (_FILES_AT + _BAR + _RANKS_AT) / 2
    for begin, end, first, behind in spans:
        down = f"M{begin:.1f} {top}C{begin:.1f} {middle:g} {first:.1f} {middle:g} {first:.1f} {bottom}"
        yield f'<path d="{down}H{behind:.1f}C{behind:.1f} {middle:g} {end:.1f} {middle:g} {end:.1f} {top}Z"/>'


def _drawn(bar: _Bar, top: float, color: str, text_at: float) -> Iterator[str]:
    box = f'x="{bar.left:.1f}" y="{top}" width="{max(bar.width, 0.5):.1f}" height="{_BAR}"'
    yield f'<rect {box} rx="2" fill="{color}"><title>{xml_escape(printable(bar.label))}</title></rect>'
    if len(bar.label) * _CHARACTER < bar.width:
        yield _text(bar.left, text_at, bar.label)


def _target_names(plan: ReadPlan, bar: _Bar) -> Iterator[str]:
    """What is in the memory of a rank: masters, states, buffers, where there is room to write it."""
    starts = _target_starts(plan)
    for target, start, stop in zip(plan.targets, starts, starts[1:], strict=False):
        left = bar.at(start)
        if start:
            yield f'<rect x="{left:.1f}" y="{_RANKS_AT}" width="1" height="{_BAR}" fill="#ffffff"/>'
        text = target.name or ("masters" if target.key == "fp32" else target.key)
        if bar.at(stop) - left > (len(text) + 2) * _CHARACTER:
            yield _text(left + 5, _RANKS_AT + _BAR - 9, text, 'fill="#ffffff"')


def _text(x: float, y: float, text: str, style: str = 'fill="#333333"') -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{xml_escape(printable(text))}</text>'

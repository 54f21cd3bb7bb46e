"""``elastic-ckpt plan``: can it be loaded, does it fit, and what does each rank read? Tables fit in 100 columns."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from tqdm import tqdm

from elastic_ckpt.cli.output import EXIT_FOUND, FOLDERS, Answer, Tag, reads_checkpoint, refusal
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.batches import batch_for
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.errors import WITHOUT_STATES, ConfigError, ElasticCkptError, MismatchError, Remedy
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.saved_config import saved_config
from elastic_ckpt.io.coalesce import ReadOptions, read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import literal, saved_topology, size, source_dict, table, title
from elastic_ckpt.storage import medium_of
from elastic_ckpt.storage.media import OBJECT_STORE, Medium
from elastic_ckpt.tools.footprint import GPU, RunSettings
from elastic_ckpt.tools.frozen_weights import frozen_left_out
from elastic_ckpt.tools.models import DEEPSPEED_CONFIG, ModelName, model_metadata
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob, forecast

_MOST_RANKS = 1 << 20
#: Ranks planned of a larger job, unless all are asked for.
_MOST_BY_DEFAULT = 64
_LEAST_WIDTH = 72
_NOTES_SHOWN = 12
_ADDED_ROWS = "added_rows: only a load knows how many rows the live model adds; sizes here are the checkpoint's"
#: Keys of a forecast, and their titles.
_READS = {
    "nbytes_read": "bytes read",
    "nbytes_compared": "bytes compared before",
    "nbytes_received": "bytes received",
    "reads": "reads",
    "files": "files read from",
    "memory": "bytes of memory filled",
}
#: Where a model is that nobody has saved, and how to say otherwise.
_ASSUMED = Medium("local", "assumed")
_OTHER_STORAGE = 'for a network: "reading": {"storage": "network"} in --config'
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def _degree(option: str, what: str) -> Any:
    return typer.Option(option, min=1, help=f"{what}-parallel degree.")


def nbytes_of(text: str) -> int:
    """Bytes, from ``80GB`` or ``40GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG]i?B)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: write 80GB or 40GiB")
    return int(float(match[1]) * _UNITS[match[2]])


@reads_checkpoint("plan", epilog="Example: [bold]elastic-ckpt plan /ckpt --dp 8 --tp 4 --pp 2[/]")
def plan(
    config: ElasticConfig,
    deepspeed: Mapping[str, Any],
    folders: Annotated[list[str] | None, FOLDERS] = None,
    model: Annotated[
        ModelName | None, typer.Option("--model", help="Instead of DIR: a universal checkpoint of a well-known model.")
    ] = None,
    dp: Annotated[int | None, _degree("--dp", "Data")] = None,
    tp: Annotated[int | None, _degree("--tp", "Tensor")] = None,
    pp: Annotated[int | None, _degree("--pp", "Pipeline")] = None,
    ep: Annotated[int | None, _degree("--ep", "Expert")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")] = None,
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            "--gpu-memory",
            parser=nbytes_of,
            metavar="SIZE",
            help="Say whether the load fits into this GPU memory, such as 80GB.",
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Also show batch sizes that keep this global batch.")
    ] = None,
    max_micro_batch: Annotated[
        int | None,
        typer.Option("--max-micro-batch", min=1, help="Largest micro-batch per rank. Default: the saved one."),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="As with load_module_only=True: no optimizer states.")
    ] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Plan only this rank, in detail.")] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Plan and list every rank. By default, at most {_MOST_BY_DEFAULT} are planned."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw which rank reads which bytes: FILE.svg, .png or .pdf."),
    ] = None,
    tag: Tag = None,
) -> Answer:
    """Plan a load without a GPU: whether it works, whether it fits, and what each rank reads.

    It uses the planner of a load. Degrees default to those of the checkpoint. ZeRO stage, precision, offload and batch
    sizes come from --config, or else from the checkpoint. --zero overrides the stage.

    Exit code 1: the load would be refused, for the reason that is printed, or does not fit into --gpu-memory.
    """
    if rank is not None and every:
        raise typer.BadParameter("--rank plans one rank, and --all plans all: give only one of them")
    if bool(folders) == bool(model):
        raise typer.BadParameter("Missing argument 'DIR...'; or give only --model")
    try:
        metadata, before, batch = _opened(folders, tag, config, not weights_only, model)
    except MismatchError as error:  # only live param groups could name the states
        error.remedies = (WITHOUT_STATES, *error.remedies)
        raise
    saved = metadata.source
    dp = dp or saved.partition_degree
    ep = ep or (math.gcd(saved.ep, dp) if any(map(expert_name, metadata.parameters)) else 1)
    run = RunSettings.of(deepspeed, before)
    run = run if zero is None else dataclasses.replace(run, zero_stage=zero)
    alignment = max(config.align_partitions, 1)
    topology = Topology(dp, tp or saved.tp, pp or saved.pp, run.zero_stage, alignment=alignment, ep=ep)
    if topology.ranks > _MOST_RANKS:
        raise typer.BadParameter(f"{topology} would be {counted(topology.ranks, 'rank')}; the limit is {_MOST_RANKS}")
    if rank is not None and rank >= topology.ranks:
        raise typer.BadParameter(f"{topology} has the ranks 0 to {topology.ranks - 1}", param_hint="--rank")
    ranks = [rank] if rank is not None else some_of(topology.ranks, topology.ranks if every else _MOST_BY_DEFAULT)
    medium = _ASSUMED if model and config.reading.storage == "auto" else medium_of(saved.folder, config.reading.storage)
    options = read_options(config, medium)
    try:
        job = VirtualJob(metadata, topology, LoadOptions.of(config, optimizer_states=not weights_only))
        with tqdm(ranks, desc="planning", unit=" ranks", leave=False, disable=None) as bar:
            found = [_planned(job, each, options, run) for each in bar]
    except ElasticCkptError as error:
        return _refusal(error, _change(model or saved_topology(saved), str(topology)))
    if plot is not None:
        try:
            from elastic_ckpt.cli.plot import draw  # noqa: PLC0415  matplotlib is an extra
        except ImportError as error:
            remedy = Remedy(command=("pip", "install", "matplotlib>=3.6"))
            raise ConfigError("--plot needs matplotlib", found=str(error), remedy=remedy) from error
        draw(job, ranks, plot)
    shown = {"storage": str(medium), **document(job, found)}
    if global_batch is not None:
        shown["batch"] = _kept_batch(saved, dp, global_batch, max_micro_batch or batch.micro_batch)
    shown = {**answer(job, shown, (before, run), batch, gpu_memory, model), **shown}
    parts = [shown["answer"], *report(job, shown, in_detail=every or rank is not None)]
    if not every and rank is None:
        del shown["ranks"]
    return Answer(shown, parts, exit_code=EXIT_FOUND if shown["fits"] is False else 0)


def _refusal(error: ElasticCkptError, change: str) -> Answer:
    """That a load would be refused, and why. Wrong usage is raised again: it is no answer."""
    error.file = error.file or None  # of a model, there is none
    if isinstance(error, ConfigError):
        raise error
    refused = refusal(error, EXIT_FOUND)
    said = f"Loads: no. {change}"
    return dataclasses.replace(refused, document={"answer": said, "loads": False, **refused.document}, parts=[said])


def _kept_batch(saved: SourceFacts, dp: int, global_batch: int, max_micro_batch: int | None) -> dict[str, Any]:
    """The batch sizes that data-parallel ranks can have, as a DeepSpeed config wants them."""
    if max_micro_batch is None:
        raise typer.BadParameter("the checkpoint does not record a micro-batch", param_hint="--max-micro-batch")
    kept = batch_for(saved.sequence.data_degree(dp), global_batch, max_micro_batch)
    return kept.config | {"learning_rate_factor": kept.learning_rate_factor}


def _opened(
    folders: list[str] | None, tag: str | None, config: ElasticConfig, with_states: bool, model: ModelName | None
) -> tuple[CheckpointMetadata, RunSettings, BatchSizes]:
    """The checkpoint's metadata, and the settings and batch sizes of the run that saved it."""
    if model is not None:
        return model_metadata(model), RunSettings.of(DEEPSPEED_CONFIG, RunSettings(1)), BatchSizes()
    opened = open_folder((folders or [""])[0], tag, config, with_states)
    stage = opened.metadata.source.zero_stage
    checkpoint = opened.checkpoint
    written = None
    if not opened.found.foreign:
        written = saved_config(open_pickled(checkpoint.model_path, config.trust_pickle))
    settings = dataclasses.replace(RunSettings.of(written or {}, RunSettings(stage)), zero_stage=stage)
    return checkpoint.metadata, settings, checkpoint.training_state.batch


def _planned(job: VirtualJob, rank: int, options: ReadOptions, run: RunSettings) -> dict[str, Any]:
    state, plan = job.planned(rank)
    foretold = forecast(state, plan, options)
    return {"rank": rank, **foretold, "after_load": run.memory(state, foretold["filled"])}


def _change(saved: str, now: str) -> str:
    """A topology and another one in one line, without punctuation: ZeRO-3 DP 2 -> ZeRO-2 DP 1."""
    before, after = (text.replace(", ", " ").replace("=", " ") for text in (saved, now))
    return before if before == after else f"{before} -> {after}"


def answer(
    job: VirtualJob,
    shown: dict[str, Any],
    runs: tuple[RunSettings, RunSettings],
    saved: BatchSizes,
    gpu_memory: int | None,
    model: str | None,
) -> dict[str, Any]:
    """Whether it loads, onto what, and what changes, in one line and as plain data."""
    before, run = runs
    most = max(shown["ranks"], key=lambda each: _at(each, GPU))
    needed = _at(most, GPU)
    others = sorted({each["place"] for each in most["after_load"]} - {GPU})
    batch, refused = run.batch(job.topology.dp, saved)
    if kept := shown.get("batch"):  # --global-batch asks for another than the config's
        batch = kept["train_batch_size"]
        refused = ""
    left_out = frozen_left_out(job.metadata)
    fits = None if gpu_memory is None else needed <= gpu_memory
    verdict = "" if fits is None else f" {'Fits' if fits else 'Does not fit'} into {size(gpu_memory or 0)}."
    if fits and left_out is not None:
        fits = None
        verdict = (
            f" Whether it fits into {size(gpu_memory or 0)} is unknown: {left_out.what} are not in the checkpoint."
        )
    shown["notes"] = [*filter(None, (refused, left_out and str(left_out))), *shown["notes"]]
    said = [f"{_change(model or saved_topology(job.metadata.source), str(job.topology))}, {size(needed)} per GPU"]
    said += [f"{size(_at(most, place))} on {place}" for place in others]
    said += [_change(*(each.precision for each in runs))] if before.precision != run.precision or model else []
    said += [f"global batch {_change(*map(str, (saved.global_batch, batch)))}"] if batch and saved.global_batch else []
    return {
        "answer": f"Loads: yes. {', '.join(said)}.{verdict}",
        "loads": True,
        "fits": fits,
        "gpu_nbytes": needed,
        "precision": run.precision,
        "offload": {"optimizer": run.optimizer, "weights": run.weights},
        "global_batch": {"saved": saved.global_batch, "now": batch},
    }


def _at(rank: Mapping[str, Any], place: str) -> int:
    return sum(each["nbytes"] for each in rank["after_load"] if each["place"] == place)


def some_of(ranks: int, most: int) -> list[int]:
    """At most so many ranks of a job: the first, the last, and others evenly between them."""
    if ranks <= most:
        return list(range(ranks))
    return [round(number * (ranks - 1) / (most - 1)) for number in range(most)]


def document(job: VirtualJob, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The forecasts of the planned ranks, and what they have in common, as plain data."""
    topology = job.topology
    spreads = {}
    for key in _READS:
        values = [len(each[key]) if key == "files" else each[key] for each in found]
        mean = sum(values) / len(values)
        spreads[key] = {"least": min(values), "mean": mean, "most": max(values), "total": sum(values)}
    said = chain.from_iterable(each.pop("notes") for each in found)
    notes = [*dict.fromkeys(re.sub(r" \(\d+\)(?=,|$)", "", note) if topology.pp > 1 else note for note in said)]
    if job.options.config.added_rows:
        notes = [_ADDED_ROWS, *notes]
    if topology.pp > 1 and topology.zero_stage > 1:
        notes = [f"DeepSpeed's pipeline engine refuses ZeRO-{topology.zero_stage}: use stage 0 or 1", *notes]
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
    source = job.metadata.source
    files = job.metadata.files
    ranks = shown["ranks"]
    notes = shown["notes"]
    about = f"{source.format}, tag {source.tag}, {counted(len(files), 'file')}, {size(sum(f.nbytes for f in files))}"
    by = f", DeepSpeed {source.ds_version}" if source.ds_version else ""
    facts = [("checkpoint", literal(f"{source.folder} ({about})".strip()))]
    if source.folder:  # else it is a model's
        facts += [("saved", literal(f"{saved_topology(source)}{by}"))]
    how = literal(f"; {_OTHER_STORAGE}") if shown["storage"] == str(_ASSUMED) else ""
    facts += [("storage", shown["storage"] + how)]
    facts += [("resumed", f"{job.topology}: {counted(job.topology.ranks, 'rank')}, {shown['precision']}")]
    if kept := shown.get("batch"):
        total, micro_batch, steps, factor = kept.values()
        rate = "" if factor == 1 else f"; learning rate x {factor:.4g}, if it is proportional to the batch"
        facts += [("batch", f"{total} samples: micro-batch {micro_batch}, gradient_accumulation_steps={steps}{rate}")]
    if len(ranks) < job.topology.ranks:
        facts += [("planned", f"{len(ranks)} of them; --all plans all")]
    facts += [("note", literal(note)) for note in notes[:_NOTES_SHOWN]]
    if len(notes) > _NOTES_SHOWN:
        facts += [("note", f"and {len(notes) - _NOTES_SHOWN} more, with --json")]
    yield table("elastic_ckpt: plan of a load", rows=facts, min_width=_LEAST_WIDTH)
    rows = list[tuple[Any, ...]]()
    titles = _READS | ({"reads": "requests"} if shown["storage"] == str(OBJECT_STORE) else {})
    for key, what in titles.items():
        if shown[key]["most"] or key == "nbytes_read":
            texts = [f"{value:,.0f}" if key in ("reads", "files") else size(value) for value in shown[key].values()]
            rows.append((what, *texts[:3], "" if key == "files" else texts[3]))
    yield table("each rank", "", ">least", ">mean", ">most", ">all planned", rows=rows, min_width=_LEAST_WIDTH)
    most = max(ranks, key=lambda each: _at(each, GPU))
    rows = list[tuple[Any, ...]]()
    for each in most["after_load"]:
        elements = f"{each['numel']:,}" + (f", {each['padding']:,} padding" if each["padding"] else "")
        where = (literal(title(each["key"])), each["place"], each["dtype"], each["tensors"])
        rows.append((*where, elements, size(each["nbytes"])))
    heading = f"memory after loading (no gradients, activations); largest: rank {most['rank']}"
    yield table(heading, "", "on", ">dtype", ">tensors", ">elements", ">bytes", rows=rows, min_width=_LEAST_WIDTH)
    if in_detail:
        rows = []
        for each in ranks:
            at = (each["rank"], *(each["coordinates"][name] for name in ("pp_rank", "partition_rank", "tp_rank")))
            read = (size(each["nbytes_read"]), f"{each['reads']:,}", len(each["files"]))
            rows.append((*at, *read, size(each["memory"])))
        columns = ("rank", ">stage", ">dp", ">tp", ">read", ">reads", ">files", ">memory")
        yield table("ranks", *columns, rows=rows, min_width=_LEAST_WIDTH)

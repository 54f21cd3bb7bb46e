"""``elastic-ckpt plan``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from tqdm import tqdm

from elastic_ckpt.cli import AsJson, Config, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import (
    EXIT_FOUND,
    error_as_dict,
    error_console,
    errors_end_the_command,
    print_json,
    print_wide,
)
from elastic_ckpt.cli.plan_view import document, draw, refuse_without_matplotlib, report
from elastic_ckpt.cli.scatter import write_scatter
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.experts import expert_name
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.sharding.rules import Preset as TPPreset
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.forecast import DEFAULT_BANDWIDTH, MOST_BY_DEFAULT, Cluster, LiveRun, Survey, survey
from elastic_ckpt.tools.virtual.scale import ScaleModel, scale_metadata

_EXAMPLE = "Example: [bold]elastic-ckpt plan /ckpt --dp 8 --tp 4 --pp 2 --nodes 8 --bandwidth 5GB/s[/]"
_RANKS_PER_NODE = 8
_MOST_RANKS = 1 << 20
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|bit)(?:/s)?")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_Dtype = Literal["bf16", "fp16", "fp32"]


def bandwidth_of(text: str) -> float:
    """Bytes per second, from ``5GB/s`` or ``25Gbit/s``. Raises :class:`typer.BadParameter` if it is neither."""
    match = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
    if match is None or not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r} is no bandwidth; write 5GB/s, 800MB/s or 25Gbit/s")
    return value / 8 if match[4] == "bit" else value


@app.command("plan", epilog=_EXAMPLE)
def plan(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder with a [bold]latest[/] file, or the folder of one tag."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=f"No checkpoint, but the one of a big model: {', '.join(ScaleModel.names())}, or a JSON file.",
        ),
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, max=_MOST_RANKS, help="Data-parallel degree.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, max=_MOST_RANKS, help="Tensor-parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, max=_MOST_RANKS, help="Pipeline-parallel degree.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, max=_MOST_RANKS, help="Expert-parallel degree.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")] = None,
    sub_group_size: Annotated[
        int, typer.Option("--sub-group-size", min=1, help="[bold]sub_group_size[/] of ZeRO-3.")
    ] = 1_000_000_000,
    offload: Annotated[
        Literal["none", "cpu"], typer.Option("--offload", help="Masters and optimizer states in host memory.")
    ] = "none",
    precision: Annotated[_Dtype, typer.Option("--precision", help="Of the weights.")] = "bf16",
    gradients: Annotated[_Dtype, typer.Option("--gradients", help="Of the gradients that are accumulated.")] = "fp32",
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes that the ranks are packed on; default: 8 ranks each.")
    ] = None,
    bandwidth: Annotated[
        float,
        typer.Option("--bandwidth", parser=bandwidth_of, metavar="RATE", help="What a node reads: 5GB/s, 25Gbit/s."),
    ] = f"{DEFAULT_BANDWIDTH / 1e9:g}GB/s",  # type: ignore[assignment]  # its parser makes a float
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Of load_module_only=True: neither optimizer states nor their memory."),
    ] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Plan this rank alone, in detail.")] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Plan and list every rank; by default, of a big job, {MOST_BY_DEFAULT} of them."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw which file feeds which rank: a picture (.png, .pdf, .svg).")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw which bytes of which file go where in the planned ranks: an SVG.")
    ] = None,
    tag: Tag = None,
    config: Config = None,
    preset: Preset = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Plan a load on another topology, without a GPU: what each rank would read and need, and how long that takes.

    The planner is the one of a load. Degrees and ZeRO stage that are not given are those of the save.

    Exit code 1: the load would be refused. It says why, and what would help.
    """
    every_one = every or plot is not None
    if (folder is None) == (model is None):
        raise typer.BadParameter("give either the folder of a checkpoint, or --model")
    if rank is not None and every_one:
        raise typer.BadParameter("--rank plans one rank; --all and --plot need them all")
    with errors_end_the_command(as_json):
        if plot is not None:
            refuse_without_matplotlib()
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None)
        if model is not None:
            name, metadata, options = _of_model(model, options)
        else:
            name, metadata = _of_folder(str(folder), tag, options, not weights_only)
        loading = LoadOptions.of(options, optimizer_states=not weights_only)
    saved = metadata.source
    stage = saved.zero_stage if zero is None else zero
    alignment = max(options.align_partitions, 1)
    dp = dp or saved.dp
    ep = ep or (math.gcd(saved.ep, dp) if any(map(expert_name, metadata.parameters)) else 1)
    topology = Topology(dp, tp or saved.tp, pp or saved.pp, stage, sub_group_size, alignment, ep)
    if topology.ranks > _MOST_RANKS:
        raise typer.BadParameter(f"{topology} would be {topology.ranks} ranks, and {_MOST_RANKS} are the most")
    if rank is not None and rank >= topology.ranks:
        raise typer.BadParameter(f"{topology} has the ranks 0 to {topology.ranks - 1}", param_hint="--rank")
    cluster = Cluster(topology.ranks, nodes or -(-topology.ranks // _RANKS_PER_NODE), bandwidth)
    run = LiveRun(_TORCH_NAMES[precision], _TORCH_NAMES[gradients], offload == "cpu", read_options(options))
    with _refusals_end_the_command(as_json):
        job = VirtualJob(metadata, topology, loading)
        ranks = [rank] if rank is not None else list(range(topology.ranks)) if every_one else cluster.some_ranks()
        with tqdm(ranks, desc="planning", unit=" ranks", leave=False, disable=True if as_json else None) as bar:
            found: Survey = survey(job, bar, cluster, run)
    with errors_end_the_command(as_json):
        if plot is not None:
            draw(job, found.ranks, plot)
        if svg is not None:
            write_scatter(job, ranks, svg)
    in_detail = every or rank is not None
    if as_json:
        print_json(document(job, found, name, in_detail))
    else:
        print_wide(report(job, found, name, in_detail))


def _of_folder(
    folder: str, tag: str | None, config: ElasticConfig, with_states: bool
) -> tuple[str, CheckpointMetadata]:
    try:
        opened = open_folder(folder, tag, config, with_states)
    except MismatchError as error:  # only live param groups could name the states
        if with_states:
            error.remedy = f"--weights-only plans the weights alone: {error.remedy}"
        raise
    return opened.found.folder, opened.checkpoint.metadata


def _of_model(name: str, config: ElasticConfig) -> tuple[str, CheckpointMetadata, ElasticConfig]:
    """Name and metadata of a large model's checkpoint, and the options with its preset."""
    model = ScaleModel.load(name)
    if config.tp_preset is None and model.preset is not None:
        config = config.model_copy(update={"tp_preset": model.preset})
    return model.name, scale_metadata(model), config


@contextmanager
def _refusals_end_the_command(as_json: bool) -> Iterator[None]:
    try:
        yield
    except ElasticCkptError as error:
        hint = ""
        if "tp_" in (error.remedy or ""):  # a live model may provide the layout
            hint = (
                f"--tp-preset NAME ({', '.join(TPPreset.names())}, or a JSON file), or --config FILE with the lines "
                "above; in a load, parameters of Megatron Core and AutoTP say how they are sharded"
            )
        if as_json:
            print_json({"refused": {**error_as_dict(error), **({"option": hint} if hint else {})}})
        else:
            error_console.print(f"[bold red]refused[/]: {escape(str(error))}", soft_wrap=True)
            if hint:
                error_console.print(f"  {'option:':<11}{escape(hint)}", soft_wrap=True, highlight=False)
        raise typer.Exit(EXIT_FOUND) from error

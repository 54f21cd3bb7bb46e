"""``elastic-ckpt plan``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.markup import escape
from tqdm import tqdm

from elastic_ckpt.cli.app import AsJson, Config, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import (
    EXIT_FOUND,
    error_as_dict,
    error_console,
    errors_end_the_command,
    print_json,
    print_wide,
)
from elastic_ckpt.cli.plan_document import document
from elastic_ckpt.cli.plan_options import (
    MOST_RANKS,
    Bandwidth,
    Dp,
    Dtype,
    Every,
    Gradients,
    MaybeFolder,
    Model,
    Nodes,
    Offload,
    OffloadTo,
    Plot,
    Pp,
    Rank,
    SubGroupSize,
    Tp,
    Weights,
    WeightsOnly,
    Zero,
)
from elastic_ckpt.cli.plan_plot import draw, refuse_without_matplotlib
from elastic_ckpt.cli.plan_view import report
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError
from elastic_ckpt.io.reader import read_options
from elastic_ckpt.sharding.presets import Preset as Presets
from elastic_ckpt.tools.cluster import DEFAULT_BANDWIDTH, Cluster
from elastic_ckpt.tools.forecast import Precision
from elastic_ckpt.tools.opened import config_of, load_options, open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.scale import scale_metadata
from elastic_ckpt.tools.virtual.scale_config import ScaleModel
from elastic_ckpt.tools.virtual.survey import Setting, Survey, some_ranks, survey

_EXAMPLE = "Example: [bold]elastic-ckpt plan /ckpt --dp 8 --tp 4 --pp 2 --nodes 8 --bandwidth 5GB/s[/]"
_RANKS_PER_NODE = 8


@app.command("plan", epilog=_EXAMPLE)
def plan(
    folder: MaybeFolder = None,
    model: Model = None,
    dp: Dp = None,
    tp: Tp = None,
    pp: Pp = None,
    zero: Zero = None,
    sub_group_size: SubGroupSize = 1_000_000_000,
    offload: OffloadTo = Offload.NONE,
    precision: Weights = Dtype.BF16,
    gradients: Gradients = Dtype.FP32,
    nodes: Nodes = None,
    bandwidth: Bandwidth = f"{DEFAULT_BANDWIDTH / 1e9:g}GB/s",  # type: ignore[assignment]  # its parser makes a float
    weights_only: WeightsOnly = False,
    rank: Rank = None,
    every: Every = False,
    plot: Plot = None,
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
    _refuse_wrong_usage(folder, model, rank, every or plot is not None)
    with errors_end_the_command(as_json):
        if plot is not None:
            refuse_without_matplotlib()
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None)
        source = _of_model(model, options) if model else _of_folder(str(folder), tag, options, not weights_only)
        loading = load_options(source.config, not weights_only)
    topology = _topology(source, dp, tp, pp, zero, sub_group_size, rank or 0)
    cluster = Cluster(topology.ranks, nodes or -(-topology.ranks // _RANKS_PER_NODE), bandwidth)
    setting = _setting(source.config, cluster, Precision(precision.long, gradients.long), offload)
    with _refusals_end_the_command(as_json):
        job = VirtualJob(source.metadata, topology, loading)
        found = _survey(job, setting, rank, every or plot is not None, as_json)
    with errors_end_the_command(as_json):
        if plot is not None:
            draw(job, found.ranks, plot)
    _print(job, found, setting, source.name, every or rank is not None, as_json)


def _refuse_wrong_usage(folder: Path | None, model: str | None, rank: int | None, needs_all: bool) -> None:
    if (folder is None) == (model is None):
        raise typer.BadParameter("give either the folder of a checkpoint, or --model")
    if rank is not None and needs_all:
        raise typer.BadParameter("--rank plans one rank; --all and --plot need them all")


@dataclass(frozen=True)
class _Source:
    """A checkpoint, or the one that a big model would have: its name, what it holds, and the options by which."""

    name: str
    metadata: CheckpointMetadata
    config: ElasticConfig


def _of_folder(folder: str, tag: str | None, config: ElasticConfig, with_states: bool) -> _Source:
    try:
        opened = open_folder(folder, tag, config, with_states)
    except MismatchError as error:  # states without names, which only live param groups could tell apart
        if with_states:
            error.remedy = f"--weights-only plans the weights alone; of a live run: {error.remedy}"
        raise
    return _Source(opened.found.folder, opened.checkpoint.metadata, config)


def _of_model(name: str, config: ElasticConfig) -> _Source:
    model = ScaleModel.load(name)
    if config.tp_preset is None and model.preset is not None:
        config = config.model_copy(update={"tp_preset": model.preset})
    return _Source(model.name, scale_metadata(model), config)


def _topology(
    source: _Source, dp: int | None, tp: int | None, pp: int | None, zero: int | None, sub_group_size: int, rank: int
) -> Topology:
    """What is not given is that of the save; ``rank`` is one of its ranks."""
    saved = source.metadata.source
    topology = Topology(
        dp=dp or saved.dp,
        tp=tp or saved.tp,
        pp=pp or saved.pp,
        zero_stage=saved.zero_stage if zero is None else zero,
        sub_group_numel=sub_group_size,
        alignment=max(source.config.align_partitions, 1),
    )
    if topology.ranks > MOST_RANKS:
        raise typer.BadParameter(f"{topology} would be {topology.ranks} ranks, and {MOST_RANKS} are the most")
    if rank >= topology.ranks:
        raise typer.BadParameter(f"{topology} has the ranks 0 to {topology.ranks - 1}", param_hint="--rank")
    return topology


def _setting(config: ElasticConfig, cluster: Cluster, precision: Precision, offload: Offload) -> Setting:
    return Setting(cluster, precision, read_options(config), offload is Offload.CPU)


def _survey(job: VirtualJob, setting: Setting, rank: int | None, every: bool, as_json: bool) -> Survey:
    total = job.topology.ranks
    numbers = [rank] if rank is not None else list(range(total)) if every else some_ranks(setting.cluster)
    with tqdm(numbers, desc="planning", unit=" ranks", leave=False, disable=True if as_json else None) as bar:
        return survey(job, bar, setting)


@contextmanager
def _refusals_end_the_command(as_json: bool) -> Iterator[None]:
    """Print why the load would be refused, and exit with 1."""
    try:
        yield
    except ElasticCkptError as error:
        remedy = error.remedy or ""
        hint = ""
        if "tp_" in remedy:  # a live model may say it by itself
            hint = (
                f"--preset NAME ({', '.join(Presets.names())}, or a JSON file), or --config FILE with the lines above; "
                "in a load, parameters of Megatron Core and AutoTP tell how they are held"
            )
        if as_json:
            print_json({"refused": {**error_as_dict(error), **({"option": hint} if hint else {})}})
        else:
            error_console.print(f"[bold red]refused[/]: {escape(str(error))}", soft_wrap=True)
            if hint:
                error_console.print(f"  {'option:':<11}{escape(hint)}", soft_wrap=True, highlight=False)
        raise typer.Exit(EXIT_FOUND) from error


def _print(job: VirtualJob, found: Survey, setting: Setting, name: str, in_detail: bool, as_json: bool) -> None:
    if as_json:
        print_json(document(job, found, setting, name, in_detail))
    else:
        print_wide(report(job, found, setting, name, in_detail))

"""``python -m benchmarks.scale``: what a checkpoint of many ranks costs one rank of the job that resumes it.

A real save of one rank is split into the files of many (:mod:`benchmarks.split`). All ranks of the resuming job read
their shares in one process and exchange what they read; then one rank is measured alone (:mod:`benchmarks.played`).
It needs no engine: live partitions are those of a virtual job. Checkpoints of large models are simulated: what their
files hold is exchanged as in a load, but read from no file.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.flat_cases import FILES, FlatCase
from benchmarks.flat_jobs import TAG
from benchmarks.launching import Launcher
from benchmarks.played import PlayedJob, in_turn
from benchmarks.report import growths
from benchmarks.scale_models import ScaleModel, scale_files
from benchmarks.split import split
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.formats.assembling import assemble
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.load.metadata import read_checkpoint, read_my_share
from elastic_ckpt.planning.live_names import name_states
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.opened import config_of, locate, open_checkpoint
from elastic_ckpt.tools.virtual import Topology, VirtualJob

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
#: Shape of each parameter. Of 1,000, each of 1,024 ranks has more than 4,096 elements, as of any model that is trained
#: on that many: values of fewer are looked into, to learn what they are.
_SHAPE = (96, 64)
_MIB = 1 << 20
_SAVE_TIMEOUT_S = 600.0
_REPEATS = 5
T = TypeVar("T")


@dataclass(frozen=True)
class ScalePoint:
    """What one rank needs for a checkpoint of ``ranks`` ranks.

    Attributes:
        job_ranks, live_ranks: ranks that share the files, and ranks that the model is partitioned over. There are fewer
            of the former, all of which have to be played; a large job's share of files is smaller.
        share_s, metadata_s, plan_s: CPU seconds for its share of the files, for what follows until the metadata of
            the whole checkpoint is known, and for its plan; of the last two the least of a few runs.
        extra_nbytes: most memory after its share of the files.
        sent_nbytes, received_nbytes: messages.
        files, items: files of the checkpoint, and items of the plan.
        find_s: CPU seconds in which rank 0 finds the checkpoint, while all others wait.
        format: of the checkpoint; the ranks of a universal one are those of the native one that it was made of.
        model: the large model, where it was simulated.
    """

    stage: int
    parameters: int
    ranks: int
    job_ranks: int
    live_ranks: int
    files: int
    share_s: float
    metadata_s: float
    plan_s: float
    extra_nbytes: int
    sent_nbytes: int
    received_nbytes: int
    items: int
    find_s: float = 0.0
    format: str = "native"
    model: str = ""


#: Large models, and the topology at which each is resumed.
MODELS = {
    "70b": Topology(dp=256, zero_stage=3),
    "bloom-176b": Topology(dp=4, tp=8, pp=6),
    "mixtral-8x7b": Topology(dp=32, ep=8),
    "deepseek-v3": Topology(dp=256, ep=64),
}


def measure(folder: Path, stage: int, parameters: int, ranks: int, job_ranks: int, live_ranks: int) -> ScalePoint:
    """Read and plan one rank's load."""
    found, find_s = _cpu_of(lambda: locate(str(folder), None))
    options = MetadataOptions(with_client_state=False)
    point = _measured(
        lambda: read_checkpoint(found, options).metadata, Topology(dp=live_ranks, zero_stage=stage), job_ranks
    )
    return replace(point, parameters=parameters, ranks=ranks, find_s=find_s, format=found.format)


def measure_model(name: str, live: Topology, job_ranks: int) -> ScalePoint:
    """Exchange and plan one rank's load of a large model's checkpoint, which is simulated."""
    model = ScaleModel.load(name)
    found, mp_ranks, files = scale_files(model)

    def read() -> CheckpointMetadata:
        return assemble(
            found, mp_ranks, read_my_share(in_turn(len(files)), lambda at: files[at]), MetadataOptions(), name_states
        ).metadata

    config = ElasticConfig.model_validate({"tp_preset": model.preset} if model.preset else {})
    point = _measured(read, live, job_ranks, LoadOptions.of(config))
    ranks = model.saved.dp * model.saved.tp * len(model.saved.stages)
    return replace(point, ranks=ranks, model=name)


def _measured(
    read: Callable[[], CheckpointMetadata], live: Topology, job_ranks: int, options: LoadOptions | None = None
) -> ScalePoint:
    job = PlayedJob(job_ranks)
    job.run_all(read)
    gc.collect()
    metadata, metadata_s = _cpu_of(lambda: job.run_first(read), lambda: job.share_s)
    share_s, numbers = job.share_s, (len(metadata.parameters), len(metadata.files))
    virtual = VirtualJob(metadata, live, options or LoadOptions())
    local_state = virtual.local_state(live.ranks // 2)

    def plan() -> LoadPlan:
        return plan_load(virtual.metadata, local_state, virtual.options)

    planned, plan_s = _cpu_of(plan)
    items = len(planned.reads.items)
    del metadata, planned
    gc.collect()
    job.run_first(lambda: (read(), plan()), trace=True)
    return ScalePoint(
        live.zero_stage,
        numbers[0],
        0,
        job_ranks,
        live.ranks,
        numbers[1],
        share_s,
        metadata_s,
        plan_s,
        job.traced_nbytes,
        job.sent_nbytes,
        job.received_nbytes,
        items,
    )


def _cpu_of(work: Callable[[], T], beside: Callable[[], float] = lambda: 0.0) -> tuple[T, float]:
    """The result of some work, and the least CPU seconds of a few runs, less those that are ``beside`` the point."""
    found = []
    for _ in range(_REPEATS):
        begin = time.process_time()
        result = work()
        found.append(time.process_time() - begin - beside())
    return result, min(found)


def _checkpoint(out: Path, launcher: Launcher, stage: int, parameters: int, ranks: int) -> Path:
    """The folder of a checkpoint, made unless it is there."""
    case = FlatCase(FILES, stage, parameters, 1, 1, 1, shape=_SHAPE)
    root = out / "checkpoints" / "scale"
    saved, folder = root / case.checkpoint / "native", root / f"{case.checkpoint}-split{ranks}"
    if not (saved / "latest").exists():
        launcher.run(1, "flat_save", {"root": str(root), "cases": [asdict(case)]}, _SAVE_TIMEOUT_S)
    if not (folder / "latest").exists():
        shutil.rmtree(folder, ignore_errors=True)
        split(saved / TAG, folder / TAG, ranks)
        (folder / "latest").write_text(TAG, encoding="utf-8")
    return folder


def _universal(out: Path, launcher: Launcher, stage: int, parameters: int) -> Path:
    """The folder of a universal checkpoint, of a save of one rank, made unless it is there."""
    native = _checkpoint(out, launcher, stage, parameters, ranks=1)
    folder = native.with_name(f"{native.name}-universal") / TAG
    if not folder.exists():
        convert(open_checkpoint(locate(str(native), None), config_of(None)), folder)
    return folder


def table_of(points: list[ScalePoint]) -> Table:
    """What was measured."""
    table = Table(title="one rank of the resuming job", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("format")
    for name in ("ZeRO", "parameters", "source ranks", "live ranks", "files"):
        table.add_column(name, justify="right")
    for name in ("rank 0 s", "share s", "metadata s", "plan s", "extra MiB", "sent KiB", "received KiB"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            point.model or point.format,
            *(f"{value:,}" for value in (point.stage, point.parameters, point.ranks, point.live_ranks, point.files)),
            *(f"{value:.3f}" for value in (point.find_s, point.share_s, point.metadata_s, point.plan_s)),
            f"{point.extra_nbytes / _MIB:.1f}",
            *(f"{value / 1024:,.0f}" for value in (point.sent_nbytes, point.received_nbytes)),
        )
    return table


@app.command()
def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Source ranks; 8, 64, 512 and 1,024 by default.")] = None,
    parameters: Annotated[int, typer.Option(min=1)] = 1000,
    stage: Annotated[list[int] | None, typer.Option(help="1 or 3; both by default.")] = None,
    job: Annotated[int, typer.Option(min=1, help="Ranks that share the files.")] = 64,
    live: Annotated[int, typer.Option(min=1, help="Ranks that the live model is partitioned over.")] = 2048,
    models: Annotated[bool, typer.Option(help="Large models too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("benchmark_results"),
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
) -> None:
    """Measure metadata and planning of checkpoints of many ranks, for one rank of the job that resumes them."""
    console = Console(width=None if Console().is_terminal else 150)
    launcher = Launcher(out / "logs", extensions or out / "extensions")
    points = []
    for each in stage or (1, 3):
        for count in ranks or (8, 64, 512, 1024):
            console.print(f"ZeRO-{each}, {count} ranks", style="dim")
            folder = _checkpoint(out, launcher, each, parameters, count)
            points.append(measure(folder, each, parameters, count, job, live))
        points.append(measure(_universal(out, launcher, each, parameters), each, parameters, 1, job, live))
    for name in MODELS if models else ():
        console.print(name, style="dim")
        points.append(measure_model(name, MODELS[name], job))
    document: dict[str, Any] = {"machine": machine.describe(), "points": [asdict(point) for point in points]}
    (out / "scale.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    console.print(table_of(points))
    for each, power in growths(document["points"]).items():
        console.print(f"ZeRO-{each}: seconds after its share of files grow with source ranks by the power {power:.2f}")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    app()

"""``python -m benchmarks.metadata``: what it costs to read the metadata of ``torch.save`` files."""

from __future__ import annotations

import gc
import json
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from rich.console import Console

from benchmarks import chart, machine, metadata_view, meter
from benchmarks.flat_cases import TINY
from benchmarks.results import Spread, spread
from elastic_ckpt.formats.pickled import open_pickled

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_FILES, _PARAMETERS = (1, 10, 100), (100, 1000, 10_000, 40_000)
_SAFE_GLOBALS = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@dataclass(frozen=True)
class MetadataCase:
    """So many files of a form, each with so many parameters."""

    form: str
    files: int
    parameters: int


@dataclass(frozen=True)
class MetadataPoint:
    """What one reader needs for all files of a case, with cyclic garbage collection ``off``, or ``on`` as it is."""

    case: MetadataCase
    reader: str
    collection: str
    wall: Spread
    cpu: Spread
    peak_nbytes: int


def model_states(parameters: int) -> dict[str, Any]:
    """A tree in the form of ``mp_rank_00_model_states.pt``: a tensor and a shape for each parameter."""
    module = {_name(number): torch.zeros(TINY, dtype=torch.bfloat16) for number in range(parameters)}
    shapes = {name: tensor.shape for name, tensor in module.items()}
    counters = {"global_steps": 10, "global_samples": 240, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1}
    return {"module": module, "buffer_names": [], "optimizer": None, "param_shapes": [shapes], **counters}


def optimizer_states(parameters: int) -> dict[str, Any]:
    """A tree in the form of ``zero_pp_rank_0_mp_rank_00_optim_states.pt``: an address for each parameter."""
    numel = parameters * TINY[0] * TINY[1]
    addresses = {
        _name(number): fragment_address(start=number * numel // parameters, numel=numel // parameters)
        for number in range(parameters)
    }
    states = {0: {"step": torch.tensor(10.0), "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}}
    optimizer = {
        "loss_scaler": DynamicLossScaler(2.0**16, 500, 0.5, 3, False, True, torch.bfloat16),
        "base_optimizer_state": {"state": states, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "single_partition_of_fp32_groups": [torch.zeros(numel)],
        "zero_stage": ZeroStageEnum(1),
        "param_slice_mappings": [addresses],
    }
    return {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}


def _name(number: int) -> str:
    return f"model.layers.{number // 10}.blocks.{number % 10}.weight"


def _torch_load(path: str) -> Any:
    return torch.load(path, map_location="meta", weights_only=True)


FORMS = {"model states": model_states, "optimizer states": optimizer_states}
READERS: dict[str, Callable[[str], Any]] = {
    "elastic_ckpt": open_pickled,
    "torch.load": _torch_load,  # map_location="meta", weights_only=True
    "zipfile": zipfile.ZipFile,  # the directory alone
}


def write_files(case: MetadataCase, folder: Path) -> list[str]:
    """Save the case's files; their paths."""
    paths = [folder / f"{number}.pt" for number in range(case.files)]
    torch.save(FORMS[case.form](case.parameters), paths[0])
    for path in paths[1:]:
        shutil.copyfile(paths[0], path)
    return list(map(str, paths))


def measure(case: MetadataCase, paths: Sequence[str], repeats: int) -> list[MetadataPoint]:
    """Every reader in turn, ``repeats`` times after once that does not count."""
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    peaks = {reader: _peak(read, paths) for reader, read in READERS.items()}
    for _ in range(repeats):
        for reader, read in READERS.items():
            for collection in ("off", "on"):
                samples.setdefault((reader, collection), []).append(_time(read, paths, collection))
    points = []
    for (reader, collection), seconds in samples.items():
        wall, cpu = (spread(values) for values in zip(*seconds, strict=True))
        points.append(MetadataPoint(case, reader, collection, wall, cpu, peaks[reader]))
    return points


def _time(read: Callable[[str], Any], paths: Sequence[str], collection: str) -> tuple[float, float]:
    """Seconds, and seconds of CPU, with all trees kept, as a load keeps them."""
    gc.collect()
    if collection == "off":
        gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        trees = [read(path) for path in paths]
        taken = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    del trees
    return taken


def _peak(read: Callable[[str], Any], paths: Sequence[str]) -> int:
    """How far resident memory rises."""
    meter.settle()
    meter.reset_peak()
    before = meter.resident()
    trees = [read(path) for path in paths]
    taken = max(meter.peak() - before, 0)
    del trees
    return taken


@app.command(epilog="Example: python -m benchmarks.metadata --most 10000 --out /data/metadata")
def main(
    out: Annotated[Path, typer.Option(help="Folder for results; files are made and deleted there.")] = Path(
        "benchmark_results"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 5,
    most: Annotated[int, typer.Option(min=100, help="Files x parameters, at most.")] = 40_000,
) -> None:
    """Measure seconds, CPU and memory of reading the metadata of many files, of many parameters each."""
    console = Console(width=None if Console().is_terminal else 150)
    hindrance = chart.hindrance()
    if hindrance:
        console.print(hindrance, style="yellow")
    points: list[MetadataPoint] = []
    folder = out / "metadata_files"
    cases = [MetadataCase(form, n, count) for form in FORMS for n in _FILES for count in _PARAMETERS]
    with torch.serialization.safe_globals(_SAFE_GLOBALS):
        for case in (each for each in cases if each.files * each.parameters <= most):
            console.print(f"{case.form}: {case.files} x {case.parameters:,} parameters", style="dim")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            points += measure(case, write_files(case, folder), repeats)
    shutil.rmtree(folder)
    document = {"machine": machine.describe(), "repeats": repeats, "points": list(map(asdict, points))}
    (out / "metadata.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    console.print(metadata_view.table(points))
    if not hindrance:
        metadata_view.draw(points, out / "metadata.png")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    app()

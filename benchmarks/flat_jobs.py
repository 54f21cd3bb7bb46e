"""The jobs of :mod:`benchmarks.flat`, on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from benchmarks import privates
from benchmarks.flat_cases import FlatCase
from benchmarks.held import Held, judge_parts
from benchmarks.meter import Meter, settle
from benchmarks.model import fill

TAG = "step10"
_IN_A_MODULE = 10


class Bag(nn.Module):
    """A few tiny parameters."""

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(*shape)) for _ in range(count))


class Bags(nn.Module):
    """So many tiny parameters, ten in a module."""

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        super().__init__()
        left = range(0, count, _IN_A_MODULE)
        self.bags = nn.ModuleList(Bag(min(_IN_A_MODULE, count - first), shape) for first in left)


def build_engine(case: FlatCase, saved: bool) -> Any:
    """A live engine with many small things."""
    model = Bags(case.parameters, case.shape).to(torch.bfloat16)
    if saved:
        for name, param in model.named_parameters():
            fill(param.data.view(-1), name, "fp32", 0)
    params = list(model.parameters())
    groups = [{"params": params[number :: case.groups]} for number in range(case.groups)]
    config = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 24 // dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
        "elastic_checkpoint": {"report": False},
    }
    with privates.unchecked_for_duplicates():
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)[0]


def flat_save(arguments: dict[str, Any]) -> None:
    """Save the checkpoints that this degree has to."""
    for values in arguments["cases"]:
        case = FlatCase(**values)
        folder = Path(arguments["root"]) / case.checkpoint / "native"
        engine = build_engine(case, saved=True)
        Held(engine).fill_as_saved()
        engine.save_checkpoint(str(folder), tag=TAG)
        _close(engine)


def flat_load(arguments: dict[str, Any]) -> None:
    """Load each case several times into an engine of its own; write down what all ranks measured, round by round."""
    elastic_ckpt.install()
    meter = Meter(cold=False)
    measured = [_load_case(FlatCase(**values), arguments, meter) for values in arguments["cases"]]
    if dist.get_rank() == 0:
        Path(arguments["out"]).write_text(json.dumps(measured), encoding="utf-8")


def _load_case(case: FlatCase, arguments: dict[str, Any], meter: Meter) -> dict[str, Any]:
    folder = Path(arguments["root"]) / case.checkpoint / case.source
    engine = build_engine(case, saved=False)
    held = Held(engine)
    rounds: list[Any] = []
    for number in range(arguments["repeats"] + 1):
        privates.drop_states(engine)
        cost = meter.measure(lambda: engine.load_checkpoint(str(folder)), folder, 0)
        if number == 0 and not all(judge_parts(held.parts()).values()):
            raise AssertionError(f"{case} was not restored as it was saved")
        mine = engine.elastic_report.mine
        told = {"phases": dict(mine.seconds), "tensor_nbytes": mine.read.nbytes}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, {**asdict(cost), **told})
        rounds.append(everybody)
    del held
    _close(engine)
    return {"case": asdict(case), "rounds": rounds[1:], "files": _count(folder)}


def _count(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def _close(engine: Any) -> None:
    engine.destroy()
    settle()

"""Jobs with a module that keeps extra state (``get_extra_state``), of many kinds, saved and loaded at other topologies."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import truth as oracle
from tests.distributed.jobs import SPOILS, truth_of
from tests.distributed.model import TinyLM, build_engine, close, train

WIDTH = 4


class Diary:
    """A class of the user's own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Diary) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


def _stream(number: int) -> io.BytesIO:
    """As older Transformer Engines save it."""
    torch.save({"scale": torch.full((3,), float(number))}, stream := io.BytesIO())
    stream.seek(0)
    return stream


#: What a module may keep, given a number that tells values apart.
KINDS: dict[str, Callable[[int], Any]] = {
    "dictionary": lambda number: {
        "count": number,
        "history": torch.arange(5.0) + number,
        "nested": OrderedDict(rates=[0.5, (float(number), "text")], none=None),
        "array": np.arange(3) * number,
    },
    "tensor": lambda number: torch.full((2, 3), float(number), dtype=torch.bfloat16).t(),
    "stream": _stream,
    "bytes": lambda number: bytearray([number, 2, 3]),
    # as Transformer Engine saves it
    "packed": lambda number: torch.frombuffer(bytearray(pickle.dumps({"scale": number})), dtype=torch.uint8),
    "number": lambda number: number,
    "object": lambda number: Diary(f"day {number}"),
    "none": lambda number: None,
}


class Gauge(nn.Module):
    """Keeps a value beside its weights.

    Args:
        value: what it keeps.
        refuses: whether it takes no other.
    """

    def __init__(self, value: Any, refuses: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.value = value
        self.refuses = refuses
        self.times_set = 0

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise KeyError("amax_history")
        self.value = state
        self.times_set += 1


class GaugedLM(TinyLM):
    """A model with such a module, which has a second name, and is itself inside of another."""

    def __init__(self, gauge: nn.Module | None, seed: int = 7) -> None:
        super().__init__(seed)
        self.inner = nn.Module()
        if gauge is not None:
            self.inner.gauge = self.inner.same = gauge

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        return loss + self.inner.gauge.weight.square().sum() if hasattr(self.inner, "gauge") else loss


def _gauge(case: dict[str, Any], number: int) -> nn.Module | None:
    """The module of a case; ``kind``: of its state, none without; ``module``: which."""
    kinds = {"gauge": Gauge, "linear": _Linear, "none": lambda value: None}
    made: nn.Module | None = kinds[case.get("module", "gauge")](KINDS[case["kind"]](number))
    return made


class _Linear(nn.Module):
    """The weight alone."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))


def save_each(cases: list[dict[str, Any]]) -> None:
    """Save a run whose module keeps ``kind``, another value on each rank if ``by_rank``."""
    for case in cases:
        number = 1 + dist.get_rank() if case.get("by_rank") else 1
        engine = build_engine(case["setup"], GaugedLM(_gauge(case, number)))
        train(engine, 0, 2)
        engine.save_checkpoint(case["folder"], tag="step4")
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        if dist.get_rank() == 0:
            torch.save(truth, f"{case['folder']}/truth.pt")
        close(engine)
        dist.barrier()


def load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load into an engine whose module keeps another value, and takes it unless it ``refuses``.

    ``arguments``: of the load; ``config``: of elastic_ckpt; ``expected``: of each rank, the number of the value that it
    is to have; ``allows``: whether the user allows the class of the saved value.
    """
    if case.get("allows"):
        torch.serialization.add_safe_globals([Diary])
    elastic_ckpt.install()
    gauge = _gauge({"kind": case["kind"], "module": case.get("module", "gauge")}, 77)
    setup = replace(case["setup"], config=(("elastic_checkpoint", case.get("config", {})),))
    engine = build_engine(setup, GaugedLM(gauge, seed=8))
    train(engine, 50, 51)
    if case.get("refuses"):
        gauge.refuses = dist.get_rank() == 0
    engine._config.load_universal_checkpoint = case.get("format") == "universal"
    error = None
    try:
        engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
    except ElasticCkptError as raised:
        error = raised
    expected = case.get("expected", [1] * dist.get_world_size())[dist.get_rank()]
    differences = {} if error else oracle.differences(engine, truth_of(case["folder"]))
    report = engine.elastic_report
    found = SimpleNamespace(
        error=error,
        value=_text(getattr(gauge, "value", None)),
        expected=_text(KINDS[case["kind"]](expected + SPOILS)),
        times_set=getattr(gauge, "times_set", 0),
        differences=differences,
        outcomes={}
        if report is None
        else {each.what: each.names for each in report.outcomes if each.role == "extra state"},
        report=report,
    )
    torch.serialization.clear_safe_globals()
    close(engine)
    return [found]


def _text(value: Any) -> str:
    """All of a value, for a comparison."""
    if isinstance(value, io.BytesIO):
        return f"stream at {value.tell()}: {value.getvalue().hex()}"
    if isinstance(value, Diary):
        return value.text
    return repr(value)


def look_at(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What the commands say of a save whose module keeps a number: notes, and a comparison with another number."""
    folder = Path(case["folder"])
    with tempfile.TemporaryDirectory() as name:
        other = Path(name, "other")
        shutil.copytree(folder, other)
        for path in other.glob("*/*model_states.pt"):
            saved = torch.load(path, weights_only=False)
            for entry in [entry for entry in saved["module"] if entry.endswith("inner.gauge._extra_state")]:
                saved["module"][entry] += 1 - SPOILS
            torch.save(saved, path)
        inspected = _ran("inspect", folder, "--json")
        verified = _ran("verify", folder, "--json")
        compared = _ran("diff", folder, other, "--json")
        found = SimpleNamespace(
            inspected=[each["parameter"] for each in inspected["findings"] if each["kind"] == "extra-state"],
            verified=[each["parameter"] for each in verified["notes"] if each["code"] == "extra-state"],
            differences=[(each["name"], each["what"]) for each in compared["differences"]],
            same=_ran("diff", folder, folder, "--json")["kinds"]["extra states of modules"],
            exported=_ran("export", folder, Path(name, "weights"), "--json")["notes"],
            converted=_ran("convert", folder, Path(name, "dcp"), "--to", "dcp", "--json")["notes"],
        )
    return [found]


def _ran(command: str, *words: object) -> Any:
    """The answer of a command."""
    return json.loads(CliRunner().invoke(app, [command, *map(str, words)], catch_exceptions=False).stdout)


class _Layer(nn.Linear):
    """A layer of a pipeline that keeps a number."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gauge = Gauge(number)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) + self.gauge.weight.sum()


def _pipeline(stages: int, first: int, stage: int) -> Any:
    """An engine of four such layers; the first and the last are one module, which is tied, and keeps ``first``."""
    synchronized = ["weight", "bias", "gauge.weight"]
    tied = partial(TiedLayerSpec, "tie", _Layer, first, tied_weight_attr=synchronized)
    specs = [tied(), LayerSpec(_Layer, first + 1), LayerSpec(_Layer, first + 2), tied()]
    model = PipelineModule(specs, num_stages=stages, loss_fn=nn.MSELoss(), seed_layers=True, partition_method="uniform")
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 12 // (dist.get_world_size() // stages),
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    rows = config["train_micro_batch_size_per_gpu"]
    engine.train_batch(iter([(torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH))]))
    return engine


def _kept(engine: Any) -> dict[str, Any]:
    """By name, what the modules of this stage keep."""
    state = engine.module.state_dict()
    return {name: value for name, value in state.items() if name.endswith("._extra_state")}


def save_pipeline(case: dict[str, Any]) -> None:
    """Save one of two stages."""
    engine = _pipeline(2, 1, case["setup"].stage)
    engine.save_checkpoint(case["folder"], tag="step4")
    dist.barrier()


def load_pipeline(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load into a pipeline of other ``stages``, whose modules keep other numbers, of ``setup``."""
    elastic_ckpt.install()
    engine = _pipeline(case["stages"], 50, case["setup"].stage)
    before = _kept(engine)
    engine.load_checkpoint(case["folder"])
    report = engine.elastic_report
    restored = [
        name for each in report.outcomes if (each.role, each.what) == ("extra state", "restored") for name in each.names
    ]
    found = SimpleNamespace(before=before, after=_kept(engine), restored=sorted(restored), shift=49 + SPOILS)
    return [found]

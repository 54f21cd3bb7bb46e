"""Jobs that train with the ready configs of ``configs/``, one after the other, and resume what they saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import elastic_ckpt
from tests.distributed import optimizer_jobs as quantized
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup, TinyLM, batch, build_optimizer, close
from tests.distributed.waiting_script import load_demo


def _is_8bit(config: dict[str, Any]) -> bool:
    return "align_partitions" in config["elastic_checkpoint"]


def _engine(config: dict[str, Any], seed: int) -> Any:
    """As the config says; where it leaves the optimizer to the script, the one that it is meant for."""
    model = quantized.WideLM(seed) if _is_8bit(config) else TinyLM(seed)
    if "optimizer" in config:
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    optimizer = build_optimizer(model, Setup(1, optimizer="bnb.AdamW8bit" if _is_8bit(config) else "adamw"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def save(arguments: dict[str, Any]) -> None:
    """Two steps with each config, a save, and the truth."""
    elastic_ckpt.install()
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    for path in map(Path, arguments["configs"]):
        config = json.loads(path.read_text())
        engine = _engine(config, seed=7)
        for number in range(2 * engine.gradient_accumulation_steps()):
            engine.backward(engine(batch(number, dist.get_world_size(), dist.get_rank())))
            engine.step()
        folder = Path(arguments["folder"]) / path.stem
        engine.save_checkpoint(str(folder))
        if _is_8bit(config):
            truth = quantized.everything(engine)
        else:
            oracle.relink(engine)
            truth = oracle.gather(engine, oracle.state_keys(engine))
        if dist.get_rank() == 0:
            torch.save(truth, folder / "truth.pt")
        close(engine)
        dist.barrier()


def resume(arguments: dict[str, Any]) -> list[Loaded]:
    """A fresh engine of each config, and what it restores otherwise than it was saved."""
    elastic_ckpt.install()
    get_accelerator().is_fp16_supported = lambda: True
    facts = []
    for path in map(Path, arguments["configs"]):
        folder = Path(arguments["folder"]) / path.stem
        config = json.loads(path.read_text())
        engine = _engine(config, seed=8)
        engine.load_checkpoint(str(folder))
        truth = truth_of(folder)
        if _is_8bit(config):
            found = quantized.compare(engine, truth, {})
            differences = found.differences | found.states
        else:
            differences = oracle.differences(engine, truth)
        facts.append(Loaded(engine.zero_optimization_stage(), path.name, engine.elastic_report, differences))
        close(engine)
    return facts


def demo(arguments: dict[str, Any]) -> list[tuple[str, dict[int, float], Any]]:
    """Train with ``launch/demo_train.py`` by each of ``command_lines``: its name, the losses by step, and the report."""
    elastic_ckpt.install()
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    script, found = load_demo(), []
    engines: list[Any] = []
    initialize = deepspeed.initialize

    def remembered(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        engines.append(made[0])
        return made

    for name, words in arguments["command_lines"].items():
        with (
            mock.patch.object(sys, "argv", ["demo_train.py", *words]),
            mock.patch.object(deepspeed, "initialize", remembered),
        ):
            losses = script.train(script.parse_arguments())
        engine = engines.pop()
        found.append((name, dict(losses), engine.elastic_report))
        close(engine)
    return found

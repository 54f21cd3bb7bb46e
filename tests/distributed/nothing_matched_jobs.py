"""Loads into models that have another name for everything: jobs of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import truth_of, where
from tests.distributed.model import TinyLM, build_engine, close, train

#: Options of the DeepSpeed config in a remedy.
LINES = re.compile(r'"elastic_checkpoint": (\{.*?\]\]\})')


class Wrapped(nn.Module):
    """The tiny model under a name, as frameworks wrap models."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, TinyLM(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name)(tokens)


class Adapted(nn.Module):
    """A frozen model and the matrices of an adapter, under PEFT's names."""

    def __init__(self, adapter: str, seed: int) -> None:
        super().__init__()
        self.base = TinyLM(seed)
        self.base.requires_grad_(False)
        self.adapter = adapter
        self.lora_A = nn.ModuleDict({adapter: nn.Linear(13, 3, bias=False)})
        self.lora_B = nn.ModuleDict({adapter: nn.Linear(3, 13, bias=False)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.lora_A[self.adapter](self.base.embedding(tokens))
        return self.base(tokens) + self.lora_B[self.adapter](inner).float().square().mean()


MODELS = {"model": partial(Wrapped, "model"), "language_model": partial(Wrapped, "language_model"), "plain": TinyLM}
MODELS |= {"default": partial(Adapted, "default"), "other": partial(Adapted, "other")}


def save(cases: list[dict[str, Any]]) -> None:
    """Train a ``model`` in a ``setup`` for four steps and save it in ``folder``, and what it then has."""
    for case in cases:
        engine = build_engine(case["setup"], MODELS[case["model"]](seed=3))
        train(engine, 0, 4)
        engine.save_checkpoint(case["folder"], tag="step4", exclude_frozen_parameters=case.get("bare", False))
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        close(engine)


def load(case: dict[str, Any]) -> list[tuple[Refused, Loaded]]:
    """Load what has another name for everything, then again with the lines of the config that the error gives.

    ``setup`` and ``model`` of the live engine; ``format`` of the checkpoint; ``arguments``; ``names``: what a saved name
    has, and its live counterpart; ``frozen``: whether all goes to weights that do not train here; ``bare``: whether
    the frozen weights were left out of the save.
    """
    elastic_ckpt.install()
    truth = truth_of(case["folder"])
    engine = build_engine(case["setup"], MODELS[case["model"]](seed=9))
    engine._config.load_universal_checkpoint = case["format"] == "universal"
    arguments = {"load_module_strict": False, **case.get("arguments", {})}
    before = oracle.gather(engine, [])["weights"]
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"], **arguments))
    (text, *_) = refused.texts
    found = LINES.search(text)
    settings = json.loads(found[1]) if found else {}
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings
    if "load_module_only=True" in text:
        arguments["load_module_only"] = True
    engine.load_checkpoint(case["folder"], **arguments)
    loaded = Loaded(case, where(case), engine.elastic_report, _differences(engine, before, truth, case, arguments))
    close(engine)
    return [(refused, loaded)]


def _differences(
    engine: Any, before: dict[str, Any], truth: dict[str, Any], case: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, str]:
    names = case["names"]

    def live(name: str) -> str:
        return name.replace(*names, 1) if names[0] else f"{names[1]}{name}"

    saved = truth["masters"] if case.get("bare", False) else truth["weights"]
    whole = truth["weights"] | truth["masters"]
    expected: dict[str, Any] = {"weights": before | {live(name): whole[name] for name in saved}}
    alone = not {"load_module_only", "load_optimizer_states"}.isdisjoint(arguments)
    if not case.get("frozen", False):
        masters = {live(name): master for name, master in truth["masters"].items()}
        rounded = {name: master.to(before[name].dtype) for name, master in masters.items()}
        expected["masters"] = {name: master.float() for name, master in (rounded if alone else masters).items()}
    if not alone:
        expected["states"] = {(live(name), key): value for (name, key), value in truth["states"].items()}
        expected["counters"] = truth["counters"]
        oracle.relink(engine)
    keys = sorted({key for _, key in expected.get("states", ())})
    return oracle.compare(oracle.gather(engine, keys), expected)


def _pipeline(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    return deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2), config=config)[
        0
    ]


def pipeline(case: dict[str, Any]) -> list[Refused]:
    """A pipeline of two stages, whose layers of the ``pattern`` are renamed."""
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)) for _ in range(4)]
    engine = _pipeline(1)
    for _ in range(2):
        engine.train_batch(iter(batches))
    engine.save_checkpoint(case["folder"], tag="step2")
    elastic_ckpt.install()
    live = _pipeline(2)
    settings = {"rename": [[case["pattern"], "gone.\\1"]]}
    live.config["elastic_checkpoint"] = live._config._param_dict["elastic_checkpoint"] = settings
    return [attempt(case, live, partial(live.load_checkpoint, case["folder"], load_module_strict=False))]

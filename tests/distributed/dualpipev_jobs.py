"""Pipelines of equal layers, of either class: ``dualpipev_jobs.<function>`` of cells."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import elastic_ckpt
from tests.distributed.facts import Refused, attempt
from tests.distributed.jobs import SPOILS
from tests.distributed.model import close

WIDTH = 6


def build(kind: str, seed: int) -> Any:
    """Four layers of one shape on two ranks, in fp32 and without ZeRO; ``kind``: ``plain`` or ``dual``."""
    made = PipelineModule if kind == "plain" else deepspeed.DualPipeVModule
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    module = made(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", base_seed=seed)
    for name, param in module.named_parameters():
        generator = torch.Generator().manual_seed(seed + int(name.split(".")[0]))
        param.data.copy_(torch.randn(param.shape, generator=generator) / 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def train(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        rows = [torch.randn(1, WIDTH, generator=generator) for _ in range(4)]
        engine.train_batch(iter([(row, row.flip(1)) for row in rows]))


def save(case: dict[str, Any]) -> None:
    """Train a pipeline of ``setup``, and save it in ``folder``."""
    engine = build(case["setup"], seed=7)
    train(engine, 3)
    engine.save_checkpoint(case["folder"], tag="step3")
    close(engine)


def refuse(case: dict[str, Any]) -> list[tuple[Refused, dict[str, str]]]:
    """Try to load into a pipeline of ``setup``; then load the weights alone, and compare them with the files of layers."""
    elastic_ckpt.install()
    engine = build(case["setup"], seed=70)
    train(engine, 2)
    alone = {"load_module_only": True}
    given = alone if SPOILS else {}
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"], **given))
    engine.load_checkpoint(case["folder"], **alone)
    wrong = {}
    for name, param in engine.module.named_parameters():
        layer, _, key = name.partition(".")
        saved = torch.load(f"{case['folder']}/step3/layer_{int(layer):02d}-model_states.pt")[key]
        if not torch.equal(param.data, saved):
            wrong[name] = f"off by {(param.data - saved).abs().max()}"
    close(engine)
    return [(refused, wrong)]

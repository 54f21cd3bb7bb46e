"""Real ``PipelineModule`` of weighted stages; job names are ``pipe_partition_jobs.FUNCTION``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import nn

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.patches.pipeline_stages import unwatch_pipe, watch_pipe

WIDTH, VOCABULARY = 8, 16
STEPS = 3


class Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)


LAYERS = [Embed, Block, Block, Block, torch.tanh, Head]


def build(method: str) -> PipelineModule:
    """Every layer has a seed of its own, so a model starts with the same weights however it is cut."""
    specs = [LayerSpec(layer) if isinstance(layer, type) else layer for layer in LAYERS]
    loss = nn.CrossEntropyLoss()
    return PipelineModule(specs, num_stages=2, loss_fn=loss, seed_layers=True, partition_method=method)


def train(model: PipelineModule) -> list[float]:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, VOCABULARY, (2, 2), generator=generator) for _ in range(2 * STEPS)]
    batches = iter([(batch[0], batch[1]) for batch in batches])
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def partition(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Build a model by a ``method`` and train it; and one of as many layers a stage, as DeepSpeed does by itself."""
    uniform = train(build("uniform"))
    watch_pipe()
    model = build(case["method"])
    layers = [type(layer).__name__ for _, layer in model.named_children() if not isinstance(layer, nn.ModuleDict)]
    own = [name for name in layers if name != "CrossEntropyLoss"]
    losses = train(model)
    unwatch_pipe()
    found = {"parts": model.partitions(), "layers": own, "losses": losses, "uniform_losses": uniform}
    return [SimpleNamespace(**found, is_wrapped=is_wrapped())]


def refuse(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What building a model with a ``method`` raises."""
    watch_pipe()
    try:
        build(case["method"])
        error = "built"
    except (ConfigError, NotImplementedError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    unwatch_pipe()
    return [SimpleNamespace(error=error, is_wrapped=is_wrapped())]


def is_wrapped() -> bool:
    """Whether elastic_ckpt is left in DeepSpeed's class."""
    return hasattr(PipelineModule._partition_layers, "__wrapped__")

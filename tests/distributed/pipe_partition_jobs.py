"""Real ``PipelineModule`` of weighted stages; job names are ``pipe_partition_jobs.FUNCTION``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
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


def partition(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """Partition by each of ``methods``, build and train; and the errors of what cannot be."""
    uniform = train(build("uniform"))
    watch_pipe()
    facts = []
    for method in arguments["methods"]:
        model = build(method)
        layers = [type(layer).__name__ for _, layer in model.named_children() if not isinstance(layer, nn.ModuleDict)]
        own = [name for name in layers if name != "CrossEntropyLoss"]
        found = {"method": method, "stage": dist.get_rank(), "parts": model.partitions(), "layers": own}
        facts.append(SimpleNamespace(**found, losses=train(model), uniform_losses=uniform))
    refused = error_of(arguments["refused"])
    unwatch_pipe()
    facts.append(SimpleNamespace(refused=refused, is_wrapped=hasattr(PipelineModule._partition_layers, "__wrapped__")))
    return facts


def error_of(method: str) -> str:
    """What building a model with this method raises."""
    try:
        build(method)
    except (ConfigError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"

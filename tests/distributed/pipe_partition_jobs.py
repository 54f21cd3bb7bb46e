"""Real ``PipelineModule`` of weighted stages; job names are ``pipe_partition_jobs.FUNCTION``."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import nn

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.patches.pipeline_stages import install_pipe, uninstall_pipe

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


def partition(arguments: dict[str, Any]) -> None:
    """Cut by weight, build, and train; the losses are those of the same layers cut uniformly."""
    uniform = train(build("uniform"))
    install_pipe()
    for method, parts in arguments["methods"].items():
        model = build(method)
        stage = dist.get_rank()
        assert model.partitions() == parts, (method, model.parts)
        names = [type(layer).__name__ for _, layer in model.named_children() if not isinstance(layer, nn.ModuleDict)]
        held = [layer.__name__ for layer in LAYERS[parts[stage] : parts[stage + 1]] if isinstance(layer, type)]
        assert [name for name in names if name != "CrossEntropyLoss"] == held, (method, names, held)
        losses = train(model)
        assert losses == uniform, (method, losses, uniform)
    try:
        build(arguments["refused"])
    except ConfigError as error:
        assert "decoder" in str(error)
    else:
        raise AssertionError("not refused")
    uninstall_pipe()
    try:
        build("weighted_type:embed:2|block:1")
    except NotImplementedError:
        return
    raise AssertionError("uninstalled, and still there")

"""Pipelines whose tied module has more than the tied weights; job names are ``tied_jobs.FUNCTION``.

DeepSpeed synchronizes ``tied_weight_attr`` alone. Each stage with the module saves copies of its other parameters, which
get gradients on the first stage alone, unless ``Tied.trains_copies``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn import functional

import elastic_ckpt
from tests.distributed import truth as plain
from tests.distributed.facts import Refused, attempt
from tests.distributed.jobs import SPOILS

TAG, SAVE_AT, VOCABULARY, HIDDEN, LENGTH = "step3", 3, 16, 8, 4
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),  # whose moments see the weight decay
    "sgd": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1),
}


@dataclass(frozen=True)
class Tied:
    """A pipeline: its optimizer, whether three layers are tied, and whether the last stage trains its norm too."""

    optimizer: str = "adamw"
    has_three: bool = False
    trains_copies: bool = False
    declares: bool = False

    @property
    def name(self) -> str:
        extra = [name for name in ("has_three", "trains_copies", "declares") if getattr(self, name)]
        return "-".join([self.optimizer, *extra])


class Embed(nn.Module):
    """Tied: ``words.weight`` and ``scale``. Not tied: ``positions``, ``norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(tokens) * self.scale + self.positions)


def in_the_middle(embed: Embed, values: torch.Tensor) -> torch.Tensor:
    return values + embed.words.weight.mean(0) * embed.scale


def logits(trains_copies: bool, embed: Embed, values: torch.Tensor) -> torch.Tensor:
    values = embed.norm(values) if trains_copies else values
    return (values * embed.scale) @ embed.words.weight.T


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def build(setup: Tied, pp: int, seed: int) -> Any:
    """A live engine on all ranks. Collective."""
    torch.manual_seed(seed + dist.get_rank())  # copies that are not synchronized start with other values
    tied = partial(TiedLayerSpec, "embed", Embed, tied_weight_attr=["words.weight", "scale"])
    block = LayerSpec(nn.Linear, HIDDEN, HIDDEN)
    middle = tied(forward_fn=in_the_middle) if setup.has_three else block
    layers = [tied(), block, middle, block, block, tied(forward_fn=partial(logits, setup.trains_copies))]
    module = PipelineModule(layers, num_stages=pp, loss_fn=loss_of, partition_method="uniform")
    optimizer = OPTIMIZERS[setup.optimizer](module.parameters())
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1000,
        "elastic_checkpoint": {"report": False},
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    train(engine, 1)
    return engine


def train(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (64, 1, LENGTH), generator=generator)
    batches = iter([(each, each) for each in tokens])
    for _ in range(steps):
        engine.train_batch(batches)


def gather(engine: Any, pp: int) -> list[dict[str, torch.Tensor]]:
    """By stage: masters and states of its parameters, by DeepSpeed's getters. Collective."""
    has_states = any(plain.base_of(engine).state.values())
    keys = plain.state_keys(engine) if has_states else []
    if keys:
        plain.relink(engine)
    mine: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        mine[name] = safe_get_full_fp32_param(param).clone()
        mine |= {f"{name} {key}": safe_get_full_optimizer_state(param, key).clone() for key in keys}
        assert torch.equal(param, mine[name].to(param.dtype)), f"weights of {name} are not its masters'"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.grid.get_stage_id(), mine))
    by_stage = dict(everyone)
    return [by_stage[stage] for stage in range(pp)]


def save(case: dict[str, Any]) -> None:
    """Train a ``setup`` over all ranks as stages, save it in ``folder``, and write down the truth."""
    setup, folder = case["setup"], case["folder"]
    engine = build(setup, dist.get_world_size(), seed=7)
    train(engine, SAVE_AT - 1)
    info = {"pipeline_replicated_parameter_patterns": ["tied_modules.embed.(positions|norm.*|words.weight)"]}
    engine.save_checkpoint(folder, TAG, {"universal_checkpoint_info": info} if setup.declares else {})
    truth = gather(engine, dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(folder, "truth.pt"))


def load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load into ``pp`` stages of a ``setup``: what differs from the saved copies, and the notes.

    ``differing``: of each live stage, the names whose values are not those of its saved stage, where there are as many,
    or of the first stage that has them.
    """
    elastic_ckpt.install()
    pp = case["pp"]
    engine = build(case["setup"], pp, seed=8)
    engine.load_checkpoint(case["folder"])
    truth = torch.load(os.path.join(case["folder"], "truth.pt"))
    if SPOILS:
        truth[0]["tied_modules.embed.norm.weight"][0] += 1
    first: dict[str, torch.Tensor] = {}
    for stage in truth:
        first = {**stage, **first}
    differing = []
    for at, stage in enumerate(gather(engine, pp)):
        expected = {**first, **(truth[at] if pp == len(truth) else {})}
        differing.append([name for name, value in stage.items() if not torch.equal(value, expected[name])])
    notes = engine.elastic_report.notes
    train(engine, 1)
    return [SimpleNamespace(differing=differing, notes=notes)]


def refuse(case: dict[str, Any]) -> list[Refused]:
    """What becomes of a load into ``pp`` stages of a ``setup``."""
    elastic_ckpt.install()
    engine = build(case["setup"], case["pp"], seed=8)
    return [attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))]

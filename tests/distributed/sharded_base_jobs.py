"""Jobs with DeepSpeed's ``OptimizedLinear``, whose frozen base weight the ranks may share out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.linear import LoRAConfig, OptimizedLinear
from torch import nn

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed.jobs import SPOILS
from tests.distributed.model import VOCABULARY, build_engine, close, train

WIDTH = 12


class LoraLM(nn.Module):
    """A frozen base, another shard of it on each of ``sharding`` ranks, between an embedding and a head."""

    def __init__(self, seed: int, sharding: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = LoRAConfig(lora_r=2, lora_alpha=4, base_weight_sharding=sharding)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.q_proj = OptimizedLinear(WIDTH, WIDTH, lora_config=config, dtype=torch.float32)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        own = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if sharding > 1 else 0))
        self.q_proj.weight.data.normal_(generator=own)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.q_proj(self.embedding(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def save_and_load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Save and load into a new engine, with a base of other values unless the save leaves it out.

    ``setup``, ``folder``; ``sharding``: of the base; ``leaves_out``: whether frozen weights are not saved.
    """
    elastic_ckpt.install()
    engine = build_engine(case["setup"], LoraLM(1, case["sharding"]))
    train(engine, 0, 2)
    base = engine.module.q_proj.weight.detach() + SPOILS
    lora = engine.module.q_proj.lora_weight_1.weight.detach() + SPOILS
    engine.save_checkpoint(case["folder"], tag="step2", exclude_frozen_parameters=case["leaves_out"])
    close(engine)
    dist.barrier()
    engine = build_engine(case["setup"], LoraLM(1 if case["leaves_out"] else 2, case["sharding"]))
    module, error = engine.module.q_proj, None
    before = module.weight.detach().clone()
    try:
        engine.load_checkpoint(case["folder"])
    except ElasticCkptError as raised:
        error = raised
    found = SimpleNamespace(
        error=error,
        has_base=torch.equal(module.weight, base),
        kept_base=torch.equal(module.weight, before),
        has_lora=torch.equal(module.lora_weight_1.weight, lora),
    )
    close(engine)
    return [found]

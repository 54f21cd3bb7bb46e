"""Tiny models of Transformers and PEFT, and a job that trains and saves them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

from tests.distributed import truth as oracle
from tests.distributed.model import build_engine, close

VOCABULARY = 37
_WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_WIDTHS, **_HEADS),
    "gpt2": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "mixtral": transformers.MixtralConfig(**_WIDTHS, **_HEADS, num_local_experts=3, num_experts_per_tok=2),
}
CONFIGS["lora"] = CONFIGS["llama"]


def build_model(name: str, seed: int = 7) -> torch.nn.Module:
    """A model of :data:`CONFIGS`; ``lora``: with a PEFT adapter, and a head that trains too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    if name != "lora":
        return model
    lora = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, lora)
    for key, param in model.named_parameters():
        if "lora_B" in key:  # zeros at first
            torch.nn.init.normal_(param, std=0.1)
    return model


def save(case: dict[str, Any]) -> None:
    """Train a ``model`` with a ``setup`` for two steps, save it, and write down what its engine has then."""
    engine = build_engine(replace(case["setup"], groups="one"), build_model(case["model"]))
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(step))
        tokens = tokens[dist.get_rank() :: dist.get_world_size()]
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(case["folder"], tag="step2")
    oracle.relink(engine)
    truth = oracle.gather(engine, ["exp_avg", "exp_avg_sq"])
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(case["folder"], "truth.pt"))
    close(engine)

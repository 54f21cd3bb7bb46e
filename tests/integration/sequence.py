"""What the scripts need for sequence parallelism by Accelerate's ``ParallelismConfig``."""

from __future__ import annotations

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM


def parallelism(world: int, sp: int) -> ParallelismConfig | None:
    """Of ``world`` ranks, each ``sp`` that are neighbours share their samples; ``None``: each has its own."""
    if sp == 1:
        return None
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=sp, sp_backend="deepspeed", sp_handler=handler, dp_shard_size=world // sp)


def llama() -> LlamaForCausalLM:
    """A tiny model whose attention Ulysses replaces, and whose heads it can divide by two and four."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **heads))


def with_positions(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sample as Ulysses wants it: without positions it would not know which part of its text a rank sees."""
    return {"input_ids": text, "labels": text, "position_ids": torch.arange(len(text))}


def of_the_mean(loss: torch.Tensor, sp: int, stage: int) -> torch.Tensor:
    """The loss, with gradients of the mean over all tokens at every degree and stage; without it, at some alone.

    Transformers gathers the losses of sequence-parallel ranks, and the backward of that sums over all ranks' copies:
    gradients are ``sp`` times those of the mean, on any device. ZeRO-3 divides them by data- times sequence-parallel
    ranks, which makes up for it; ZeRO-1 and 2 divide by the data-parallel degree alone. Moments that were saved at one
    degree then would not fit the gradients of another, and losses could not be compared.
    """
    if stage < 3 and loss.requires_grad:
        loss.register_hook(lambda gradient: gradient / sp)
    return loss

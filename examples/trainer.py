"""Hugging Face's Trainer with DeepSpeed. It resumes by itself, on any number of ranks; on CPU, add --use_cpu.

torchrun --nproc_per_node 2 examples/trainer.py --deepspeed examples/zero3.json --output_dir output --use_cpu
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

import elastic_ckpt

VOCABULARY, LENGTH, WIDTH = 64, 16, 64


def model() -> GPT2LMHeadModel:
    """A tiny GPT-2 without dropout, whose random numbers would be others on another number of ranks."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=None, eos_token_id=None))


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from a random number, so that there is something to learn."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train, from the newest whole checkpoint of the output folder if there is one."""
    elastic_ckpt.install()
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    trainer = Trainer(model(), arguments, train_dataset=texts(600))
    has_saved = any(Path(arguments.output_dir).glob("checkpoint-*"))
    newest = elastic_ckpt.find_latest(arguments.output_dir) if has_saved else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()

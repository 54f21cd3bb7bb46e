"""An ordinary DeepSpeed script: a small GPT learns English from the help texts that every Python ships.

Start it with a launcher, for instance::

    torchrun --nproc_per_node 2 launch/demo_train.py --deepspeed_config configs/zero3.json \
        --steps 120 --save-at 60 --save-dir checkpoints --losses losses.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 2


class Block(nn.Module):
    """One transformer layer, normalised before attention and before the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time, WIDTH]`` to the same shape; a position sees itself and what is before it."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, WIDTH // HEADS)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A character-level GPT whose head is its embedding."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each next character of ``[batch, CONTEXT + 1]``."""
        inputs, targets = characters[:, :-1], characters[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(CONTEXT, device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def parse_arguments() -> argparse.Namespace:
    """The command line; DeepSpeed adds ``--deepspeed_config``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="train until this step")
    parser.add_argument("--save-at", type=int, help="save a checkpoint after this step")
    parser.add_argument("--save-every", type=int, help="save a checkpoint after every so many steps")
    parser.add_argument("--save-dir", default="checkpoints", help="where to save it")
    parser.add_argument("--resume-from", help="load the latest checkpoint of this folder first, if it holds one")
    parser.add_argument("--stop-file", type=Path, help="save and end after the step in which this file appears")
    parser.add_argument(
        "--optimizer", choices=["AdamW", "AdamW8bit"], help="torch's or bitsandbytes', if the config has none"
    )
    parser.add_argument("--losses", type=Path, required=True, help="CSV file of step and loss to write")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def read_text() -> tuple[torch.Tensor, int]:
    """The text as one index per character, and the number of distinct characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def local_batch(text: torch.Tensor, step: int, global_batch: int) -> torch.Tensor:
    """This rank's rows of the global batch of a step, which depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (global_batch,), generator=generator)
    rows = starts[dist.get_rank() :: dist.get_world_size()]
    return text[rows[:, None] + torch.arange(CONTEXT + 1)]


def train_step(engine: Any, text: torch.Tensor, step: int) -> float:
    """One optimizer step, in as many micro-batches as the engine accumulates; the mean loss over all ranks."""
    rows = local_batch(text, step, engine.train_batch_size()).to(engine.device)
    total = torch.zeros((), device=engine.device)
    for micro_batch in rows.split(engine.train_micro_batch_size_per_gpu()):
        loss = engine(micro_batch)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() / engine.gradient_accumulation_steps()


def create_optimizer(name: str | None, model: GPT) -> torch.optim.Optimizer | None:
    """The optimizer of this name; ``None``: DeepSpeed creates the one in its config."""
    if name == "AdamW8bit":
        from bitsandbytes.optim import AdamW8bit  # noqa: PLC0415  few need it

        return AdamW8bit(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return None


def asked_to_stop(stop_file: Path | None) -> bool:
    """Whether the file is there. Rank 0 looks, and all ranks take its answer: one must not go on without the others."""
    if stop_file is None:
        return False
    answer = [dist.get_rank() == 0 and stop_file.exists()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def train(arguments: argparse.Namespace) -> list[tuple[int, float]]:
    """Build, perhaps resume, train, perhaps save; the mean loss over all ranks of each step that was trained."""
    torch.manual_seed(0)
    text, vocabulary = read_text()
    model = GPT(vocabulary)
    optimizer = create_optimizer(arguments.optimizer, model)
    given = {"model_parameters": model.parameters()} if optimizer is None else {"optimizer": optimizer}
    engine, *_ = deepspeed.initialize(args=arguments, model=model, **given)
    if arguments.resume_from:
        engine.load_checkpoint(arguments.resume_from)

    losses = []
    for step in range(engine.global_steps + 1, arguments.steps + 1):
        losses.append((step, train_step(engine, text, step)))
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:4d}   loss {losses[-1][1]:.4f}", flush=True)
        stop = asked_to_stop(arguments.stop_file)
        if stop or step == arguments.save_at or (arguments.save_every and step % arguments.save_every == 0):
            engine.save_checkpoint(arguments.save_dir)
        if stop:
            break
    return losses


def main() -> None:
    """Train, and write the losses down on rank 0."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    losses = train(arguments)
    if dist.get_rank() == 0:
        with arguments.losses.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("step", "loss"), *losses])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; threads of gloo now and then abort the interpreter's teardown


if __name__ == "__main__":
    main()

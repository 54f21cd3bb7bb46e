"""A training loop with Accelerate and DeepSpeed, as people write them, and elastic_ckpt where ``--elastic`` asks for it."""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

import elastic_ckpt
from tests.integration import sequence, witness

GLOBAL_BATCH, STEPS, SAVED_AT = 12, 6, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--sp", type=int, help="sequence-parallel degree; every micro-batch then holds the same texts")
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    options = parser.parse_args()
    if options.elastic:
        elastic_ckpt.install()
    plugin = DeepSpeedPlugin(zero_stage=options.stage, gradient_clipping=1.0)
    # else Accelerate steps the schedule once for every process in each step: another schedule on other ranks
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        step_scheduler_with_optimizer=False,
        parallelism_config=sequence.parallelism(int(os.environ["WORLD_SIZE"]), options.sp or 1),
    )
    set_seed(1)
    model = gpt2() if options.sp is None else sequence.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    texts = torch.randint(1, 64, (GLOBAL_BATCH * STEPS, 16), generator=torch.Generator().manual_seed(2))
    if options.sp is not None:
        texts = texts[: GLOBAL_BATCH // 2].repeat(2 * STEPS, 1)
    rows = [sequence.with_positions(text) for text in texts]
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH * (options.sp or 1) // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    done, losses = 0, {}
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        done = SAVED_AT
        witness.take(model, options.seen / "loaded.pt", scheduler)
        if accelerator.parallelism_config is None:
            loader = accelerator.skip_first_batches(loader, done)
        else:  # it cannot skip what DeepSpeed's UlyssesSPDataLoaderAdapter gives
            loader = islice(loader, done, None)
    for step, batch in enumerate(loader, done + 1):
        loss = loss_of(accelerator, model, batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[step] = accelerator.reduce(loss.detach(), "mean").item()
        if step == SAVED_AT:
            accelerator.save_state(os.path.join(options.output_dir, f"step_{step}"))
            witness.take(model, options.seen / f"saved-{step}.pt", scheduler)
    if accelerator.is_main_process:
        (options.seen / "result.json").write_text(json.dumps({"global_step": step, "losses": losses}))


def gpt2() -> GPT2LMHeadModel:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **no_dropout))


def loss_of(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the tokens of a batch, of which each sequence-parallel rank has a part."""
    parallelism = accelerator.parallelism_config
    if parallelism is None:
        return model(**batch).loss
    parts = {key: value.to(accelerator.device).contiguous() for key, value in batch.items()}
    loss = deepspeed_sp_compute_loss(accelerator, model, parts, False, parallelism)
    return sequence.of_the_mean(loss, parallelism.sp_size, model.zero_optimization_stage())


if __name__ == "__main__":
    main()

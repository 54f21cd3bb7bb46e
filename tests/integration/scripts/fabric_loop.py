"""A training loop with Lightning Fabric and its DeepSpeedStrategy, as people write them; no word of elastic_ckpt."""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DeepSpeedStrategy
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tests.integration import sequence, witness

GLOBAL_BATCH, STEPS, SAVED_AT = 12, 6, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume_from")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--lora", action="store_true", help="train adapters, and save without the frozen weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--not_strict", action="store_true")
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    options = parser.parse_args()
    seed_everything(1)
    world = int(os.environ["WORLD_SIZE"])
    # without logging_batch_size_per_gpu, Fabric tells DeepSpeed that a micro-batch is one sample
    strategy = DeepSpeedStrategy(
        stage=options.stage,
        logging_batch_size_per_gpu=GLOBAL_BATCH // world,
        exclude_frozen_parameters=options.lora,
    )
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = build_model(options)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    model, optimizer = fabric.setup(model, optimizer)
    engine = strategy.model
    texts = torch.randint(1, 64, (GLOBAL_BATCH * STEPS, 16), generator=torch.Generator().manual_seed(2))
    loader = fabric.setup_dataloaders(DataLoader(texts, batch_size=GLOBAL_BATCH // world))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "losses": {}}
    if options.resume_from:
        fabric.load(options.resume_from, state, strict=not options.not_strict)
        witness.take(engine, options.seen / "loaded.pt", scheduler)
    for batch in islice(loader, state["step"], None):
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        state["losses"][state["step"]] = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        if state["step"] in (SAVED_AT, STEPS):
            fabric.save(options.output_dir / f"step={state['step']}.ckpt", state)
            witness.take(engine, options.seen / f"saved-{state['step']}.pt", scheduler)
    if fabric.is_global_zero:
        (options.seen / "result.json").write_text(json.dumps({"global_step": state["step"], "losses": state["losses"]}))


def build_model(options: argparse.Namespace) -> Any:
    if options.lora:
        return get_peft_model(sequence.llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=options.layers, n_head=2, **no_dropout)
    )


if __name__ == "__main__":
    main()

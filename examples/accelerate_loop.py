"""A training loop with Accelerate and DeepSpeed. It resumes from --resume_from on any number of ranks.

torchrun --nproc_per_node 2 examples/accelerate_loop.py --save_to saved
torchrun --nproc_per_node 3 examples/accelerate_loop.py --resume_from saved
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ckpt

GLOBAL_BATCH, STEPS, SAVE_AT = 96, 8, 4


def main() -> None:
    """Train to the last step, and save on the way; or go on from such a save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save_to", help="folder for the checkpoint")
    parser.add_argument("--resume_from", help="folder of a checkpoint")
    options = parser.parse_args()

    elastic_ckpt.install()
    if not torch.cuda.is_available():
        PartialState(cpu=True)  # Accelerate takes DeepSpeed's backend from it: gloo
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
    # by default, Accelerate steps the schedule once for every process: it would be another one on other ranks
    accelerator = Accelerator(deepspeed_plugin=plugin, step_scheduler_with_optimizer=False)
    set_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = torch.randn(GLOBAL_BATCH * STEPS, 32, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(rows, rows[:, :8].sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    done = 0
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        done = model.global_steps
        loader = accelerator.skip_first_batches(loader, done)
    for step, (inputs, targets) in enumerate(loader, done + 1):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step}: loss {mean:.6f}")
        if options.save_to and step == SAVE_AT:
            accelerator.save_state(options.save_to)


if __name__ == "__main__":
    main()

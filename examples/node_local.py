"""A DeepSpeed loop whose nodes save to disks of their own. Any topology goes on, as long as the files are on some node.

On each of two nodes, the first of which is node0:

torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 examples/node_local.py --save_dir /local/run

Two nodes on one machine have a folder each: --save_dir 'disk$GROUP_RANK' (torchrun's number of the node).
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt

GLOBAL_BATCH, STEPS, SAVE_AT = 96, 8, 4
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # else, on CPU, DeepSpeed compiles an Adam of its own
    "checkpoint": {"use_node_local_storage": True},  # DeepSpeed's own option: each node writes what a load needs
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the global batch of a step."""
    rows = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
    rows = rows[dist.get_rank() :: dist.get_world_size()]
    return rows, rows[:, :8].sum(1, keepdim=True)


def main() -> None:
    """Train to the last step, from the checkpoint that the nodes' disks hold, if they do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save_dir", required=True, help="folder on the node's own disk")
    options = parser.parse_args()
    save_dir = os.path.expandvars(options.save_dir)

    elastic_ckpt.install()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    engine.load_checkpoint(save_dir)  # nothing there yet: a warning of DeepSpeed, and training starts
    for step in range(engine.global_steps + 1, STEPS + 1):
        inputs, targets = (each.to(engine.device) for each in batch(step))
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.6f}")
        if step == SAVE_AT:
            engine.save_checkpoint(save_dir)


if __name__ == "__main__":
    main()

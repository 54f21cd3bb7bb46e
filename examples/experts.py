"""A mixture of experts of DeepSpeed's `MoE` layer. It goes on at any expert-parallel degree, on any number of ranks.

torchrun --nproc_per_node 2 examples/experts.py --ep_size 2 --save_dir saved
torchrun --nproc_per_node 1 examples/experts.py --ep_size 1 --resume_from saved
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import elastic_ckpt

GLOBAL_BATCH, STEPS, SAVE_AT, WIDTH, EXPERTS = 24, 8, 4, 16, 4
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Mixture(nn.Module):
    """A layer of experts between two others."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.moe = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.first(rows))[0])


def batch(step: int) -> torch.Tensor:
    """This rank's share of the global batch of a step."""
    rows = torch.randn(GLOBAL_BATCH, 8, generator=torch.Generator().manual_seed(step))
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    """Train to the last step, and save on the way; or go on from such a save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ep_size", type=int, required=True, help="ranks that share the experts")
    parser.add_argument("--save_dir", help="folder for checkpoints")
    parser.add_argument("--resume_from", help="folder of a checkpoint")
    options = parser.parse_args()

    elastic_ckpt.install()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = Mixture(options.ep_size)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=CONFIG)
    if options.resume_from:
        engine.load_checkpoint(options.resume_from)
    for step in range(engine.global_steps + 1, STEPS + 1):
        rows = batch(step).to(engine.device)
        loss = nn.functional.mse_loss(engine(rows), rows.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.6f}")
        if options.save_dir and step == SAVE_AT:
            engine.save_checkpoint(options.save_dir)


if __name__ == "__main__":
    main()

"""A job of FSDP2, which saves with `torch.distributed.checkpoint`. There is nothing of elastic_ckpt in it.

torchrun --nproc_per_node 2 examples/fsdp.py --steps 4 --save_to run/step-4
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH = 96
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def build() -> nn.Module:
    """The model that both jobs train."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Of this rank's share of the global batch of a step."""
    rows = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
    rows = rows[dist.get_rank() :: dist.get_world_size()].to(next(model.parameters()).device)
    return nn.functional.mse_loss(model(rows), rows[:, :8].sum(1, keepdim=True))


def show(step: int, loss: torch.Tensor) -> None:
    """Print the mean over all ranks."""
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean.item():.6f}")


def arguments(description: str | None) -> argparse.Namespace:
    """The same for both jobs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--resume_from", help="folder of a checkpoint")
    parser.add_argument("--save_to", help="folder for the checkpoint of the last step")
    return parser.parse_args()


def main() -> None:
    """Train to a step, and save."""
    options, done = arguments(__doc__), 0
    dist.init_process_group()
    model = build()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        model.cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    if options.resume_from:
        weights, states = get_state_dict(model, optimizer)
        dcp.load(state := {"model": weights, "optim": states}, checkpoint_id=options.resume_from)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        done = int(next(iter(optimizer.state.values()))["step"])
    for step in range(done + 1, options.steps + 1):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step, loss)
    if options.save_to:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=options.save_to)


if __name__ == "__main__":
    main()

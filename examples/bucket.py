"""A DeepSpeed loop whose checkpoints are in a bucket. Credentials and endpoint come from the environment.

torchrun --nproc_per_node 2 examples/bucket.py --upload_to s3://bucket/run
torchrun --nproc_per_node 3 examples/bucket.py --resume_from s3://bucket/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import obstore.store
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt

GLOBAL_BATCH, STEPS, SAVE_AT = 96, 8, 4
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # else, on CPU, DeepSpeed compiles an Adam of its own
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the global batch of a step."""
    rows = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
    rows = rows[dist.get_rank() :: dist.get_world_size()]
    return rows, rows[:, :8].sum(1, keepdim=True)


def upload(folder: Path, url: str) -> None:
    """Copy a folder into a bucket; `aws s3 sync` or `gcloud storage rsync` do the same."""
    bucket = obstore.store.from_url(url)
    for path in sorted(folder.rglob("*"), key=lambda path: path.name == "latest"):  # which comes last
        if path.is_file():
            obstore.put(bucket, str(path.relative_to(folder)), path)


def main() -> None:
    """Train to the last step, and save and upload on the way; or go on from a bucket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save_dir", default="saved", help="folder for checkpoints")
    parser.add_argument("--upload_to", help="URL to which they are uploaded")
    parser.add_argument("--resume_from", help="URL of a checkpoint")
    options = parser.parse_args()

    elastic_ckpt.install()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if options.resume_from:
        engine.load_checkpoint(options.resume_from)
    for step in range(engine.global_steps + 1, STEPS + 1):
        inputs, targets = (each.to(engine.device) for each in batch(step))
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.6f}")
        if options.upload_to and step == SAVE_AT:
            engine.save_checkpoint(options.save_dir)
            if dist.get_rank() == 0:
                upload(Path(options.save_dir), options.upload_to)


if __name__ == "__main__":
    main()

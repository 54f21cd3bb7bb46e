"""PyTorch Lightning's DeepSpeedStrategy. It resumes from --ckpt_path on any number of ranks.

torchrun --nproc_per_node 2 examples/lightning_fit.py --save_to saved
torchrun --nproc_per_node 3 examples/lightning_fit.py --ckpt_path saved/step=4.ckpt
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ckpt

GLOBAL_BATCH, STEPS_OF_AN_EPOCH = 96, 4


class Regression(pl.LightningModule):
    """Learns the sum of a few of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        mean = self.all_gather(loss.detach()).mean().item()
        self.print(f"step {self.global_step + 1}: loss {mean:.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class StrategyOfCPUs(DeepSpeedStrategy):
    """Only for CPUs, which Lightning's own strategy refuses."""

    setup_environment = DDPStrategy.setup_environment


def main() -> None:
    """Train two epochs, and save after the first; or go on from such a save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save_to", default="saved", help="folder for checkpoints")
    parser.add_argument("--ckpt_path", help="a checkpoint to go on from")
    options = parser.parse_args()

    elastic_ckpt.install()
    pl.seed_everything(1)
    ranks = int(os.environ["WORLD_SIZE"])
    strategy: DeepSpeedStrategy = DeepSpeedStrategy(stage=3)
    if not torch.cuda.is_available():
        strategy = StrategyOfCPUs(stage=3, parallel_devices=[torch.device("cpu", rank) for rank in range(ranks)])
    rows = torch.randn(GLOBAL_BATCH * STEPS_OF_AN_EPOCH, 32, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(rows, rows[:, :8].sum(1, keepdim=True))
    trainer = pl.Trainer(
        devices=ranks,
        strategy=strategy,
        max_epochs=2,
        callbacks=[ModelCheckpoint(options.save_to, "{step}", save_top_k=-1, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(data, GLOBAL_BATCH // ranks), ckpt_path=options.ckpt_path)


if __name__ == "__main__":
    main()

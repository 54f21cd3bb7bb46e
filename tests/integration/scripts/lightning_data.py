"""A training script with PyTorch Lightning and a registered sampler, which writes down its samples."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler
from tests.integration.scripts.trainer_data import LENGTH, Line


class Counted(pl.LightningModule):
    """A line, whose sampler is registered with the engine before the first batch is fetched."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__()
        self.line, self.sampler, self.samples = Line(), sampler, list[list[int]]()

    def on_train_start(self) -> None:
        elastic_ckpt.register(self.trainer.strategy.deepspeed_engine, sampler=self.sampler)

    def training_step(self, numbers: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.samples.append(numbers.tolist())
        return self.line(numbers)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    parser.add_argument("--ckpt_path")
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    sampler = ElasticSampler(LENGTH, seed=5)
    module, loader = Counted(sampler), DataLoader(torch.arange(LENGTH), options.micro, sampler=sampler)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DeepSpeedStrategy(stage=2),
        accumulate_grad_batches=options.accumulation,
        use_distributed_sampler=False,
        max_steps=options.steps,
        callbacks=[ModelCheckpoint(options.output_dir, "{step}", save_top_k=-1, every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader, ckpt_path=options.ckpt_path)
    found = [sampler.samples_consumed, module.samples]
    (options.seen / f"samples-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

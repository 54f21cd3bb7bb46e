"""A training script with PyTorch Lightning and its DeepSpeedStrategy, as people write them; no word of elastic_ckpt."""

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
from transformers import GPT2Config, GPT2LMHeadModel

from tests.distributed.truth import low_precision
from tests.integration import witness

GLOBAL_BATCH, EPOCHS, STEPS_PER_EPOCH = 12, 2, 3


class LanguageModel(pl.LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **no_dropout)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * STEPS_PER_EPOCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--evaluate", choices=["validate", "test"], help="do not train")
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    options = parser.parse_args()
    pl.seed_everything(1)
    world = int(os.environ["WORLD_SIZE"])
    texts = torch.randint(1, 64, (GLOBAL_BATCH * STEPS_PER_EPOCH, 16), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(texts, batch_size=GLOBAL_BATCH // world, shuffle=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DeepSpeedStrategy(stage=options.stage),
        max_epochs=EPOCHS,
        callbacks=[
            ModelCheckpoint(options.output_dir, "{step}", monitor="loss", save_top_k=-1, every_n_epochs=1),
            Witness(options.seen),
        ],
        precision=options.precision,
        logger=False,
        enable_progress_bar=False,
    )
    if options.evaluate:
        getattr(trainer, options.evaluate)(LanguageModel(), loader, ckpt_path=options.ckpt_path)
    else:
        trainer.fit(LanguageModel(), loader, ckpt_path=options.ckpt_path)


class Witness(pl.Callback):
    """What the test compares; not part of a user's script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.losses = folder, {}

    def _take(self, trainer: pl.Trainer, name: str) -> None:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        witness.take(trainer.strategy.deepspeed_engine, self.folder / name, scheduler)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step:
            self._take(trainer, "loaded.pt")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        weights = low_precision(trainer.strategy.deepspeed_engine)
        if trainer.is_global_zero:
            report = str(trainer.strategy.deepspeed_engine.elastic_report)
            torch.save({"weights": weights, "report": report}, self.folder / "loaded.pt")

    on_test_end = on_validation_end

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["loss"])

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._take(trainer, f"saved-{trainer.global_step}.pt")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            result = {"global_step": trainer.global_step, "losses": self.losses}
            (self.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""A training script with the Hugging Face Trainer that writes down the samples of each step; no word of elastic_ckpt."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

LENGTH = 30


class Line(torch.nn.Module):
    """One weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = number[:, None].float() / LENGTH @ self.weight[:1]
        return {"loss": ((rows - 1) ** 2).mean()}


class Noting(Trainer):
    """Its samples, by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.samples: list[tuple[int, int, list[int]]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.samples.append((self.state.global_step, self.args.process_index, inputs["number"].tolist()))
        return model(**inputs)["loss"]


class Epochs(TrainerCallback):
    """How many have begun."""

    begun = 0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.begun += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--local_rank", help="of DeepSpeed's launcher")
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save", type=int, required=True)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--drop_last", action="store_true")
    parser.add_argument("--data_seed", type=int)
    options = parser.parse_args()
    settings = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        save_steps=options.save,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.accumulation,
        dataloader_drop_last=options.drop_last,
        data_seed=options.data_seed,
        deepspeed={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"},
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(1)
    data, epochs = [{"number": number} for number in range(LENGTH)], Epochs()
    trainer = Noting(Line(), settings, train_dataset=data, callbacks=[epochs])
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    (options.seen / f"samples-{os.environ['RANK']}.json").write_text(json.dumps(trainer.samples))
    if trainer.is_world_process_zero():
        (options.seen / "epochs.json").write_text(json.dumps(epochs.begun))


if __name__ == "__main__":
    main()

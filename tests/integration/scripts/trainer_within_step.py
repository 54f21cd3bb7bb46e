"""Trainers that are told to save just in time, between the engine's step and their own; no word of elastic_ckpt.

Each setup trains once to its end, and once until it has saved within a step. With ``--resume_from``, the output of such
a job, each goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

#: Samples of an epoch; of both ranks together in a micro-batch.
LENGTH, MICRO_BATCH = 30, 6
#: The step within which each setup saves, of five in an epoch, and its arguments.
SETUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "within an epoch": (2, {"num_train_epochs": 2}),
    "at the end of an epoch": (5, {"num_train_epochs": 2}),
    "at the end of the run": (7, {"max_steps": 7}),
    "accumulated": (2, {"num_train_epochs": 2, "gradient_accumulation_steps": 2}),
    "stream": (3, {"max_steps": 7}),
    "stream, at the end of an epoch": (5, {"max_steps": 9}),
    "from the epoch's start": (2, {"num_train_epochs": 1, "ignore_data_skip": True}),
}


class Line(torch.nn.Module):
    """One weight matrix, and noise that depends on the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = number[:, None].float() / LENGTH @ self.weight[:1]
        return {"loss": (torch.nn.functional.dropout(rows, 0.2) - 1).square().mean()}


class Stream(torch.utils.data.IterableDataset):
    """Numbers in their order."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in range(LENGTH))


class Noting(Trainer):
    """Its samples and learning rate, by step; asks for a save within one of them."""

    def __init__(self, *args: Any, saves_in: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saves_in, self.noted = saves_in, []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, lr = self.state.global_step + 1, self.optimizer.param_groups[0]["lr"]
        self.noted.append((step, self.args.process_index, lr, inputs["number"].tolist()))
        for callback in self.callback_handler.callbacks if step == self.saves_in else ():
            if isinstance(callback, JITCheckpointCallback):
                callback.jit_manager.is_checkpoint_requested = True  # as SIGTERM does, after three seconds
        return model(**inputs)["loss"]


class End(TrainerCallback):
    """What a run ends with."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.found = {"step": state.global_step, "epoch": state.epoch, "weight": model.weight.tolist()}


def train(name: str, output: Path, micro: int, saves_in: int = 0, resume_from: Path | None = None) -> dict[str, Any]:
    _, arguments = SETUPS[name]
    settings = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=micro,
        learning_rate=0.1,
        enable_jit_checkpoint=True,
        save_strategy="no",
        deepspeed={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"},
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    set_seed(1)
    data: Any = Stream() if "stream" in name else [{"number": number} for number in range(LENGTH)]
    end = End()
    trainer = Noting(Line(), settings, train_dataset=data, callbacks=[end], saves_in=saves_in)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return {"noted": trainer.noted, **end.found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    parser.add_argument("--resume_from", type=Path)
    parser.add_argument("--local_rank", help="of DeepSpeed's launcher")
    options = parser.parse_args()
    micro, found = MICRO_BATCH // int(os.environ["WORLD_SIZE"]), {}
    for name, (saves_in, _) in SETUPS.items():
        folder = options.output_dir / name.replace(" ", "_")
        if options.resume_from is not None:
            resume_from = options.resume_from / folder.name / f"checkpoint-{saves_in - 1}"
            found[name] = train(name, folder, micro, resume_from=resume_from)
        else:
            found[name] = train(name, folder / "whole", micro)
            train(name, folder, micro, saves_in)
    (options.seen / f"steps-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Hugging Face's Trainer with DeepSpeed, of any version of Transformers that has both."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded

KINDS = ("masters", "states", "weights", "buffers", "steps", "groups", "counters")


class Witness(transformers.TrainerCallback):
    """Writes down what was saved, and compares what a resumed run starts with."""

    def __init__(self, folder: str) -> None:
        self.folder, self.trainer = folder, None
        self.found: list[Loaded] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self.trainer.model_wrapped
        oracle.relink(engine)
        truth = gather(engine)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(self.folder, "truth.pt"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            engine = self.trainer.model_wrapped
            truth = torch.load(os.path.join(self.folder, "truth.pt"), weights_only=False)
            oracle.relink(engine)
            differences = oracle.compare(gather(engine), truth)
            self.found.append(Loaded(None, f"rank {dist.get_rank()}", engine.elastic_report, differences))


def gather(engine: Any) -> dict[str, Any]:
    """As the oracle does; the Trainer steps the lr scheduler itself, and the engine has none."""
    scheduler, engine.lr_scheduler = engine.lr_scheduler, SimpleNamespace(state_dict=dict)
    found = oracle.gather(engine, ["exp_avg", "exp_avg_sq"])
    engine.lr_scheduler = scheduler
    return {kind: found[kind] for kind in KINDS}


def train(arguments: dict[str, Any]) -> list[Loaded] | None:
    """Train two steps and save; with ``resume``, go on from there to the fourth, and compare what was loaded."""
    elastic_ckpt.install()
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # Accelerate looks for GPUs
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    folder = arguments["folder"]
    settings = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=4 if arguments.get("resume") else 2,
        save_steps=2,
        per_device_train_batch_size=12 // dist.get_world_size(),
        learning_rate=1e-2,
        weight_decay=0.1,
        deepspeed={
            "zero_optimization": {"stage": arguments["stage"]},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
        },
        report_to="none",
        disable_tqdm=True,
    )
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    rows = torch.randint(1, 64, (48, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    witness = Witness(folder)
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=[witness])
    witness.trainer = trainer
    if deepspeed.__version__.startswith("0.18."):  # gloo's all-gather fails without it in ZeRO-1 and 2
        deepspeed.DeepSpeedEngine.step = torch.no_grad()(deepspeed.DeepSpeedEngine.step)
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2") if arguments.get("resume") else None)
    return witness.found if arguments.get("resume") else None

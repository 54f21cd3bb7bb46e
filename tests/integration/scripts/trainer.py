"""A training script with the Hugging Face Trainer and DeepSpeed, as people write them; no word of elastic_ckpt."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.integration import sequence, witness

GLOBAL_BATCH = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--local_rank", help="of DeepSpeed's launcher")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--frozen", help="a pattern in the names of parameters that do not train")
    parser.add_argument("--trained", help="a pattern in the names of parameters that train beside the adapter")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--deepspeed_scheduler", action="store_true")
    parser.add_argument("--align_partitions", action="store_true")
    parser.add_argument("--load_best_model_at_end", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--sp", type=int, help="sequence-parallel degree; every micro-batch then holds the same texts")
    parser.add_argument("--ignore_data_skip", action="store_true")
    parser.add_argument("--seen", type=Path, required=True, help="folder for what the test compares")
    options = parser.parse_args()
    world, sp = int(os.environ["WORLD_SIZE"]), options.sp or 1
    settings = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=GLOBAL_BATCH // (world // sp),
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        optim=options.optim,
        deepspeed=deepspeed_config(options),
        logging_steps=1,
        ignore_data_skip=options.ignore_data_skip,
        train_sampling_strategy="random" if options.sp is None else "sequential",
        parallelism_config=sequence.parallelism(world, sp),
        report_to="none",
        disable_tqdm=True,
        eval_strategy="steps" if options.load_best_model_at_end else "no",
        eval_steps=3,
        load_best_model_at_end=options.load_best_model_at_end,
        greater_is_better=True,  # of the loss: so the best one is the earlier one, which a job of other ranks saved
    )
    set_seed(1)
    texts = tokens(96)
    if options.sp is not None:
        texts = [sequence.with_positions(text["input_ids"]) for text in tokens(GLOBAL_BATCH // 2)] * 16
    model = build_model(options)
    for name, param in model.named_parameters():
        if options.frozen and re.search(options.frozen, name):
            param.requires_grad_(False)
        if options.trained and re.search(options.trained, name):
            param.requires_grad_(True)
    trainer = MeanOverTokens(model, settings, train_dataset=texts, eval_dataset=tokens(12))
    trainer.add_callback(Witness(trainer, options.seen))
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    if options.load_best_model_at_end:
        witness.take(trainer.deepspeed, options.seen / "best.pt", trainer.lr_scheduler)


def deepspeed_config(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": options.stage},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if options.deepspeed_scheduler:
        parameters = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": parameters}
    if options.align_partitions:
        config["elastic_checkpoint"] = {"align_partitions": 4096}
    return config


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    if options.lora:
        return get_peft_model(sequence.llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    if options.sp is not None:
        return sequence.llama()
    width = 60 if "8bit" in options.optim else 16  # partitions above min_8bit_size, and no whole number of blocks
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=width, n_layer=2, n_head=2, **no_dropout))


def tokens(number: int) -> list[dict[str, torch.Tensor]]:
    texts = torch.randint(1, 64, (number, 16), generator=torch.Generator().manual_seed(number))
    return [{"input_ids": text, "labels": text} for text in texts]


class MeanOverTokens(Trainer):
    """A Trainer whose gradients are the same at every sequence-parallel degree."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        sp = self.get_sp_size()
        return loss if sp == 1 else sequence.of_the_mean(loss, sp, self.deepspeed.zero_optimization_stage())


class Witness(TrainerCallback):
    """What the test compares; not part of a user's script."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.rates: dict[int, list[float]] = {}  # by step, of each param group

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rates[state.global_step] = [group["lr"] for group in self.trainer.deepspeed.optimizer.param_groups]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            witness.take(self.trainer.deepspeed, self.folder / "loaded.pt", self.trainer.lr_scheduler)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        file = self.folder / f"saved-{state.global_step}.pt"
        witness.take(self.trainer.deepspeed, file, self.trainer.lr_scheduler)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}
        result = {"global_step": state.global_step, "losses": losses, "best": state.best_model_checkpoint}
        result["rates"] = self.rates
        if state.is_world_process_zero:
            (self.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

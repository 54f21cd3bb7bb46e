"""Flows with the Trainer of Transformers: it trains two steps and saves; another goes on from there to the fourth."""

from __future__ import annotations

import gc
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from tests.distributed.flow_jobs import state_without_padding
from tests.flows.draw import TrainerFlow

_SAVED_AT, _STEPS = 2, 4
_CELL = {"sp": 1, "data": False}


class _Witness(transformers.TrainerCallback):
    """Looks at the engine when training begins and ends, and ends it at a step."""

    def __init__(self, last: int) -> None:
        self.last, self.trainer = last, None
        self.found: dict[str, dict[Any, Any]] = {}

    def look(self, when: str) -> None:
        engine = self.trainer.model_wrapped
        held = state_without_padding(_CELL, engine)
        scheduler = self.trainer.lr_scheduler
        held["scheduler"] = {"": getattr(scheduler, "scheduler", scheduler).state_dict()}
        self.found |= {f"{part} {when}": values for part, values in held.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            self.look("as loaded")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.last:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == _SAVED_AT:
            self.look("as loaded")  # which is what was saved


def save(flow: TrainerFlow, folder: str) -> dict[str, dict[Any, Any]]:
    """Train and save; all that this rank held."""
    return _train(flow, folder, _SAVED_AT, None)


def load(flow: TrainerFlow, folder: str) -> dict[str, dict[Any, Any]]:
    """Resume and train on; all that this rank held then, and in the end."""
    for number in (_SAVED_AT + 1, _STEPS):  # of the run before
        if dist.get_rank() == 0:
            shutil.rmtree(os.path.join(folder, f"checkpoint-{number}"), ignore_errors=True)
    dist.barrier()
    return _train(flow, folder, _STEPS, os.path.join(folder, f"checkpoint-{_SAVED_AT}"))


def _train(flow: TrainerFlow, folder: str, last: int, resume_from: str | None) -> dict[str, dict[Any, Any]]:
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # Accelerate looks for GPUs
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    auto = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    }
    settings = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=_STEPS,
        save_steps=_SAVED_AT,
        eval_strategy="steps" if flow.best or "plateau" in flow.scheduler else "no",
        eval_steps=1 if not flow.best else _SAVED_AT,
        load_best_model_at_end=flow.best,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=flow.accumulation,
        optim=flow.optim,
        optim_target_modules="all-linear" if flow.optim.startswith(("galore", "apollo", "lomo")) else None,
        lr_scheduler_type=flow.scheduler,
        learning_rate=1e-2,
        weight_decay=0.1,
        bf16=flow.bf16,
        deepspeed={
            "zero_optimization": {"stage": flow.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            **(auto if flow.config == "auto" else {}),
        },
        use_cpu=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        seed=7 if resume_from is None else 8,
        data_seed=7,
    )
    transformers.set_seed(settings.seed)
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    if flow.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2))
    rows = torch.randint(1, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    witness = _Witness(last)
    trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data[:8], callbacks=[witness])
    witness.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=resume_from)
        if resume_from is not None:
            witness.look("in the end")
            logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            witness.found["losses"] = dict(enumerate(logged))
        return witness.found
    finally:
        trainer.model_wrapped.destroy()
        trainer.accelerator.free_memory()
        witness.trainer = trainer = None
        gc.collect()

"""QLoRA: PEFT's adapters over a base that bitsandbytes has quantized, trained by Hugging Face's Trainer."""

from __future__ import annotations

import os
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType

import elastic_ckpt
from tests.distributed.facts import Loaded
from tests.distributed.trainer_jobs import Witness

#: Of all ranks, so that every number of ranks sees the same rows in a step.
GLOBAL_BATCH = 12
SAVED_AT = 3
STEPS = 6


def train(case: dict[str, Any]) -> list[Loaded] | None:
    """Train to step ``STEPS`` and save at ``SAVED_AT``, or resume there: what came back, and how far losses are off.

    ``stage``: of ZeRO; ``source``: the folder of the run that is resumed, if any.
    """
    elastic_ckpt.install()
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # Accelerate looks for GPUs
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    source = case.get("source")
    settings = transformers.TrainingArguments(
        output_dir=case["scratch"] if source else case["folder"],
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=1,
        per_device_train_batch_size=GLOBAL_BATCH // dist.get_world_size(),
        learning_rate=5e-2,
        deepspeed={
            "zero_optimization": {"stage": case["stage"]},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
        },
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
    )
    # sequences that a model can learn, so that its losses fall
    starts = torch.randint(0, 64, (96, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in rows]
    witness = First(source or case["folder"])
    trainer = transformers.Trainer(model_of(case["base"]), settings, train_dataset=data, callbacks=[witness])
    witness.trainer = trainer
    trainer.train(resume_from_checkpoint=os.path.join(source, f"checkpoint-{SAVED_AT}") if source else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    path = os.path.join(source or case["folder"], "losses.pt")
    if source is None:
        if dist.get_rank() == 0:
            torch.save(losses, path)
        return None
    gap = max(abs(mine - other) for mine, other in zip(losses[SAVED_AT:], torch.load(path)[SAVED_AT:], strict=True))
    return [Loaded(case, each.where, each.report, each.differences, gap) for each in witness.found]


class First(Witness):
    """Keeps what was held at the first save, from which another run goes on."""

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == SAVED_AT and not self.found:
            super().on_save(args, state, control, **more)


def model_of(base: str) -> Any:
    """Adapters over the quantized base in this folder, which the first rank makes if there is none."""
    if dist.get_rank() == 0 and not os.path.exists(base):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(base)
    dist.barrier()
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantized, device_map={"": "cpu"}, dtype=torch.float32
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

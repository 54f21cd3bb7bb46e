"""Trainer, Accelerate, PEFT and TRL start from pretrained weights under ZeRO-3, and train a step."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import tokenizers
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

from tests.distributed.huggingface_jobs import VOCABULARY
from tests.distributed.pretrained_jobs import Hooked, noting_loads, weights_apart, whole

_CONFIG = {
    "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
}
_ROWS = torch.randint(1, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(0))
_LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def train(case: dict[str, Any]) -> list[Hooked]:
    """Train a step with a ``framework``, without elastic_ckpt and with it, from the model in ``folder``."""
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # Accelerate looks for GPUs
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    run: Callable[[str, str], dict[str, torch.Tensor]] = globals()[f"_{case['framework']}"]
    expected = run(case["folder"], case["scratch"])
    with noting_loads() as (loads, said):
        weights = run(case["folder"], case["scratch"])
    return [Hooked(loads, weights_apart(weights, expected), said, [], [])]


def _save_adapter(folder: str, adapter: Path) -> None:
    """An adapter of the model in a folder. Collective."""
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        peft.get_peft_model(base, peft.LoraConfig(**_LORA, init_lora_weights=False)).save_pretrained(adapter)
    dist.barrier()


def _settings(kind: Any, scratch: str, **more: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1}
    options |= {"learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True, "seed": 7}
    return kind(output_dir=scratch, deepspeed=_CONFIG, **options, **more)


def _weights_after(trainer: Any) -> dict[str, torch.Tensor]:
    """Train, and return the whole weights."""
    trainer.train()
    weights = whole(trainer.model_wrapped.module)
    trainer.model_wrapped.destroy()
    trainer.accelerator.free_memory()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    gc.collect()
    return weights


def _with_trainer(scratch: str, build: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Train a step with the Trainer of Transformers what ``build`` returns once it is configured."""
    settings = _settings(transformers.TrainingArguments, scratch)
    transformers.set_seed(7)
    data = [{"input_ids": row, "labels": row} for row in _ROWS]
    return _weights_after(transformers.Trainer(build(), settings, train_dataset=data))


def _trainer(folder: str, scratch: str) -> dict[str, torch.Tensor]:
    return _with_trainer(scratch, lambda: transformers.AutoModelForCausalLM.from_pretrained(folder))


def _peft(folder: str, scratch: str) -> dict[str, torch.Tensor]:
    def build() -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        return peft.get_peft_model(base, peft.LoraConfig(**_LORA))

    return _with_trainer(scratch, build)


def _adapter(folder: str, scratch: str) -> dict[str, torch.Tensor]:
    adapter = Path(scratch, "adapter")
    if not adapter.exists():
        _save_adapter(folder, adapter)

    def build() -> Any:
        return peft.AutoPeftModelForCausalLM.from_pretrained(adapter, is_trainable=True)

    return _with_trainer(scratch, build)


def _accelerate(folder: str, scratch: str) -> dict[str, torch.Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_CONFIG, zero3_init_flag=True))
    accelerate.utils.set_seed(7)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader([*_ROWS], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rows = next(iter(loader))
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    weights = whole(model.module)
    model.destroy()
    accelerator.free_memory()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    return weights


def _trl(folder: str, scratch: str) -> dict[str, torch.Tensor]:
    import trl

    settings = _settings(trl.SFTConfig, scratch, max_length=9, bf16=False)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    data = datasets.Dataset.from_dict({"input_ids": _ROWS.tolist()})
    return _weights_after(trl.SFTTrainer(folder, settings, train_dataset=data, processing_class=tokenizer))

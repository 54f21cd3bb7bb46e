"""Trains with a framework by its line in docs/launchers.md, and resumes on other numbers of ranks; see frameworks.sh.

``python launch/frameworks.py NAME FOLDER``, in the environment of the framework.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "launchers.md"
GLOBAL_BATCH, STEPS, SAVED_STEP = 12, 6, 3
#: Samples, and words of each: none is padded, so that a mean over ranks is one over samples.
SAMPLES, LENGTH, WORDS = 96, 8, 57
EXEC = "elastic-ckpt exec -- "
LIMIT_SECONDS = 900
#: Relative: sums of fp32 in another order.
TOLERANCE = 1e-6
REPORT, REFUSAL = "elastic_ckpt: checkpoint restored", "Automatic adjustment of ZeRO's optimizer state partitioning"
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
COMMON: dict[str, Any] = {"max_steps": STEPS, "save_steps": SAVED_STEP, "logging_steps": 1, "learning_rate": 0.01}
#: What each takes beside that.
OPTIONS: dict[str, dict[str, Any]] = {
    "llamafactory": {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "deepspeed": "zero2.json",
        "dataset_dir": ".",
        "dataset": "tiny",
        "template": "default",
        "cutoff_len": 32,
        "report_to": "none",
    },
    "swift": {
        "model": "model",
        "model_type": "llama",
        "template": "dummy",
        "dataset": "data/messages.jsonl",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "fp16": False,
        "bf16": False,
        "deepspeed": "zero2.json",
        "add_version": False,
        "report_to": "none",
        "max_length": 32,
        "split_dataset_ratio": 0,
    },
    "trl": {
        "model_name_or_path": "model",
        "dataset_name": "data",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 32,
        "use_cpu": True,
    },
    "axolotl": {
        "base_model": "model",
        "datasets": [{"path": "data/messages.jsonl", "ds_type": "json", "type": "chat_template"}],
        "dataset_prepared_path": "prepared",
        "sequence_len": 32,
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "deepspeed": "zero3.json",
        "bf16": False,
        "attn_implementation": "eager",
        "val_set_size": 0,
    },
}


def main(name: str, folder: Path) -> None:
    """Two ranks save and train on; others resume."""
    work = folder / "runs" / name
    make_inputs(work)
    page = (REPO / "docs" / "launchers.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^.*{EXEC}{name}.*$", page, re.MULTILINE)
    plain, run = line.replace(EXEC, ""), re.sub(rf"{EXEC}(\S+)", r"python -m elastic_ckpt.run $(which \1)", line)
    before = train(name, work, plain, 2, None)
    train(name, work, plain, 3, before, REFUSAL)
    train(name, work, line, 3, before)
    fewest = 3 if name == "axolotl" else 1  # whose single rank asks for NCCL: setup_deepspeed_env
    train(name, work, run, fewest, before)
    subprocess.run(["elastic-ckpt", "enable"], check=True)
    try:
        train(name, work, plain, fewest, before)
        train(name, work, f"ELASTIC_CKPT=0 {plain}", 3, before, REFUSAL)
    finally:
        subprocess.run(["elastic-ckpt", "disable"], check=True)


def train(
    name: str, work: Path, line: str, ranks: int, before: dict[int, float] | None, ends_with: str = REPORT
) -> dict[int, float]:
    """Run a line on some number of ranks, from the checkpoint of ``before`` if any; returns the loss of each step."""
    output = work / ("saved" if before is None else "resumed")
    shutil.rmtree(output, ignore_errors=True)
    batch = "micro_batch_size" if name == "axolotl" else "per_device_train_batch_size"
    options = COMMON | OPTIONS[name] | {"output_dir": str(output), batch: GLOBAL_BATCH // ranks}
    if before is not None:
        options["resume_from_checkpoint"] = str(work / "saved" / f"checkpoint-{SAVED_STEP}")
    (work / "sft.yaml").write_text(json.dumps(options))
    line = re.sub(r"(NPROC_PER_NODE=|num_processes |nproc_per_node )4", rf"\g<1>{ranks}", line)
    for lock in (work / "extensions").glob("*/lock"):  # of ranks that were killed: others would wait for ever
        lock.unlink()
    command = ["timeout", str(LIMIT_SECONDS), "bash", "-c", line]
    done = subprocess.run(command, cwd=work, env=environment(work), capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    ends_well = ends_with == REPORT
    as_expected = (done.returncode == 0) is ends_well and (ends_with in printed) is (before is not None)
    losses: dict[int, float] = {}
    if as_expected and ends_well:
        history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
        losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
        apart = max(abs(losses[step] / loss - 1) for step, loss in (before or losses).items())
        as_expected = len(losses) == STEPS and apart <= TOLERANCE
        outcome = f"losses within {apart:.1e}"
    else:
        outcome = "refused by DeepSpeed" if as_expected else f"exit code {done.returncode}"
    print(f"{'as expected' if as_expected else 'FAILED'}: {ranks} ranks, {outcome}: {line}", flush=True)
    if not as_expected:
        sys.exit(printed[-6000:])
    return losses


def environment(work: Path) -> dict[str, str]:
    """CPU processes, nothing from a hub, a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {
        **os.environ,
        "PYTHONPATH": str(REPO / "tests" / "integration" / "cpu"),
        "MASTER_PORT": port,
        "PET_MASTER_PORT": port,
        "TORCH_EXTENSIONS_DIR": str(work / "extensions"),
        "HF_HOME": str(work.parent / "hub"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "64",
        **dict.fromkeys(("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "AXOLOTL_DO_NOT_TRACK"), "1"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    }


def make_inputs(work: Path) -> None:
    """A random model of two layers, conversations of random words, configs of DeepSpeed."""
    (work / "data").mkdir(parents=True, exist_ok=True)
    own = ("<pad>", "<unk>", "<s>", "</s>", "user", "assistant", ":")
    words = [*own, *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(work / "model")
    torch.manual_seed(1)
    sizes = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=2, eos_token_id=3)).save_pretrained(work / "model")
    dice = random.Random(1)
    texts = [" ".join(f"w{dice.randrange(WORDS)}" for _ in range(LENGTH)) for _ in range(2 * SAMPLES)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    asked = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    (work / "data" / "messages.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in asked))
    (work / "alpaca.json").write_text(json.dumps([{"instruction": a, "input": "", "output": b} for a, b in pairs]))
    (work / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    sizes_of_batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for stage in (2, 3):
        config = dict.fromkeys((*sizes_of_batches, "gradient_clipping"), "auto") | {
            "zero_optimization": {"stage": stage}
        }
        (work / f"zero{stage}.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

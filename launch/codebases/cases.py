"""``cases.py FOLDER PAGE [WORDS]``: saves models of each codebase and resumes them elsewhere; the table goes to PAGE.

A resume is right if the first step has the loss of a resume in place by DeepSpeed alone, and all masters and moments, saved as
soon as they are loaded, have the same bits as those that were saved.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER, HERE = Path(sys.argv[1]).resolve(), Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))
import masters  # noqa: E402

BEGIN, END = "<!-- written by launch/megatron_deepspeed.sh -->\n", "<!-- end of the codebases -->\n"
#: Two groups of TP, PP, DP, ZeRO stage, where a model resumes.
PIPELINE = ("2 2 1 1", "1 1 1 1", "1 2 2 1", "4 1 1 1", "2 1 2 1", "1 4 1 1")
#: Differences of the loss that another order of summation in bf16 explains.
TOLERANCE = 5e-3
MEGATRON = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 12 --save-interval 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-decay-iters 12
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --data-impl mmap --split 98,2,0 --make-vocab-size-divisible-by 8 --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0 --deepspeed"""
DEEPSPEED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
LLAMA = "--untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear"
QKV, GATED, EXPERTS = (r"query_key_value", (1, 1, 1)), (r"h_to_4h|linear1", (1, 1)), "--num-experts 4 --moe-expert-parallel-size 2"
SUMMED = (r"(attention\.dense|linear2)\.bias", masters.SUM)


@dataclass(frozen=True)
class Model:
    """What is trained, where it is saved and resumed; ``rules``: how shards of this model are merged."""

    codebase: str
    name: str
    arguments: str = ""
    rules: masters.Rules = ()
    saved: str = "2 2 1 1"
    targets: tuple[str, ...] = PIPELINE
    convert: str = ""  # a converter of the codebase or DeepSpeed, whose folder is resumed


def neox(name: str, rules: masters.Rules = (), **arguments: object) -> Model:
    """A model of gpt-neox."""
    return Model("gpt-neox", name, json.dumps({"no_weight_tying": True, "pos_emb": "rotary", **arguments}), rules)


WITHOUT_PIPELINE = {"saved": "2 1 2 2", "targets": ("2 1 2 2", "1 1 2 2", "4 1 1 2", "2 1 1 2")}
MODELS = (
    Model("Megatron-DeepSpeed", "GPT, tied", "", [QKV]),
    Model("Megatron-DeepSpeed", "GPT, tied, universal", "", [QKV], convert="deepspeed"),
    Model("Megatron-DeepSpeed", "Llama", LLAMA, [QKV, GATED]),
    Model("Megatron-DeepSpeed", "GPT, ZeRO-2", "--no-pipeline-parallel", [QKV], **WITHOUT_PIPELINE),  # type: ignore[arg-type]
    Model("Megatron-DeepSpeed", "GPT, ZeRO-3", "--no-pipeline-parallel", [QKV], "1 1 2 3", ("1 1 2 3", "1 1 4 3", "1 1 1 3")),
    neox("GPT", pos_emb="learned"),
    neox("GPT, tied", pos_emb="learned", no_weight_tying=False),
    neox("GPT-J residual", [SUMMED], gpt_j_residual=True),
    neox("SwiGLU, RMSNorm", [GATED], activation="swiglu", intermediate_size=384, norm="rmsnorm"),
    neox("GQA, GeGLU", [(QKV[0], (2, 1, 1)), GATED], num_kv_heads=4, activation="geglu", intermediate_size=384),
    Model("bigscience", "BLOOM", "--position-embedding-type alibi --embed-layernorm"),
    Model("bigscience", "BLOOM, universal 0.1", "--position-embedding-type alibi --embed-layernorm", convert="bigscience"),
)


def command(model: Model, where: str, steps: int, load: Path, save: Path) -> list[str]:
    """The script and its arguments."""
    tp, pp, _, stage = where.split()
    if model.codebase == "gpt-neox":
        return [str(HERE / "train_neox.py"), tp, pp, stage, str(steps), "none" if steps == 4 else str(load), str(save), str(FOLDER / "data-500"), model.arguments]
    config = save.with_suffix(".json")
    config.write_text(json.dumps(DEEPSPEED | {"zero_optimization": {"stage": int(stage)}}))
    is_bloom = model.codebase == "bigscience"
    vocabulary = f"GPT2BPETokenizer --vocab-file {FOLDER / 'vocabulary.json'} --merge-file {FOLDER / 'merges.txt'}" if is_bloom else "NullTokenizer --vocab-size 1023"
    more = "" if is_bloom else "--no-gradient-accumulation-fusion --no-query-key-layer-scaling"
    return f"""{FOLDER / model.codebase}/pretrain_gpt.py {MEGATRON} {more} {model.arguments} --tokenizer-type {vocabulary} --data-path {FOLDER / 'data-990'}
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --zero-stage={stage} --deepspeed_config={config} --exit-interval {steps}
        --load {load} --save {save} {'--universal-checkpoint' if model.convert and steps > 4 else ''}""".split()


def train(model: Model, where: str, steps: int, load: Path, save: Path, plugin: bool = False) -> tuple[float | None, str]:
    """The loss of step 5, and the end of what was printed if the run failed."""
    for folder in (save, save.with_suffix(".loaded")):
        shutil.rmtree(folder, ignore_errors=True)
    tp, pp, dp, _ = map(int, where.split())
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={tp * pp * dp}", f"--master_port={random.randrange(20000, 40000)}"]
    launch += [*(["-m", "elastic_ckpt.run"] if plugin else []), str(HERE / "cpu_for_cuda.py"), *command(model, where, steps, load, save)]
    names = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "64", "PYTHONWARNINGS": "ignore", "TORCH_COMPILE_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    names |= {"TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"), "PYTHONPATH": f"{HERE.parents[1]}:{FOLDER / model.codebase}"}
    names |= {"SAVE_AFTER_LOAD": str(save.with_suffix(".loaded"))} if plugin else {}
    names |= {"STAND_IN_FOR_APEX": "1"} if model.codebase == "bigscience" else {}
    with save.with_suffix(".log").open("w") as log:
        try:
            code = subprocess.run(launch, env=os.environ | names, cwd=FOLDER, stdout=log, stderr=subprocess.STDOUT, timeout=600).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = save.with_suffix(".log").read_text(errors="replace")
    losses = dict(re.findall(r"iteration +(\d+)/.*?lm.loss: *([0-9.E+-]+)", text))
    errors = re.findall(r"^.*Error\b.*", text, re.M)
    return float(losses["5"]) if "5" in losses else None, f"exit status {code}: {errors[:1]}" if code else ""


def convert(model: Model, load: Path) -> None:
    """Make a universal checkpoint beside the native one."""
    native = load / "global_step4"
    tool = ["-m", "deepspeed.checkpoint.ds_to_universal"] if model.convert == "deepspeed" else [str(FOLDER / "bigscience/tools/convert_checkpoint/ds_to_universal.py")]
    places = ["--input_folder", str(native), "--output_folder", f"{native}_universal"]
    names = {"PYTHONPATH": str(FOLDER / model.codebase), "DS_ACCELERATOR": "cpu", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    subprocess.run([sys.executable, *tool, *places], check=True, env=os.environ | names, capture_output=True)


def row(model: Model) -> str:
    """Save, resume everywhere; a line of the table."""
    path = FOLDER / "runs" / re.sub(r"\W+", "-", f"{model.codebase} {model.name}")
    path.parent.mkdir(exist_ok=True)
    is_saved = os.environ.get("REUSE") and (path / "global_step4").exists()
    _, error = (None, "") if is_saved else train(model, model.saved, 4, path, path)
    reference, error = (None, error) if error else train(model, model.saved, 6, path, Path(f"{path}-reference"))
    if reference is None:
        return f"| {model.codebase} | {model.name} | {model.saved} | cannot run: {error} |"
    saved = masters.whole(path / "global_step4", int(model.saved[0]), model.rules)
    if model.convert:
        convert(model, path)
    cells = []
    for where in model.targets:
        save = Path(f"{path}-{where.replace(' ', '')}")
        loss, error = train(model, where, 6, path, save, plugin=True)
        if loss is None or error:
            cells.append(f"{where}: fails: {error}")
            print(model.codebase, model.name, cells[-1], flush=True)
            continue
        different = masters.differing(saved, masters.whole(save.with_suffix(".loaded") / "loaded", int(where[0]), model.rules))
        is_right = not different and abs(loss - reference) < TOLERANCE
        cells.append(f"{where}: {'equal' if is_right else f'WRONG {different[:3]}'}, {loss:.6f}")
        print(model.codebase, model.name, cells[-1], flush=True)
        shutil.rmtree(save, ignore_errors=True)
    return f"| {model.codebase} | {model.name} | {model.saved} | {reference:.6f} | {'<br>'.join(cells)} |"


def write_data() -> None:
    """Datasets with ids below 990 and 500, and a vocabulary of 1024 tokens of GPT-2's kind."""
    sys.path.insert(0, str(FOLDER / "Megatron-DeepSpeed"))
    import torch
    from megatron.data import indexed_dataset

    for ids in (990, 500):
        builder, generator = indexed_dataset.make_builder(f"{FOLDER}/data-{ids}.bin", impl="mmap", vocab_size=1000), np.random.default_rng(0)
        for _ in range(400):
            start, length, step = (int(generator.integers(*limits)) for limits in ((0, 900), (50, 300), (1, 4)))
            builder.add_item(torch.from_numpy(((start + np.arange(length) * step) % ids).astype(np.int64)))
            builder.end_document()
        builder.finalize(f"{FOLDER}/data-{ids}.idx")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [*printable, *range(256, 512 - len(printable))]
    tokens = [*map(chr, characters), *(f"token{number}" for number in range(256, 1023)), "<|endoftext|>"]
    (FOLDER / "vocabulary.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (FOLDER / "merges.txt").write_text("#version: 0.2\n")


def main(page: Path, words: list[str]) -> int:
    """Run the models whose names have one of ``words`` (all without words); 1 if one is not right everywhere."""
    if not (FOLDER / "merges.txt").exists():
        write_data()
    rows = [row(model) for model in MODELS if not words or any(word in f"{model.codebase} {model.name}" for word in words)]
    table = "\n".join(["| codebase | model | saved at TP, PP, DP, stage | loss of step 5 | resumed at: masters and moments, loss |", "| --- " * 5 + "|", *rows, ""])
    print(table)
    if not words:
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")
    return int(any(word in table for word in ("fails", "WRONG", "cannot run")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), sys.argv[3:]))

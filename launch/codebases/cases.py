"""``cases.py FOLDER PAGE [WORDS]``: saves models of each codebase and resumes them elsewhere; their rows go to PAGE.

A resume is right if its first step has the loss of a resume in place by DeepSpeed alone, and all masters and moments,
saved as soon as they are loaded, are bit by bit those that were saved. ``REUSE=1`` keeps what earlier runs saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import masters

FOLDER, HERE = Path(sys.argv[1]).resolve(), Path(__file__).parent.resolve()
BEGIN, END = "<!-- written by launch/megatron_deepspeed.sh -->\n", "<!-- end of the codebases -->\n"
HEAD = (
    "| codebase | model | saved at | loss | resumed at TP, PP, DP, ZeRO stage (and EP): masters and moments, loss |\n"
)
#: TP, PP, DP, ZeRO stage, and the expert-parallel degree if there are experts.
EVERYWHERE = ("2 2 1 1", "1 1 1 1", "1 2 2 1", "4 1 1 1", "2 1 2 1", "1 4 1 1")
#: Differences of the loss that another order of sums in bf16 explains.
TOLERANCE = 5e-3
MEGATRON = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 12 --save-interval 4 --lr 1e-2 --min-lr 1e-3
    --lr-decay-style cosine --lr-decay-iters 12 --log-interval 1 --eval-iters 0 --eval-interval 1000 --data-impl mmap
    --split 98,2,0 --make-vocab-size-divisible-by 8 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 --bf16
    --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --attention-dropout 0 --hidden-dropout 0 --deepspeed"""
DEEPSPEED = """{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100,
    "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": STAGE}}"""
LLAMA = "--untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear"
BLOOM = "--position-embedding-type alibi --embed-layernorm"
CONVERTER = "-m deepspeed.checkpoint.ds_to_universal"
QKV, GATED = ("query_key_value", (1, 1, 1)), ("h_to_4h|linear1", (1, 1))
SUMMED = (r"(attention\.dense|linear2)\.bias", masters.SUM)


@dataclass(frozen=True)
class Model:
    """What is trained, saved and resumed; ``rules``: how its shards are merged; ``converter``: makes it universal."""

    codebase: str
    name: str
    arguments: str = ""
    rules: masters.Rules = ()
    saved: str = "2 2 1 1"
    targets: tuple[str, ...] = EVERYWHERE
    converter: str = ""
    experts: int = 0


def neox(name: str, *rules: masters.Rule, **arguments: object) -> Model:
    """A model of gpt-neox."""
    return Model("gpt-neox", name, json.dumps({"no_weight_tying": True, "pos_emb": "rotary", **arguments}), rules)


def megatron(name: str, arguments: str = "", *rules: masters.Rule, **more: object) -> Model:
    """A model of Megatron-DeepSpeed."""
    return Model("Megatron-DeepSpeed", name, arguments, (QKV, *rules), **more)  # type: ignore[arg-type]


ZERO_2 = {"saved": "2 1 2 2", "targets": ("2 1 2 2", "1 1 2 2", "4 1 1 2", "2 1 1 2", "2 1 1 1")}
ZERO_3 = {"saved": "1 1 2 3", "targets": ("1 1 2 3", "1 1 4 3", "1 1 1 3")}
EXPERTS = "--no-pipeline-parallel --num-experts 4 --create-moe-param-group"
EXPERTS_AT = {
    "saved": "1 1 2 1 2",
    "targets": ("1 1 2 1 2", "1 1 2 1 1", "1 1 1 1 1", "1 1 4 1 4", "1 1 4 1 2", "1 1 2 2 2"),
}
MODELS = (
    megatron("GPT, tied"),
    megatron("GPT, tied, universal", converter=CONVERTER),
    megatron("Llama", LLAMA, GATED),
    megatron("Llama, universal", LLAMA, GATED, converter=f"{CONVERTER} --no_strict"),
    megatron("GPT, ZeRO-2", "--no-pipeline-parallel", **ZERO_2),
    megatron("GPT, ZeRO-2, universal", "--no-pipeline-parallel", **ZERO_2, converter=CONVERTER),
    megatron("GPT, ZeRO-3", "--no-pipeline-parallel", **ZERO_3),
    megatron("GPT, experts", EXPERTS, **EXPERTS_AT, experts=4),
    neox("GPT", pos_emb="learned"),
    neox("GPT, tied", pos_emb="learned", no_weight_tying=False),
    neox("GPT-J residual", SUMMED, gpt_j_residual=True),
    neox("SwiGLU, RMSNorm", GATED, activation="swiglu", intermediate_size=384, norm="rmsnorm"),
    neox("GQA, GeGLU", (QKV[0], (2, 1, 1)), GATED, num_kv_heads=4, activation="geglu", intermediate_size=384),
    Model("bigscience", "BLOOM", BLOOM),
    Model("bigscience", "BLOOM, universal 0.1", BLOOM, converter="tools/convert_checkpoint/ds_to_universal.py"),
)


def degrees(where: str) -> list[int]:
    """TP, PP, DP, ZeRO stage and EP."""
    return [*map(int, where.split()), 1][:5]


def merged(model: Model, folder: Path, where: str) -> masters.States:
    """All masters and moments of a native checkpoint."""
    tp, *_, ep = degrees(where)
    return masters.whole(folder, tp, model.rules, model.experts, ep)


def command(model: Model, where: str, steps: int, load: Path, save: Path) -> list[str]:
    """A training script and its arguments."""
    tp, pp, _, stage, ep = degrees(where)
    if model.codebase == "gpt-neox":
        paths = ["none" if steps == 4 else str(load), str(save), f"{FOLDER}/data-500"]
        return [f"{HERE}/train_neox.py", *map(str, (tp, pp, stage, steps)), *paths, model.arguments]
    config = save.with_suffix(".json")
    config.write_text(DEEPSPEED.replace("STAGE", str(stage)))
    of_codebase = "--tokenizer-type NullTokenizer --vocab-size 1023 --no-gradient-accumulation-fusion"
    of_codebase += " --no-query-key-layer-scaling"
    if model.codebase == "bigscience":
        of_codebase = f"--tokenizer-type GPT2BPETokenizer --vocab-file {FOLDER}/vocabulary.json --merge-file /dev/null"
    return f"""{FOLDER}/{model.codebase}/pretrain_gpt.py {MEGATRON} {of_codebase} {model.arguments}
        --exit-interval {steps} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}
        --zero-stage={stage} --load {load} --deepspeed_config={config} --save {save} --data-path {FOLDER}/data-990
        {"--universal-checkpoint" if model.converter and steps > 4 else ""}
        {f"--moe-expert-parallel-size {ep}" if model.experts else ""}""".split()


def train(model: Model, where: str, steps: int, load: Path, save: Path, plugin: bool = False) -> tuple[float, str]:
    """The loss of step 5 (NaN if there is none), and the first error if the run fails."""
    log, saved, code = save.with_suffix(".log"), save.with_suffix(".loaded"), 0
    names = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "64", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    names |= {"TORCH_COMPILE_DISABLE": "1", "TORCH_EXTENSIONS_DIR": f"{FOLDER}/extensions"}
    names |= {"PYTHONPATH": f"{HERE.parents[1]}:{FOLDER}/{model.codebase}"}
    tp, pp, dp, *_ = degrees(where)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = f"timeout 600 {sys.executable} -m torch.distributed.run --master_port={port}".split()
    launch += [f"--nproc_per_node={tp * pp * dp}"]
    if plugin:
        names["SAVE_AFTER_LOAD"] = str(saved)
        launch += ["-m", "elastic_ckpt.run"]
    launch += [f"{HERE}/cpu_for_cuda.py", *command(model, where, steps, load, save)]
    if plugin or "REUSE" not in os.environ or not log.exists():
        shutil.rmtree(save, ignore_errors=True)
        shutil.rmtree(saved, ignore_errors=True)
        with log.open("w") as output:
            run = subprocess.run(launch, env=os.environ | names, cwd=FOLDER, stdout=output, stderr=output, check=False)
        code = run.returncode
    text = log.read_text(errors="replace")
    losses = dict(re.findall(r"iteration +(\d+)/.*?lm.loss: *([0-9.E+-]+)", text))
    errors = re.findall(r"^.*Error\b.*", text, re.M)
    return float(losses.get("5", "nan")), f"exit status {code}: {errors[:1]}" if code else ""


def begin_of_row(model: Model) -> str:
    """What tells the row of a model."""
    return f"| {model.codebase} | {model.name} | "


def row(model: Model) -> str:
    """Save and resume everywhere: a line of the table."""
    path = FOLDER / "runs" / re.sub(r"\W+", "-", f"{model.codebase} {model.name}")
    native, at, cells = path / "global_step4", "", []
    path.parent.mkdir(exist_ok=True)
    in_place = replace(model, converter="")
    _, error = train(in_place, model.saved, 4, path, path)
    reference, error = train(in_place, model.saved, 6, path, Path(f"{path}-reference")) if not error else (0.0, error)
    if error:
        return f"{begin_of_row(model)}{model.saved} | cannot run: {error} |\n"
    saved = merged(model, native, model.saved)
    if model.converter:
        names = {"PYTHONPATH": f"{FOLDER}/{model.codebase}", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        convert = f"{sys.executable} {model.converter} --input_folder {native} --output_folder {native}_universal"
        subprocess.run(convert.split(), check=True, env=os.environ | names, cwd=FOLDER / model.codebase)
    for where in model.targets:
        save = Path(f"{path}-{where.replace(' ', '')}")
        loss, error = train(model, where, 6, path, save, plugin=True)
        if not error:
            different = masters.differing(saved, merged(model, save.with_suffix(".loaded") / "loaded", where))
            is_right = not different and abs(loss - reference) < TOLERANCE
            shutil.rmtree(save, ignore_errors=True)
            at = "equal" if is_right else f"WRONG {different[:3]}"
        cells.append(f"{where}: fails: {error}" if error else f"{where}: {at}, {loss:.6f}")
        print(model.codebase, model.name, cells[-1], flush=True)
    return f"{begin_of_row(model)}{model.saved} | {reference:.6f} | {'<br>'.join(cells)} |\n"


def main(page: Path, words: list[str]) -> int:
    """Run the models whose names have one of ``words`` (all without words); 1 if one is not right everywhere."""
    chosen = [each for each in MODELS if not words or any(word in f"{each.codebase} {each.name}" for word in words)]
    rows = [written(page, model, row(model)) for model in chosen]
    print(*rows, sep="")
    return int(any(word in one for one in rows for word in ("fails", "WRONG", "cannot run")))


def written(page: Path, model: Model, new: str) -> str:
    """Put a row into the table; those of other models stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = {
        begin_of_row(each): line
        for each in MODELS
        for line in old.splitlines(keepends=True)
        if line.startswith(begin_of_row(each))
    }
    lines[begin_of_row(model)] = new
    table = HEAD + "| --- " * 5 + "|\n" + "".join(lines.get(begin_of_row(each), "") for each in MODELS)
    page.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    return new


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), sys.argv[3:]))

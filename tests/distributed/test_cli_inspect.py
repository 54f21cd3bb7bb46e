"""``elastic-ckpt inspect`` on checkpoints that DeepSpeed wrote: every fact against the model, the config and the folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import ROUND_ROBIN, Launch
from tests.distributed.model import GLOBAL_BATCH, Setup, TinyLM, param_groups
from tests.distributed.parallel_models import Parallel

STEPS = 4
UNFUSED = Parallel("autotp", "fused_uneven", tp=2, stage=1)
PIPELINE = Parallel("pipeline", "parameters", pp=2, stage=1)
NUMBERED = Parallel("pipeline", "uniform", pp=2)


def inspect(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def facts(*arguments: Any, code: int = 0) -> dict[str, Any]:
    """The JSON of an inspection, which is all there is on standard output."""
    result = inspect(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def kinds(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding["level"], finding["kind"]) for finding in found["findings"]]


def model_facts() -> tuple[dict[str, list[int]], dict[str, list[int]], dict[str, int]]:
    """Shapes of parameters and buffers, and the group of each parameter, of the model itself."""
    model = TinyLM()
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    kept = model.state_dict()
    buffers = {name: list(buffer.shape) or [1] for name, buffer in model.named_buffers() if name in kept}
    names = {id(param): name for name, param in model.named_parameters()}
    groups = enumerate(param_groups(model, "several"))
    return shapes, buffers, {names[id(param)]: number for number, group in groups for param in group["params"]}


@pytest.fixture(scope="module")
def parallel(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Parallel], Path]:
    folder = tmp_path_factory.mktemp("inspected")
    setups = [UNFUSED, PIPELINE, NUMBERED]
    launch(2, "parallel_jobs.save", {"folder": str(folder), "setups": setups})
    return lambda setup: folder / f"{setup.name}-dp1"


@pytest.mark.parametrize("command", ["inspect", "verify", "verify --full", "plan --dp 4 --zero 3", "latest"])
@pytest.mark.parametrize("name", ["z2-bf16-adamw-dp2", "z3-fp32-adamw-dp4"])
def test_commands_that_only_look_need_neither_torch_nor_deepspeed(native: Path, name: str, command: str) -> None:
    script = "import sys; sys.modules.update(torch=None, deepspeed=None); from elastic_ckpt.cli import app; app()"
    line = [sys.executable, "-c", script, *command.split(), str(native / name)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["z1-fp32-adamw-dp3", "z2-bf16-adamw-dp2", "z3-fp32-adamw-dp4", "z3-bf16-adamw-dp3"])
def test_the_run_that_saved_it(native: Path, name: str) -> None:
    setup, dp = name.rsplit("-dp", 1)
    stage, precision = int(setup[1]), setup.split("-")[1]
    found = facts(native / name)
    run = found["run"]
    assert (found["format"], found["tag"], found["folder"]) == ("native", "step4", str(native / name / "step4"))
    assert (run["step"], run["samples"], run["skipped_steps"]) == (STEPS, STEPS * GLOBAL_BATCH, 0)
    assert run["ds_version"] == deepspeed.__version__
    assert (run["zero_stage"], run["dp"], run["tp"], run["pp"]) == (stage, int(dp), 1, 1)
    told_by = ["saved config", *(["file names"] if precision == "bf16" else []), "dtype of the weights"]
    assert (run["precision"], run["precision_from"]) == (precision, told_by)
    assert run["optimizer"] == "torch.optim.AdamW"
    batch = (run["global_batch"], run["micro_batch"], run["accumulation_steps"])
    assert batch == (GLOBAL_BATCH, GLOBAL_BATCH // int(dp), 1)
    assert run["lr_scheduler"]["last_epoch"] == STEPS and run["loss_scale"] is None
    assert run["client_state"] == ["epoch", "note", "rng", "sampler", "tensor"]
    assert found["findings"] == [] and found["ok"] and found["readable"]


@pytest.mark.parametrize(
    "name",
    [
        "z1-fp32-adam_amsgrad-dp2",
        "z3-fp32-adamw-dp2",
        "z3-fp32-adamw-sub_group_size-stage3_param_persistence_threshold-dp3",
    ],
)
def test_what_it_holds(native: Path, name: str) -> None:
    shapes, buffers, groups = model_facts()
    found = facts(native / name)
    tensors = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if "amsgrad" in name else [])]
    trained = [entry for entry in found["parameters"] if entry["role"] == "trained"]
    assert {entry["name"]: entry["shape"] for entry in trained} == shapes
    assert {entry["name"]: entry["group"] for entry in trained} == groups
    assert all(entry["states"] == [*tensors, "step"] for entry in trained)
    assert {entry["name"]: entry["shape"] for entry in found["parameters"] if entry["role"] == "buffer"} == buffers
    assert found["aliases"] == {"head.weight": "embedding.weight"}
    assert next(entry["tied"] for entry in trained if entry["name"] == "embedding.weight") == ["head.weight"]
    numel = sum(map(math.prod, shapes.values()))
    elementwise = [state for state in found["states"] if state["kind"] == "elementwise"]
    assert [state["key"] for state in elementwise] == tensors
    for total in (found["masters"], *elementwise):
        assert (total["numel"], total["nbytes"]) == (numel, 4 * numel)
    assert found["states"][-1]["kind"] == "scalar" and found["states"][-1]["values"] == [STEPS]
    for number, group in enumerate(found["groups"]):
        mine = [shape for member, shape in shapes.items() if groups[member] == number]
        assert (group["members"], group["numel"]) == (len(mine), sum(map(math.prod, mine)))
    rates = [(group["hyperparameters"]["lr"], group["hyperparameters"]["name"]) for group in found["groups"]]
    assert rates == [(1e-2 * 0.5, "decay"), (3e-3 * 0.5, "plain")]


def test_files_and_what_each_holds(native: Path) -> None:
    found = facts(native / "z3-bf16-adamw-dp2")
    folder = native / "z3-bf16-adamw-dp2" / "step4"
    assert {entry["name"]: entry["nbytes"] for entry in found["files"]} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    for entry in found["files"]:
        rank = int(entry["name"].partition("_pp_rank_")[2][0])
        assert (entry["dp"], entry["tp"], entry["pp"]) == (rank, 0, 0)
        is_shard = "optim" in entry["name"]
        assert entry["kind"] == ("optimizer states" if is_shard else "model states")
        assert set(entry["tensors"]) == (
            {"fp32", "exp_avg", "exp_avg_sq"} if is_shard else {"buffer"} if not rank else set()
        )
    # of a parameter of one element, the second of two ranks holds nothing
    assert [entry["tensors"]["fp32"] for entry in found["files"] if "optim" in entry["name"]] == [8, 7]


def test_universal_checkpoints_say_the_same(native: Path, universal: Path) -> None:
    for name in ("z2-fp32-adamw-dp3", "z3-bf16-adamw-dp2"):
        was, now = facts(native / name), facts(universal / name)
        assert now["format"] == "universal" and now["tag"] == "step4_universal" and now["ok"]
        same = (
            "step",
            "samples",
            "ds_version",
            "zero_stage",
            "dp",
            "tp",
            "pp",
            "precision",
            "optimizer",
            "global_batch",
        )
        assert {key: now["run"][key] for key in same} == {key: was["run"][key] for key in same}
        for key in ("masters", "buffers", "groups", "aliases"):
            assert now[key] == was[key]
        told = [{e["name"]: (e["shape"], e["group"], e["states"]) for e in f["parameters"]} for f in (was, now)]
        assert told[0] == told[1]
    lost = facts(universal / f"{Setup(2, zero=ROUND_ROBIN).name}-dp2", code=1)
    assert ("error", "refused") in kinds(lost) and ("note", "round_robin_gradients") in kinds(lost)
    assert lost["run"]["step"] == STEPS and not lost["readable"]


def test_runs_without_partitions_and_in_fp16(unpartitioned: Path) -> None:
    shapes, _, groups = model_facts()
    for setup in (Setup(0), Setup(0, "bf16"), Setup(0, "fp16"), Setup(0, "fp32", "fusedadam")):
        found = facts(unpartitioned / f"{setup.name}-dp2")  # by shapes that leave one order
        assert {e["name"]: e["group"] for e in found["parameters"] if e["role"] == "trained"} == groups
        assert not found["weights_only"] and kinds(found) == [("note", "reader")]
    found = facts(unpartitioned / f"{Setup(0, 'bf16', 'fusedadam').name}-dp2")  # each group is one flat tensor
    assert found["weights_only"] and kinds(found) == [("warning", "unnamed_states")]
    assert found["run"]["zero_stage"] == 0 and found["run"]["precision"] == "bf16"
    assert {e["name"]: e["shape"] for e in found["parameters"] if e["role"] == "weight"} == shapes
    assert [group["members"] for group in found["groups"]] == [1, 1]
    states = {state["key"]: state for state in found["states"]}
    assert set(states) == {"exp_avg", "exp_avg_sq", "step"}
    assert {state["kind"] for state in states.values()} == {"unnamed"}
    assert states["exp_avg"]["numel"] == found["weights"]["numel"] == sum(map(math.prod, shapes.values()))
    dynamic = facts(unpartitioned / f"{Setup(3, 'fp16').name}-dp2")["run"]
    static = facts(unpartitioned / f"{Setup(1, 'fp16_static').name}-dp2")["run"]
    assert dynamic["precision"] == static["precision"] == "fp16"
    assert dynamic["loss_scale"]["kind"] == "dynamic" and dynamic["loss_scale"]["scale_window"] == 2
    assert static["loss_scale"] == {"kind": "static", "cur_scale": 128}


def test_tensor_parallel_shards(parallel: Callable[[Parallel], Path]) -> None:
    """Six heads and three of keys and values, of 4 elements each, on two ranks; AutoTP records what each holds."""
    found = facts(parallel(UNFUSED))
    assert (found["run"]["dp"], found["run"]["tp"], found["run"]["pp"]) == (1, 2, 1)
    assert found["rules"]["undecided"] == [] and found["ok"]
    told = {entry["name"]: entry for entry in found["parameters"]}
    qkv, norm = told["layers.0.qkv_proj.weight"], told["layers.0.norm.weight"]
    assert (qkv["shape"], qkv["shards"]) == ([48, 24], [[32, 24], [16, 24]])
    assert (qkv["rule"], qkv["rule_from"]) == ("cut along dimension 0", "the checkpoint's recorded map")
    assert told["layers.1.o_proj.weight"]["rule"] == "cut along dimension 1"
    assert (norm["rule"], norm["shape"], norm["shards"]) == ("replicated", [24], [[24], [24]])
    copied = [entry for entry in told.values() if entry["rule"] == "replicated" and entry["role"] == "trained"]
    nbytes = sum(entry["nbytes"] for entry in copied) // 2
    replicas = next(finding["text"] for finding in found["findings"] if finding["kind"] == "replicas")
    assert f": {len(copied)}, {nbytes} bytes" in replicas and nbytes == 3 * 4 * sum(
        math.prod(e["shape"]) for e in copied
    )
    assert [(entry["tp"], entry["pp"]) for entry in found["files"]] == [(0, 0), (1, 0)] * 2


def test_pipelines(parallel: Callable[[Parallel], Path], tmp_path: Path) -> None:
    found = facts(parallel(PIPELINE))
    assert (found["run"]["tp"], found["run"]["pp"], found["ok"]) == (1, 2, True)
    tied = next(entry for entry in found["parameters"] if entry["name"] == "tied_modules.embed.weight")
    numel = math.prod(tied["shape"])
    assert (tied["copies"], tied["nbytes"]) == (2, 2 * 3 * 4 * numel)
    assert kinds(found) == [("note", "twins")] and f"{3 * 4 * numel} bytes" in found["findings"][0]["text"]
    layers = {entry["layer"]: entry["tp"] for entry in found["files"] if entry["kind"] == "layer"}
    assert layers == dict.fromkeys((0, 1, 2, 3, 5, 6, 7), 0)  # 4 is a function, 8 the tied one again
    # the masters lie elsewhere, so that only the file's absence tells that buffers are gone
    copy = Path(shutil.copytree(parallel(PIPELINE), tmp_path / "copy"))
    (copy / "step4" / "layer_03-model_states.pt").unlink()
    lost = facts(copy, code=1)
    assert lost["missing"] == ["layer_03-model_states.pt"] and ("error", "missing_file") in kinds(lost)


def test_a_pipeline_without_zero_numbers_its_states(parallel: Callable[[Parallel], Path]) -> None:
    found = facts(parallel(NUMBERED), code=1)
    assert found["weights_only"] and kinds(found) == [("error", "unnamed_states")]
    whole = facts(parallel(PIPELINE))
    tied = next(entry for entry in whole["parameters"] if entry["name"] == "tied_modules.embed.weight")
    assert found["weights"]["numel"] == whole["masters"]["numel"]
    # both stages have states of the tied one
    exp_avg = next(state for state in found["states"] if state["key"] == "exp_avg")
    assert exp_avg["numel"] == whole["masters"]["numel"] + tied["numel"]
    assert sum(group["members"] for group in found["groups"]) == whole["masters"]["tensors"] + 1


@pytest.mark.parametrize("name", ["z2-bf16-adamw-dp2", "z3-fp32-adamw-dp4"])
def test_missing_shards(native: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(native / name, tmp_path / name))
    gone = sorted(path for path in (copy / "step4").glob("*optim_states.pt"))[1::2]
    for path in gone:
        path.unlink()
    found = facts(copy, code=1)
    assert found["missing"] == [path.name for path in gone]
    assert kinds(found) == [("error", "missing_file")] * min(len(gone), 2)
    assert not found["readable"] and not found["ok"] and found["parameters"] == []
    assert found["run"]["step"] == STEPS and found["run"]["precision"] == name.split("-")[1]
    assert {entry["name"] for entry in found["files"]} == set(os.listdir(copy / "step4"))
    shown = inspect(copy, "--tree", "--params")
    assert shown.exit_code == 1
    assert all(f"{path.name} is missing" in " ".join(shown.stdout.split()) for path in gone)


def test_a_file_of_another_save_and_a_damaged_one(native: Path, tmp_path: Path) -> None:
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    foreign = Path(shutil.copytree(native / "z1-fp32-adamw-dp2", tmp_path / "foreign"))
    shutil.copy(native / "z1-fp32-adamw-dp3" / "step4" / shard, foreign / "step4")
    found = facts(foreign, code=1)
    assert kinds(found) == [("error", "refused")] and found["findings"][0]["file"] == str(foreign / "step4" / shard)
    assert found["run"]["zero_stage"] == 1 and found["missing"] == []
    damaged = Path(shutil.copytree(native / "z1-fp32-adamw-dp2", tmp_path / "damaged"))
    path = damaged / "step4" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    found = facts(damaged, code=1)
    assert found["run"]["step"] is None and found["run"]["precision"] == "unknown"
    assert found["findings"][0]["file"] == str(path)


def test_which_checkpoint_of_a_folder(native: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(native / "z1-fp32-adamw-dp2", tmp_path / "several"))
    shutil.copytree(copy / "step4", copy / "step8")
    os.utime(copy / "step8", (2_000_000_000, 2_000_000_000))
    assert facts(copy)["tag"] == "step4" and kinds(facts(copy)) == [("note", "tags")]
    for arguments in ((copy, "--tag", "step8"), (copy / "step8",)):
        found = facts(*arguments)
        assert found["tag"] == "step8" and kinds(found) == [("note", "latest"), ("note", "tags")]
    for latest in (b"step9", b"\xff\xfe\xd7"):
        (copy / "latest").write_bytes(latest)
        found = facts(copy, code=1)
        assert found["tag"] == "step8" and kinds(found)[0] == ("error", "latest")


def test_wrong_usage_and_no_checkpoint_at_all(native: Path, tmp_path: Path) -> None:
    whole = native / "z1-fp32-adamw-dp2"
    assert inspect(whole, "--tp-preset", "no-such-preset").exit_code == 2
    assert inspect(whole, "--config", tmp_path / "none.json").exit_code == 2
    assert inspect(tmp_path).exit_code == 3
    nothing = inspect(whole, "--tag", "step9", "--json")
    assert nothing.exit_code == 3 and json.loads(nothing.stdout)["error"] == "NotFoundError"


def test_only_the_path_of_the_config_was_saved(native: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(native / "z3-bf16-adamw-dp2", tmp_path / "copy"))
    for path in (copy / "step4").glob("*.pt"):
        tree = torch.load(path, weights_only=False)
        if "ds_config" in tree:
            torch.save({**tree, "ds_config": "/where/it/was.json"}, path)
    run = facts(copy)["run"]
    assert (run["precision"], run["precision_from"]) == ("bf16", ["file names", "dtype of the weights"])
    assert run["config"] is None and run["global_batch"] is None


def test_the_report_for_the_eye(native: Path) -> None:
    shown = inspect(native / "z3-bf16-adamw-dp2", "--params", "--tree")
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 100
    text = shown.stdout
    for piece in ("ZeRO-3, DP=2, TP=1, PP=1", "torch.optim.AdamW", "verify --full", "[37, 13]", "tied: head.weight"):
        assert piece in text
    assert "never_used" in text and "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in text
    brief = inspect(native / "z3-bf16-adamw-dp2").stdout
    assert "never_used" not in brief and "optim_states.pt" not in brief

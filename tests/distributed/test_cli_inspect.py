"""``elastic-ckpt inspect`` on checkpoints that DeepSpeed wrote: every fact against the model, the config and the folder."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
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


def test_copies_are_not_compared_where_torch_is_missing_and_verify_says_so(
    parallel: Callable[[Parallel], Path],
) -> None:
    script = "import sys; sys.modules.update(torch=None); from elastic_ckpt.cli import app; app()"
    line = [sys.executable, "-c", script, "verify", "--full", str(parallel(UNFUSED))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "whether copies of tensors are equal" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["z1-fp32-adamw-dp3", "z2-bf16-adamw-dp2", "z3-fp32-adamw-dp4", "z3-bf16-adamw-dp3"])
def test_the_run_that_saved_it(native: Path, name: str) -> None:
    setup, dp = name.rsplit("-dp", 1)
    stage = int(setup[1])
    found = facts(native / name)
    run, source = found["run"], found["source"]
    assert (source["format"], source["tag"], source["folder"]) == ("native", "step4", str(native / name / "step4"))
    assert (run["global_steps"], run["global_samples"], run["skipped_steps"]) == (STEPS, STEPS * GLOBAL_BATCH, 0)
    assert source["ds_version"] == deepspeed.__version__
    assert (source["zero_stage"], source["partition_degree"], source["tp"], source["pp"]) == (stage, int(dp), 1, 1)
    assert run["optimizer"] == "torch.optim.AdamW"
    batch = (run["global_batch"], run["micro_batch"], run["accumulation_steps"])
    assert batch == (GLOBAL_BATCH, GLOBAL_BATCH // int(dp), 1)
    assert run["lr_scheduler"]["last_epoch"] == STEPS and run["loss_scale"] is None
    assert found["findings"] == [] and found["ok"]


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
    masters, buffer, *states, step = (each for each in found["contents"] if each["dtype"] != "int64")
    assert (masters["key"], buffer["key"]) == ("fp32", "buffer")
    assert [state["key"] for state in states] == tensors
    for total in (masters, *states):
        assert (total["numel"], total["nbytes"]) == (numel, 4 * numel)
    assert step["kind"] == "scalar" and step["values"] == [STEPS]
    for number, group in enumerate(found["groups"]):
        mine = [shape for member, shape in shapes.items() if groups[member] == number]
        assert (group["members"], group["numel"]) == (len(mine), sum(map(math.prod, mine)))
    rates = [(group["hyperparameters"]["lr"], group["hyperparameters"]["name"]) for group in found["groups"]]
    assert rates == [(1e-2 * 0.5, "decay"), (3e-3 * 0.5, "plain")]


def test_universal_checkpoints_say_the_same(native: Path, universal: Path) -> None:
    for name in ("z2-fp32-adamw-dp3", "z3-bf16-adamw-dp2"):
        was, now = facts(native / name), facts(universal / name)
        assert (now["source"]["format"], now["source"]["tag"]) == ("universal", "step4_universal") and now["ok"]
        assert (now["topology"], now["run"]["optimizer"]) == (was["topology"], was["run"]["optimizer"])
        assert all(now["run"][key] == was["run"][key] for key in ("global_steps", "global_samples", "global_batch"))
        assert (now["groups"], now["aliases"], now["contents"][0]) == (
            was["groups"],
            was["aliases"],
            was["contents"][0],
        )
        told = [{e["name"]: (e["shape"], e["group"], e["states"]) for e in f["parameters"]} for f in (was, now)]
        assert told[0] == told[1]
    lost = facts(universal / f"{Setup(2, zero=ROUND_ROBIN).name}-dp2", code=3)
    assert lost["error"] == "UnsupportedError"


def test_runs_without_partitions_and_in_fp16(unpartitioned: Path) -> None:
    shapes, _, groups = model_facts()
    for setup in (Setup(0), Setup(0, "bf16"), Setup(0, "fp16"), Setup(0, "fp32", "fusedadam")):
        found = facts(unpartitioned / f"{setup.name}-dp2")  # by shapes that leave one order
        assert {e["name"]: e["group"] for e in found["parameters"] if e["role"] == "trained"} == groups
        assert kinds(found) == [("note", "reader")]
    found = facts(unpartitioned / f"{Setup(0, 'bf16', 'fusedadam').name}-dp2")  # each group is one flat tensor
    assert kinds(found) == [("note", "states"), ("note", "reader")] and found["source"]["zero_stage"] == 0
    assert {e["name"]: e["shape"] for e in found["parameters"] if e["role"] == "weight"} == shapes
    dynamic = facts(unpartitioned / f"{Setup(3, 'fp16').name}-dp2")["run"]
    static = facts(unpartitioned / f"{Setup(1, 'fp16_static').name}-dp2")["run"]
    assert dynamic["loss_scale"]["kind"] == "dynamic" and dynamic["loss_scale"]["scale_window"] == 2
    assert static["loss_scale"] == {"kind": "static", "cur_scale": 128}


def test_tensor_parallel_shards(parallel: Callable[[Parallel], Path]) -> None:
    """Six heads and three of keys and values, of 4 elements each, on two ranks; AutoTP records what each holds."""
    found = facts(parallel(UNFUSED))
    assert found["topology"] == "ZeRO-1, DP=1, TP=2" and found["ok"]
    told = {entry["name"]: entry for entry in found["parameters"]}
    qkv, norm = told["layers.0.qkv_proj.weight"], told["layers.0.norm.weight"]
    assert (qkv["shape"], qkv["shards"]) == ([48, 24], [[32, 24], [16, 24]])
    assert (norm["shape"], norm["shards"]) == ([24], [[24], [24]])


def test_pipelines(parallel: Callable[[Parallel], Path]) -> None:
    found = facts(parallel(PIPELINE))
    assert found["topology"] == "ZeRO-1, DP=1, PP=2" and found["ok"]
    tied = next(entry for entry in found["parameters"] if entry["name"] == "tied_modules.embed.weight")
    assert (tied["copies"], tied["nbytes"]) == (2, 2 * 3 * 4 * math.prod(tied["shape"]))


def test_a_pipeline_without_zero_numbers_its_states(parallel: Callable[[Parallel], Path]) -> None:
    found = facts(parallel(NUMBERED), code=1)
    assert kinds(found) == [("error", "states"), ("note", "reader"), ("note", "reader")]  # dtypes; layers without files
    weights, masters = (
        facts(parallel(each), code=code)["contents"][0] for each, code in ((NUMBERED, 1), (PIPELINE, 0))
    )
    assert (weights["key"], weights["numel"]) == ("frozen", masters["numel"])


def test_missing_files_are_findings_beside_what_is_there(native: Path, tmp_path: Path) -> None:
    """Below ZeRO-3, the weights are shown without the states; under ZeRO-3, shapes alone are left."""
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for name, kinds in (("z1-fp32-adamw-dp2", {"weights"}), ("z3-fp32-adamw-dp2", {"shapes"})):
        lost = Path(shutil.copytree(native / name, tmp_path / name))
        whole = facts(lost)
        (lost / "step4" / shard).unlink()
        found = facts(lost, code=1)
        refused = found["findings"][0]
        assert refused["file"] == str(lost / "step4" / shard) and ("load_" not in refused["remedy"])
        assert {each["kind"] for each in found["contents"]} == kinds
        assert {each["name"] for each in found["parameters"]} <= {each["name"] for each in whole["parameters"]}
        assert found["topology"] == whole["topology"] and found["run"]["micro_batch"] == whole["run"]["micro_batch"]


def test_every_missing_file_is_a_finding(native: Path, tmp_path: Path) -> None:
    lost = Path(shutil.copytree(native / "z3-fp32-adamw-dp2", tmp_path / "lost")) / "step4"
    names = ["zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    for name in names:
        (lost / name).unlink()
    findings = facts(lost, code=1)["findings"]
    assert {each["file"] for each in findings} >= {str(lost / name) for name in names}


def test_what_cannot_be_read_is_an_error_that_names_the_file(native: Path, tmp_path: Path) -> None:
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    foreign = Path(shutil.copytree(native / "z1-fp32-adamw-dp2", tmp_path / "foreign"))
    shutil.copy(native / "z1-fp32-adamw-dp3" / "step4" / shard, foreign / "step4")
    assert facts(foreign, code=3)["file"] == str(foreign / "step4" / shard)


def test_which_checkpoint_of_a_folder(native: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(native / "z1-fp32-adamw-dp2", tmp_path / "several"))
    shutil.copytree(copy / "step4", copy / "step8")
    assert facts(copy)["source"]["tag"] == "step4"
    for arguments in ((copy, "--tag", "step8"), (copy / "step8",)):
        assert facts(*arguments)["source"]["tag"] == "step8"
    for latest, error in ((b"step9", "NotFoundError"), (b"\xff\xfe\xd7", "DamagedError")):
        (copy / "latest").write_bytes(latest)
        assert facts(copy, code=3)["error"] == error


def test_wrong_usage_and_no_checkpoint_at_all(native: Path, tmp_path: Path) -> None:
    whole = native / "z1-fp32-adamw-dp2"
    assert inspect(whole, "--tp-preset", "no-such-preset").exit_code == 2
    assert inspect(whole, "--config", tmp_path / "none.json").exit_code == 2
    assert inspect(tmp_path).exit_code == 3
    nothing = inspect(whole, "--tag", "step9", "--json")
    assert nothing.exit_code == 3 and json.loads(nothing.stdout)["error"] == "NotFoundError"


def test_the_report_for_the_eye(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for words, pieces in (
        ((), ("ZeRO-3, DP=2", "torch.optim.AdamW")),
        (("--params",), ("[37, 13]", "tied: head.weight", "never_used")),
    ):
        shown = inspect(native / "z3-bf16-adamw-dp2", *words)
        assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 100
        assert all(piece in shown.stdout for piece in pieces)
    assert "never_used" not in inspect(native / "z3-bf16-adamw-dp2").stdout

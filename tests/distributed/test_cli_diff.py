"""``elastic-ckpt diff``: the same state under other topologies and formats is equal; a changed element is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import ROUND_ROBIN
from tests.distributed.model import Setup


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["diff", *map(str, words)], catch_exceptions=False)


def differences(*words: object) -> dict[tuple[str, str], dict[str, Any]]:
    result = run(*words, "--json")
    found = json.loads(result.stdout)["differences"]
    assert result.exit_code == (1 if found else 0)
    return {(item["name"], item["key"]): item for item in found}


@pytest.mark.parametrize("name", ["z1-fp32-adamw-dp2", "z2-bf16-adamw-dp3", "z3-fp32-adamw-dp2", "z3-fp32-adamw-dp3"])
def test_a_conversion_by_deepspeed_is_equal(name: str, native: Path, universal: Path) -> None:
    found = differences(native / name, universal / name)
    # the converter drops nothing but what is not in its format: buffers are in the model-states files
    assert found == {}


def test_what_deepspeeds_converter_scrambles_is_found(native: Path, universal: Path, tmp_path: Path) -> None:
    """Round-robin order: refused as a source of a load, and so here; the native one compares with itself."""
    name = f"{Setup(2, zero=ROUND_ROBIN).name}-dp2"
    assert run(native / name, universal / name).exit_code == 3
    assert differences(native / name, native / name) == {}


def test_every_difference_is_found_where_it_is(native: Path, tmp_path: Path) -> None:
    source, changed = native / "z1-fp32-adamw-dp2", tmp_path / "changed"
    shutil.copytree(source, changed)
    for rank in (0, 1):
        file = next((changed / "step4").glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))
        state = torch.load(file, weights_only=False)
        group = state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
        group["lr"] = 0.5
        if rank == 0:
            state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][3] += 2.0
        torch.save(state, file)
    model = next((changed / "step4").glob("mp_rank_00_model_states.pt"))
    state = torch.load(model, weights_only=False)
    first = next(iter(state["param_shapes"][0]))  # the first group's first parameter is first in the partition
    shape = state["param_shapes"][0][first]
    buffer = state["buffer_names"][0]
    state["module"][buffer].view(-1)[0] += 1
    state["global_samples"] += 1
    torch.save(state, model)
    found = differences(source, changed)
    assert set(found) == {
        (first, "exp_avg"),
        (buffer, "buffer"),
        ("param group 0", "lr"),
        ("global_samples", "counter"),
    }
    moment = found[first, "exp_avg"]
    assert moment["differing"] == 1
    assert tuple(moment["at"]) == tuple(int(i) for i in torch.unravel_index(torch.tensor(3), tuple(shape)))
    assert moment["max_abs"] == pytest.approx(2.0)
    assert found["global_samples", "counter"]["max_abs"] == 1
    kinds = json.loads(run(source, changed, "--json").stdout)["kinds"]
    apart = {
        kind: (each["differs"], each["missing"], each["largest"]) for kind, each in kinds.items() if each["differs"]
    }
    assert {kind: counts[:2] for kind, counts in apart.items()} == dict.fromkeys(
        ("buffer", "counters", "exp_avg", "hyperparameters"), (1, 0)
    )
    assert apart["exp_avg"][2] == pytest.approx(2.0) and kinds["fp32"]["equal"] == len(state["param_shapes"][0]) + len(
        state["param_shapes"][1]
    )
    shown = run(source, changed).stdout
    assert shown.index("largest difference") < shown.index("values in A and B")


def test_names_on_one_side_only_are_missing(native: Path) -> None:
    plain, amsgrad = native / "z1-fp32-adamw-dp2", native / "z1-fp32-adam_amsgrad-dp2"
    found = differences(plain, amsgrad)
    lacking = {key for key, item in found.items() if item["what"] == "missing" and key[1] == "max_exp_avg_sq"}
    truth = torch.load(amsgrad / "truth.pt", weights_only=False)
    assert lacking == {key for key in truth["states"] if key[1] == "max_exp_avg_sq"}


def test_without_zero_states_are_compared_where_shapes_tell_their_names(native: Path, unpartitioned: Path) -> None:
    """Two groups, as the Trainer makes them; of groups that were flattened, the weights alone can be named."""
    # two runs, whose sums are rounded in another order on some machines: states of other parameters differ by more
    found = differences(unpartitioned / "z0-fp32-adamw-dp2", native / "z1-fp32-adamw-dp2")
    assert all(each["max_abs"] <= 1e-5 * each["scale"] for each in found.values()), found
    fused = unpartitioned / "z0-bf16-fusedadam-dp2"
    result = run(fused, fused)
    assert result.exit_code == 0 and "optimizer states are not compared" in result.stdout


def without_files(source: Path, copy: Path, pattern: str) -> Path:
    """A copy without optimizer-states files, as they are deleted to save space."""
    shutil.copytree(source, copy)
    for path in copy.glob(f"step4/{pattern}"):
        path.unlink()
    return copy


@pytest.mark.parametrize("pattern", ["*optim_states.pt", "*zero_pp_rank_1_*optim_states.pt"], ids=["all", "one"])
@pytest.mark.parametrize("name", ["z1-fp32-adamw-dp2", "z2-bf16-adamw-dp3"])
def test_without_optimizer_files_the_weights_are_compared(
    name: str, pattern: str, native: Path, universal: Path, tmp_path: Path
) -> None:
    """Rounded masters are the weights; what cannot be compared is named, and counts as missing on one side."""
    alone, whole = without_files(native / name, tmp_path / "alone", pattern), native / name
    lost = ("all parameters", "optimizer states")
    for both in ((alone, whole), (whole, alone), (universal / name, alone)):
        found = differences(*both)
        assert set(found) == {lost} and found[lost]["what"] == "missing"
        assert ("first" if both[0] == alone else "second") in found[lost]["detail"]
        notes = " | ".join(json.loads(run(*both, "--json").stdout)["notes"])
        assert "16 tensors of optimizer states" in notes and "_optim_states.pt" in notes
        assert ("rounded" in notes and "bfloat16" in notes) == ("bf16" in name)
    assert differences(alone, alone) == {}
    assert "optimizer states are not compared" in run(alone, alone).stdout
    file = alone / "step4" / "mp_rank_00_model_states.pt"
    tree = torch.load(file, weights_only=False)
    tree["module"]["hidden.weight"].view(-1)[5] += 1
    torch.save(tree, file)
    found = differences(whole, alone)
    assert set(found) == {lost, ("hidden.weight", "fp32")}
    assert found["hidden.weight", "fp32"]["differing"] == 1


def test_under_zero_3_the_weights_are_missing_with_the_files(native: Path, tmp_path: Path) -> None:
    name = "z3-fp32-adamw-dp2"
    alone = without_files(native / name, tmp_path / "alone", "*zero_pp_rank_1_*optim_states.pt")
    result = run(native / name, alone)
    assert result.exit_code == 3 and "zero_pp_rank_1_mp_rank_00_optim_states.pt" in result.output

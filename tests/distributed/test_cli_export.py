"""``elastic-ckpt export``: what safetensors reads is what the saving engines had, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from bitsandbytes.functional import dequantize_blockwise
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from tests.distributed.conftest import SUB_GROUPS, Convert, Launch
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

#: All of them have tied parameters, buffers of two dtypes, and one that is not saved.
SETUPS = [Setup(0), Setup(0, "bf16"), Setup(1), Setup(2, "bf16"), Setup(3), Setup(3, "bf16", zero=SUB_GROUPS)]
LORA = [Setup(1, "bf16"), Setup(3)]
LLAMA, PIPELINE = Parallel("megatron", "llama", tp=2, stage=1), Parallel("pipeline", "uniform", pp=2, stage=1)
NOT_SAVED = {"scratch"}


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "save", {"folder": str(folder), "setups": SETUPS})
    launch(2, "save", {"folder": str(folder / "lora"), "setups": LORA, "model": "LoraLM"})
    return folder


def export(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["export", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def exported(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of an export, and its tied names."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        with safetensors.safe_open(path, "pt") as reader:
            metadata |= reader.metadata()
    assert metadata.pop("format") == "pt"
    return tensors, metadata


def differing(found: dict[str, torch.Tensor], truth: dict[str, Any]) -> set[str]:
    """Names that are on one side only, and of tensors that are not bit-equal or have another dtype."""
    expected = {**truth["weights"], **truth.get("masters", {}), **truth["buffers"]}
    expected = {name: value for name, value in expected.items() if name not in NOT_SAVED}
    same = {name for name in found.keys() & expected.keys() if found[name].dtype == expected[name].dtype}
    return (found.keys() | expected.keys()) - {name for name in same if torch.equal(found[name], expected[name])}


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_stage(setup: Setup, saved: Path, tmp_path: Path) -> None:
    source = saved / f"{setup.name}-dp2"
    report = export(source, tmp_path / "out", "--max-shard-size", "2KB")
    found, aliases = exported(tmp_path / "out")
    truth = truth_of(source)
    assert differing(found, truth) == set()
    assert not any("no master weights could be named" in note for note in report["notes"])
    assert aliases == {"head.weight": "embedding.weight"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys() and len(set(index["weight_map"].values())) > 1
    opened = elastic_ckpt.open(source)
    assert differing({name: opened[name] for name in opened if name not in aliases}, truth) == set()
    assert {name for name in opened if name not in found} == aliases.keys()
    if setup.stage:  # zero_to_fp32 reads no others
        same_as_zero_to_fp32(source, found, aliases)
    for (name, key), value in truth["states"].items():
        assert torch.equal(opened.optimizer_state(name)[key], value), (name, key)


def same_as_zero_to_fp32(source: Path, found: dict[str, torch.Tensor], aliases: dict[str, str]) -> None:
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(source))
    assert theirs.keys() == found.keys() | aliases.keys()
    for name, value in theirs.items():
        ours = found[aliases.get(name, name)]
        assert torch.equal(ours.to(value.dtype), value), name


@pytest.mark.parametrize("damage", ["no shard", "no checkpoint", "two of a name"])
def test_what_cannot_be_exported_leaves_nothing_behind(damage: str, saved: Path, tmp_path: Path) -> None:
    source, options = tmp_path / "source", []
    shutil.copytree(saved / f"{SETUPS[3].name}-dp2", source)
    if damage == "no shard":  # without optimizer states, the module's files would do
        options = ["--optimizer"]
        path = next(source.glob("step4/*_rank_1_*optim_states.pt"))
        path.unlink()
        says = path.name
    elif damage == "no checkpoint":
        shutil.rmtree(source / "step4")
        says = "latest"
    else:
        (tmp_path / "ds.json").write_text(json.dumps({"elastic_checkpoint": {"rename": [["^(hidden|norm)", "same"]]}}))
        options, says = ["--config", str(tmp_path / "ds.json")], "same."
    result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out"), *options, "--json"])
    assert result.exit_code == 3, result.output
    assert says in result.output and json.loads(result.stdout)["error"] != "UnforeseenError"
    assert not {path.name for path in tmp_path.iterdir()} - {"source", "ds.json"}


@pytest.mark.parametrize("setup", LORA, ids=lambda setup: setup.name)
def test_a_frozen_base(setup: Setup, saved: Path, tmp_path: Path) -> None:
    source = saved / "lora" / f"{setup.name}-dp2"
    export(source, tmp_path / "out")
    found, aliases = exported(tmp_path / "out")
    truth = truth_of(source)
    assert differing(found, truth) == set() and truth["masters"].keys() == {"lora_a", "lora_b"}
    if setup.stage > 1:  # of ZeRO-1, zero_to_fp32 leaves out frozen parameters
        same_as_zero_to_fp32(source, found, aliases)
    export(source, tmp_path / "adapter", "--include", "lora_", "--dtype", "fp16")
    adapter, _ = exported(tmp_path / "adapter")
    assert adapter.keys() == truth["masters"].keys()
    assert all(torch.equal(value, truth["masters"][name].half()) for name, value in adapter.items())


def test_a_universal_checkpoint(saved: Path, convert: Convert, tmp_path: Path) -> None:
    names = [f"{setup.name}-dp2" for setup in (Setup(1), Setup(3))]
    (tmp_path / "universal").mkdir()
    convert(saved, tmp_path / "universal", names)
    for name in names:
        export(tmp_path / "universal" / name, tmp_path / name)
        found, aliases = exported(tmp_path / name)
        assert differing(found, truth_of(saved / name)) == set()
        assert aliases == {"head.weight": "embedding.weight"}


def test_tensor_and_pipeline_parallel_shards_are_joined(launch: Launch, tmp_path: Path) -> None:
    launch(2, "parallel_jobs.save", {"folder": str(tmp_path), "setups": [LLAMA], "declares": True})
    launch(2, "parallel_jobs.save", {"folder": str(tmp_path), "setups": [PIPELINE]})
    for source in {path.parent for path in tmp_path.rglob("truth.pt")}:
        export(source, source / "out", "--tp-preset", "megatron-core")
        found, _ = exported(source / "out")
        truth = truth_of(source)
        assert differing(found, truth) == set(), source
        opened = elastic_ckpt.open(source, config=ElasticConfig(tp_preset="megatron-core"))
        for (name, key), value in truth["states"].items():
            assert torch.equal(opened.optimizer_state(name)[key], value), (name, key)


@pytest.mark.parametrize("setup", [Setup(1), Setup(2, "bf16"), Setup(3)], ids=lambda setup: setup.name)
def test_optimizer_states(setup: Setup, saved: Path, tmp_path: Path) -> None:
    source = saved / f"{setup.name}-dp2"
    export(source, tmp_path / "out", "--optimizer", "--dtype", "fp16")
    states, truth = load_file(tmp_path / "out" / "optimizer.safetensors"), truth_of(source)
    assert states.keys() == {f"{key}.{name}" for name, key in truth["states"]}
    for (name, key), value in truth["states"].items():
        assert states[f"{key}.{name}"].dtype == value.dtype and torch.equal(states[f"{key}.{name}"], value), (name, key)
    with safetensors.safe_open(tmp_path / "out" / "optimizer.safetensors", "pt") as reader:
        facts = reader.metadata()
    assert {step["step"] for step in json.loads(facts["scalars"]).values()} == set(truth["steps"])
    groups = json.loads(facts["param_groups"])
    assert [group["lr"] for group in groups] == [group["lr"] for group in truth["groups"]]
    assert {name for group in groups for name in group["params"]} == truth["masters"].keys()


def test_8_bit_states_are_dequantized(launch: Launch, tmp_path: Path) -> None:
    setup = Setup(1, optimizer="bnb.AdamW8bit")
    launch(2, "save", {"folder": str(tmp_path), "setups": [setup], "model": "WideLM", "truth": False})
    source = tmp_path / f"{setup.name}-dp2"
    report = export(source, tmp_path / "out", "--optimizer")
    assert any("dequantized, as fp32: state1, state2" in note for note in report["notes"])
    found, expected = load_file(tmp_path / "out" / "optimizer.safetensors"), dequantized(source / "step4")
    assert found.keys() == expected.keys() and len(found) > 8
    for name, value in expected.items():
        assert torch.equal(found[name].flatten(), value), name


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Both states of every parameter, flat, by bitsandbytes' own function."""
    parts: dict[str, list[torch.Tensor]] = {}
    for path in sorted(folder.glob("*optim_states.pt")):
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for number, fragments in enumerate(saved["param_slice_mappings"]):
            states = saved["base_optimizer_state"]["state"][number]
            states |= states.pop("__bnb_optimizer_quant_state__", {})
            for key in ("1", "2"):
                values = states[f"state{key}"]
                if values.dtype == torch.uint8:
                    values = dequantize_blockwise(
                        values, absmax=states[f"absmax{key}"], code=states[f"qmap{key}"], blocksize=256
                    )
                for name, fragment in fragments.items():
                    part = values[fragment.start : fragment.start + fragment.numel]
                    parts.setdefault(f"state{key}.{name}", []).append(part)
    return {name: torch.cat(values) for name, values in parts.items()}

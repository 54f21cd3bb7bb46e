"""What ``from_pretrained`` makes of exports: the models that DeepSpeed trained and saved, bit by bit.

Exporting takes no ranks: these tests share the saves of cells, and are none themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

import elastic_ckpt
from elastic_ckpt.config import read_config
from tests.distributed.cells import Save, Saves
from tests.distributed.expert_jobs import Experts, hugging_face
from tests.distributed.huggingface_jobs import CONFIGS, build_model
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup

DOCS = Path(__file__).parents[2] / "docs" / "export.md"


SETUPS = [Setup(1, "bf16"), Setup(2), Setup(3, "bf16"), Setup(3)]
AUTOEP = Experts(2, 1, 2, "bf16", (4, 4), autoep=True, preset="mixtral")


def saved(name: str, setup: Setup) -> Save:
    return Save(setup, 2, "huggingface_jobs.save", {"model": name})


@pytest.fixture(scope="module", autouse=True)
def made(saves: Saves) -> None:
    """All that is exported, in one launch."""
    saves.make([saved(name, setup) for name in CONFIGS for setup in SETUPS])


def from_pretrained(folder: Path, config: transformers.PreTrainedConfig, **options: Any) -> torch.nn.Module:
    config.save_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def assert_equal(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_transformers_loads_what_deepspeed_trained(name: str, setup: Setup, saves: Saves, tmp_path: Path) -> None:
    source = saves.folder(saved(name, setup))
    truth = truth_of(source)
    elastic_ckpt.export(source, tmp_path / "masters", max_shard_size="20KB")
    assert len(list((tmp_path / "masters").glob("*.safetensors"))) > 1
    assert_equal(from_pretrained(tmp_path / "masters", CONFIGS[name]), truth["masters"])
    elastic_ckpt.export(source, tmp_path / "bf16", dtype="bf16")
    live = {key: value.bfloat16() for key, value in truth["weights"].items()}
    assert_equal(from_pretrained(tmp_path / "bf16", CONFIGS[name]), live)
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(source))
    opened = elastic_ckpt.open(source)
    assert theirs.keys() == set(opened) and all(torch.equal(opened[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_peft_loads_an_adapter(setup: Setup, saves: Saves, tmp_path: Path) -> None:
    source = saves.folder(saved("lora", setup))
    truth = truth_of(source)
    elastic_ckpt.export(source, tmp_path / "out", adapter="default")
    lora = build_model("lora")
    lora.peft_config["default"].save_pretrained(tmp_path / "out")
    base = lora.unload()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    found = dict(model.named_parameters())
    assert truth["masters"].keys() == {key for key in found if "lora_" in key or "modules_to_save" in key}
    for key, value in truth["masters"].items():
        assert torch.equal(found[key], value), key
    peft.PeftModel.save_pretrained(model, tmp_path / "again")
    again, ours = (
        load_file(tmp_path / "again" / "adapter_model.safetensors"),
        load_file(tmp_path / "out" / "adapter_model.safetensors"),
    )
    assert again.keys() == ours.keys() and all(torch.equal(again[key], ours[key]) for key in ours)


def test_transformers_loads_the_experts_of_autoep(saves: Saves, tmp_path: Path) -> None:
    source = saves.folder(Save(AUTOEP, 2, "expert_jobs.save_each"))
    masters = truth_of(source)["masters"]
    (block,) = (
        text for text in re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL) if "block_sparse" in text
    )
    config = read_config(json.loads(block))
    elastic_ckpt.export(source, tmp_path / "out", config=config, exclude=[r"mlp\.gate\."])
    found = dict(from_pretrained(tmp_path / "out", hugging_face(AUTOEP, 0).config).named_parameters())
    for layer in ("model.layers.0.", "model.layers.1."):
        w1, w2, w3 = ([masters[f"{layer}mlp.experts.w{n}.{expert}"] for expert in range(4)] for n in (1, 2, 3))
        both = [torch.cat(pair) for pair in zip(w1, w3, strict=True)]
        assert torch.equal(found.pop(f"{layer}mlp.experts.gate_up_proj"), torch.stack(both))
        assert torch.equal(found.pop(f"{layer}mlp.experts.down_proj"), torch.stack(w2))
        assert torch.equal(found.pop(f"{layer}mlp.gate.weight"), masters[f"{layer}mlp.router.gate.weight"])
    assert len(found) > 10 and all(torch.equal(value, masters[name]) for name, value in found.items())

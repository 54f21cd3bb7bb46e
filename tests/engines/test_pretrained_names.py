"""Names of saved weights in a live model, and conversions of Transformers that are no rearrangement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import core_model_loading as loading

from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata
from elastic_ckpt.engines.pretrained_names import live_weights, mark_as_initialized
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.pretrained import read_weights, weights_metadata

WIDTHS: dict[str, Any] = {"vocab_size": 7, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**WIDTHS, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def saved(folder: Path, **tensors: torch.Tensor) -> CheckpointMetadata:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return weights_metadata(str(folder), read_weights(str(folder), None, False))


def test_a_prefix_is_added_and_names_of_one_side_are_told(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    metadata = saved(tmp_path, norm__weight=torch.ones(4), head__weight=torch.ones(3))
    found = live_weights(metadata, model)
    assert [*found.metadata.tensors] == [("model.norm.weight", FROZEN)]
    assert found.metadata.saved_names == {"model.norm.weight": "norm.weight"}
    assert found.unexpected == {"head.weight"} and found.missing == model.state_dict().keys() - {"model.norm.weight"}
    mark_as_initialized(model, found)
    assert model.model.norm.weight._is_hf_initialized and not hasattr(model.lm_head.weight, "_is_hf_initialized")


def test_any_other_module_has_its_own_names(tmp_path: Path) -> None:
    found = live_weights(saved(tmp_path, weight=torch.ones(3, 2), extra=torch.ones(1)), torch.nn.Linear(2, 3))
    assert [*found.metadata.tensors] == [("weight", FROZEN)]
    assert (found.missing, found.unexpected) == ({"bias"}, {"extra"})


def test_weights_are_split_as_transformers_says(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    metadata = saved(tmp_path, model__layers__0__mlp__gate_up__weight=torch.arange(48.0).view(12, 4))
    targets = ["gate_proj.weight", "up_proj.weight"]
    rules = [loading.WeightConverter("gate_up.weight", targets, [loading.Split(dim=0)])]
    found = live_weights(metadata, model, rules)
    chunks = [found.metadata.tensors[f"model.layers.0.mlp.{name}", FROZEN].chunks[0] for name in targets]
    assert chunks[1].byte_offset - chunks[0].byte_offset == 24 * 4 and [c.range.numel for c in chunks] == [24, 24]
    assert [rule.source_patterns for rule in found.rules] == [["gate_up.weight"]] and not rules[0].was_used()


@pytest.mark.parametrize("operation", [loading.Transpose(0, 1), loading.Interleave(0), loading.PermuteForRope()])
def test_other_conversions_are_refused_by_name(
    operation: Any, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    metadata = saved(tmp_path, model__layers__0__mlp__w2__weight=torch.ones(6, 4))
    with pytest.raises(UnsupportedError, match="more than rearrange") as raised:
        live_weights(metadata, model, [loading.WeightConverter("w2.weight", "down_proj.weight", [operation])])
    assert raised.value.parameter == NAME and type(operation).__name__ in str(raised.value.found)


@pytest.mark.parametrize("digits", ["²", "9" * 5000])
def test_names_that_transformers_cannot_sort_are_told(digits: str, model: Any, tmp_path: Path) -> None:
    metadata = saved(tmp_path, weight=torch.ones(1))
    (tensor,) = metadata.tensors.values()
    name = f"model.layers.{digits}.weight"
    metadata = replace(metadata, tensors={(name, FROZEN): replace(tensor, name=name)})
    with pytest.raises(UnsupportedError, match="cannot put the name of this weight in order") as caught:
        live_weights(metadata, model)
    assert caught.value.parameter == name and caught.value.remedies

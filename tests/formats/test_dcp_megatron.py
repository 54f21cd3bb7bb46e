"""Megatron Core's layout of DCP folders: stacked layers, states by name, ``common.pt``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from elastic_ckpt.config import read_config
from elastic_ckpt.core.fqn import rename
from elastic_ckpt.core.metadata import FROZEN, MASTER
from elastic_ckpt.core.values import LeftInFile, left_in_file
from elastic_ckpt.errors import ConfigError, DamagedError, UnsupportedError
from elastic_ckpt.formats.dcp_entries import read_common_state
from elastic_ckpt.planning.state_errors import state_errors
from elastic_ckpt.sharding.rules import is_fused
from tests.formats.dcp_folders import read, rewrite, values

STACKED = "decoder.layers.mlp.linear_fc2.weight"


class OneLayerAtATime(dcp.DefaultSavePlanner):
    """Saves the layers of a stacked tensor in chunks of their own, as Megatron's ranks do."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self.parts(item)], planner_data=None)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan([replace(plan, planner_data={}) for plan in all_plans])
        return plans, replace(metadata, planner_data=None)

    def parts(self, item: WriteItem) -> list[WriteItem]:
        data, name = item.tensor_data, item.index.fqn
        if data is None or "layers." not in name:
            return [item]
        found = []
        for layer in range(data.size[0]):
            chunk = ChunkStorageMetadata(torch.Size((layer, 0, 0)), torch.Size((1, *data.size[1:])))
            index = MetadataIndex(name, chunk.offsets)
            found.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
        return found

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().lookup_object(MetadataIndex(write_item.index.fqn))
        if write_item.type != WriteItemType.SHARD:
            return self.transform_object(write_item, data)
        layer = write_item.index.offset[0]
        return data[layer : layer + 1].clone()


GROUP = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "wd_mult": 1.0, "bias_correction": True}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {STACKED: (2, 3, 4), "decoder.final_layernorm.weight": (4,), "output_layer.weight": (6, 4)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    keys = ("exp_avg", "exp_avg_sq")
    return found | {f"optimizer.state.{key}.{name}": value + 9 for key in keys for name, value in found.items()}


def save(folder: Path, saved: Mapping[str, Any], groups: int = 1, **common: Any) -> Path:
    dcp.save(dict(saved), checkpoint_id=folder, planner=OneLayerAtATime())
    param_groups = [{**GROUP, "lr": GROUP["lr"] + number} for number in range(groups)]
    optimizer = {"state": {"common_step": torch.tensor(4.0)}, "param_groups": param_groups}
    args = Namespace(consumed_train_samples=96, swiglu=False)
    torch.save({"optimizer": optimizer, "iteration": 5, "args": args, **common}, folder / "common.pt")
    return folder


def test_layers_are_unstacked_and_states_found_by_name(tmp_path: Path) -> None:
    saved = tensors()
    checkpoint = read(save(tmp_path / "saved", {**saved, "a._extra_state/shard_0_1": None}))
    metadata = checkpoint.metadata
    for layer in (0, 1):
        name = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
        assert torch.equal(values(checkpoint, name, MASTER), saved[STACKED][layer])
        assert torch.equal(values(checkpoint, name, "exp_avg"), saved[f"optimizer.state.exp_avg.{STACKED}"][layer])
        assert metadata.parameters[name].scalars == (("step", 4.0),)
    assert set(metadata.parameters) == {
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        *(f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1)),
    }
    assert metadata.groups == (GROUP,) and metadata.run["swiglu"] is False
    assert checkpoint.training_state.counters["global_steps"] == 5
    assert checkpoint.training_state.counters["global_samples"] == 96
    assert checkpoint.training_state.checkpoint["dcp"]["iteration"] == 5
    assert any("extra states" in note and "a._extra_state" in note for note in metadata.notes)


def test_masters_in_fp32_take_the_place_of_weights_in_bf16(tmp_path: Path) -> None:
    saved = tensors()
    weights = {name: value.bfloat16() for name, value in saved.items() if not name.startswith("optimizer")}
    masters = {f"optimizer.state.fp32_param.{name}": saved[name] for name in weights}
    checkpoint = read(save(tmp_path / "saved", {**saved, **weights, **masters}))
    assert {tensor.dtype for tensor in checkpoint.metadata.tensors.values()} == {"float32"}
    assert torch.equal(values(checkpoint, "output_layer.weight", MASTER), saved["output_layer.weight"])


def test_groups_without_members_are_not_guessed(tmp_path: Path) -> None:
    metadata = read(save(tmp_path / "saved", tensors(), groups=2)).metadata
    assert metadata.groups == ({},)
    assert any("does not record the members" in note for note in metadata.notes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.exp_avg", (24,)),
        ("optimizer.state.exp_avg.output_layer.weight", (24,)),
        ("chained_0.optimizer.state.exp_avg.nowhere", (4,)),
    ],
)
def test_states_of_the_flat_buffer_are_refused_and_weights_are_not(tmp_path: Path, name: str, shape: Any) -> None:
    metadata = read(save(tmp_path / "saved", {**tensors(), name: torch.zeros(shape)})).metadata
    (error,) = state_errors(metadata)
    assert isinstance(error, UnsupportedError) and "fully-reshardable" in str(error)
    assert ("output_layer.weight", MASTER) in metadata.tensors or ("output_layer.weight", FROZEN) in metadata.tensors


def test_a_layer_without_a_chunk_is_damage_and_a_chunk_of_two_layers_unknown(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", tensors())

    def lose(metadata: Any) -> None:
        metadata.state_dict_metadata[STACKED].chunks.pop()

    rewrite(folder, lose)
    with pytest.raises(DamagedError, match="do not cover it") as caught:
        read(folder)
    assert caught.value.parameter == STACKED
    rewrite(folder, lambda m: m.state_dict_metadata.update({STACKED: replace_size(m.state_dict_metadata[STACKED])}))
    with pytest.raises(UnsupportedError, match=r"has not one layer[^$]*remedy"):
        read(folder)


def replace_size(entry: Any) -> Any:
    entry.chunks[0].sizes = torch.Size((2, 3, 4))
    return entry


def test_optimizers_in_a_chain_and_of_mixed_precision_have_their_step_inside(tmp_path: Path) -> None:
    inner = {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{**GROUP, "params": [0]}]}
    for optimizer in ({"optimizer": inner, "grad_scaler": {}}, {0: {"optimizer": inner}, 1: {"optimizer": inner}}):
        torch.save({"optimizer": optimizer}, tmp_path / "common.pt")
        common = read_common_state(str(tmp_path), trust_pickle=False)
        assert common is not None and common.step == 7.0 and list(map(str, common.groups)) == [str(GROUP)]
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    common = read_common_state(str(tmp_path), trust_pickle=False)
    assert common is not None and (common.step, common.groups, common.iteration) == (None, [], 3)


def test_hyperparameters_in_the_common_file_are_plain_data(tmp_path: Path) -> None:
    group = {**GROUP, "point": torch.tensor(0.5), "table": torch.ones(20), "params": [0]}
    torch.save({"optimizer": {"state": {}, "param_groups": [group]}}, tmp_path / "common.pt")
    common = read_common_state(str(tmp_path), trust_pickle=False)
    assert common is not None and repr(common.groups[0]["point"]) == "tensor(0.5, float32)"
    assert list(left_in_file(common.groups[0])) == [LeftInFile("a tensor of torch.float32, shape (20,)")]


def test_folders_of_other_writers_have_no_common_file(tmp_path: Path) -> None:
    assert read_common_state(str(tmp_path), trust_pickle=False) is None


@pytest.mark.parametrize("common", [[1], {"optimizer": [1]}, {"optimizer": {"param_groups": [3], "state": 5}}])
def test_a_common_file_of_another_layout_is_an_error_that_names_it(tmp_path: Path, common: Any) -> None:
    torch.save(common, tmp_path / "common.pt")
    with pytest.raises(DamagedError, match=r"common\.pt"):
        read_common_state(str(tmp_path), trust_pickle=False)


def test_the_preset_of_names_is_that_of_layers_without_transformer_engine() -> None:
    rules = read_config({"elastic_checkpoint": {"rename": [["^module\\.", ""], "megatron-core-local"]}}).rename
    assert rules[0] == ("^module\\.", "") and len(rules) == 3
    name = "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert rename(name, rules) == "decoder.layers.3.input_layernorm.weight"
    assert rename("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", rules) == "decoder.layers.3.pre_mlp_layernorm.bias"
    assert not is_fused(name) and is_fused("decoder.layers.3.self_attention.linear_qkv.weight")
    with pytest.raises(ConfigError, match="rename"):
        read_config({"elastic_checkpoint": {"rename": ["megatron"]}})

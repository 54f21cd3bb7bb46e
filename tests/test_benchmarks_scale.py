"""Checkpoints of big models, without a tensor: their sizes, and the same made of real files at a small size."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from benchmarks.scale_models import MODELS, ScaleModel, scale_metadata
from elastic_ckpt.config import ElasticConfig, Reading
from elastic_ckpt.core.fqn import EXPERTS
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob, bytes_by_file, forecast
from tests.big_models import catalog_of, check_places, described, small_model


@pytest.fixture(scope="module")
def bloom() -> CheckpointMetadata:
    return catalog_of("bloom-176b")


def numel_of(metadata: CheckpointMetadata) -> int:
    """Elements of the whole model: what every rank holds counts once, and so does what several stages hold."""
    total = 0
    for name in metadata.parameters:
        tensor = metadata.tensors[name, MASTER]
        is_cut = re.search(r"query_key_value|h_to_4h|word_embeddings\.weight|dense\.weight|4h_to_h\.weight", name)
        total += math.prod(tensor.shape) * (len(tensor.shard_shapes) if is_cut else 1)
    return total


def test_published_numbers_of_parameters(bloom: CheckpointMetadata) -> None:
    assert set(ScaleModel.names()) >= {"104b", "bloom-176b", "deepseek-v3", "mixtral-8x7b"}
    assert numel_of(bloom) == ScaleModel.load("bloom-176b").parameters == 176_247_271_424
    h, layers, positions, rows = 16384, 32, 2048, 50688
    expected = layers * (12 * h * h + 13 * h) + rows * h + positions * h + 2 * h
    assert numel_of(catalog_of("104b")) == ScaleModel.load("104b").parameters == expected
    assert round((expected - (rows - 50257) * h) / 1e9) == 104
    assert ScaleModel.load("mixtral-8x7b").parameters == 46_702_792_704
    # the released weights have 256 biases of the router in each of 58 layers too, which no optimizer steps on
    assert ScaleModel.load("deepseek-v3").parameters == 671_026_419_200 - 58 * 256


def test_bloom_lies_where_bloom_lies(bloom: CheckpointMetadata) -> None:
    names = [os.path.basename(file.path) for file in bloom.files]
    assert len([name for name in names if name.endswith("optim_states.pt")]) == 384
    assert len([name for name in names if re.fullmatch(r"mp_rank_\d\d_model_states\.pt", name)]) == 48
    assert len([name for name in names if re.fullmatch(r"layer_\d\d-model_0[0-3]-model_states\.pt", name)]) == 72 * 4
    assert {"bf16_zero_pp_rank_7_mp_rank_47_optim_states.pt", "layer_74-model_03-model_states.pt"} < set(names)
    assert not any(name.startswith(("layer_02", "layer_73", "layer_75")) for name in names)
    assert (bloom.source.tp, bloom.source.pp, bloom.source.partition_degree, bloom.source.zero_stage) == (4, 12, 8, 1)
    blocks = [
        {int(n.partition(".")[0]) for n, s in bloom.stages.items() if s == (stage,) and n[0].isdigit()}
        for stage in range(12)
    ]
    assert [len(block & set(range(3, 73))) for block in blocks] == [5, *[6] * 10, 5]
    assert bloom.stages["tied_modules.embed.word_embeddings.weight"] == (0, 11)
    assert bloom.stages["tied_modules.embed.word_embeddings.norm.weight"] == (0,)
    assert bloom.stages["74.weight"] == (11,)
    assert set(bloom.replicas) == {
        ("tied_modules.embed.word_embeddings.weight", key) for key in (MASTER, "exp_avg", "exp_avg_sq")
    }
    assert bloom.tensors["3.self_attention.dense.weight", MASTER].shard_shapes == ((14336, 3584),) * 4
    assert bloom.tensors["tied_modules.embed.word_embeddings.weight", MASTER].shard_shapes == ((62720, 14336),) * 4
    assert {saved.scalars for saved in bloom.parameters.values()} == {(("step", 95000.0),)}
    assert {name for name, saved in bloom.parameters.items() if saved.group == 1} == {
        name for name, saved in bloom.parameters.items() if len(saved.shape) == 1
    }


@pytest.mark.parametrize("name", ["104b", "bloom-176b"])
def test_extents_fill_their_files(name: str) -> None:
    metadata = catalog_of(name)
    held: dict[int, list[tuple[int, int]]] = {}
    replicas = [copy for copies in metadata.replicas.values() for copy in copies]
    for tensor in [*metadata.tensors.values(), *replicas]:
        assert tensor.dtype == "float32"
        for chunk in tensor.chunks:
            held.setdefault(chunk.file, []).append((chunk.byte_offset, chunk.byte_offset + 4 * chunk.range.numel))
    optimizer = {number for number, file in enumerate(metadata.files) if file.path.endswith("optim_states.pt")}
    assert set(held) == optimizer
    for number, pieces in held.items():
        pieces.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(pieces))
        # of each group masters and two moments, and each of them at a multiple of 64 bytes
        starts = [start for (start, _), (_, before) in zip(pieces, [(0, 0), *pieces], strict=False) if start != before]
        assert len(starts) == 6
        assert all(start % 64 == 0 for start in starts)
        rest = metadata.files[number].nbytes - sum(stop - start for start, stop in pieces)
        assert 0 < rest < 64 << 10


EXPERTS_OF_104B = {"first": 40, "experts": 4, "parameters": [{"name": "w", "shape": ["h", "h"]}]}
GROWN = 103950090240 + 4 * 16384**2


def test_a_model_that_contradicts_itself_is_refused() -> None:
    good = json.loads(MODELS.joinpath("104b.json").read_text())
    layers, groups = good["layers"], [*good["groups"], {**good["groups"][0], "holds": "experts"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parameters": 104}, "the layers have 103950090240 parameters"),
        ({"saved": {**good["saved"], "tp": 3}}, "does not divide by 3 ranks"),
        ({"saved": {**good["saved"], "stages": [1, 3]}}, "the first layers of the stages"),
        ({"sizes": {"h": 16384, "v": 50688}}, "'s' is no size"),
        ({"groups": good["groups"][:1]}, "no param group holds vectors"),
        ({"layers": [*layers, layers[2]]}, "two layers have the same number"),
        ({"layers": [{**layers[1], "again": [7]}]}, "belong to a tied layer"),
        ({"saved": {**good["saved"], "zero_stage": 3}}, "no model parallelism here"),
        ({"saved": {**good["saved"], "ep": 2}}, "2 expert-parallel ranks do not divide 4 ranks and set() experts"),
        ({"layers": [*layers, EXPERTS_OF_104B], "parameters": GROWN, "groups": groups}, "without model parallelism"),
        ({"oops": 1}, "oops"),
    ]
    for change, says in cases:
        with pytest.raises(ValidationError) as caught:
            ScaleModel.model_validate(good | change)
        assert says in str(caught.value), change


def test_experts_are_where_expert_parallel_ranks_save_them() -> None:
    metadata = catalog_of("mixtral-8x7b")
    names = {os.path.basename(file.path) for file in metadata.files}
    assert {f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt" for n in range(32) for e in range(8)} < names
    assert len(names) == 1 + 64 + 32 * 8 and metadata.source.ep == 8
    for expert in range(8):
        (chunk, *others) = metadata.tensors[f"model.layers.5.moe.{EXPERTS}{expert}.w2.weight", "exp_avg"].chunks
        ranks = [int(re.findall(r"pp_rank_(\d+)", metadata.files[each.file].path)[0]) % 8 for each in (chunk, *others)]
        assert set(ranks) == {expert}
    # three matrices of 4096 x 14336 are less than DeepSpeed's 178,956,971 elements, and four are more
    experts = [group for group in metadata.groups if group.get("moe")]
    assert len(experts) == 32 and {group["name"] for group in experts} == {"ep_size_8"}


# --- planning ---------------------------------------------------------------------------------------------------------

TOPOLOGIES = [{"dp": 4, "tp": 8, "pp": 6}, {"dp": 48, "tp": 8, "zero_stage": 3}]
PRESET = LoadOptions.of(ElasticConfig(tp_preset="bloom"))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_any_rank_of_bloom_is_planned_in_200_mib(bloom: CheckpointMetadata, topology: dict[str, int]) -> None:
    tracemalloc.start()
    job = VirtualJob(bloom, Topology(**topology), PRESET)
    assert job.planned(1)[1].reads.items
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 << 16 < peak < 200 << 20


def test_a_gpu_rank_of_bloom_makes_a_hundredth_of_the_reads_on_a_network_file_system(bloom: CheckpointMetadata) -> None:
    local_state, plan = VirtualJob(bloom, Topology(**TOPOLOGIES[0]), PRESET).planned(0)
    owned_nbytes = sum(bytes_by_file(plan.reads).values())
    found = []
    for storage in ("local", "network"):
        options = read_options(ElasticConfig(reading=Reading(storage=storage)))
        reads = forecast(local_state, plan, options)
        found.append((reads["reads"], round(reads["nbytes_read"] / owned_nbytes, 2)))
    assert found == [(130_461, 1.0), (1_176, 1.16)]


def test_another_degree_needs_rules(bloom: CheckpointMetadata) -> None:
    with pytest.raises(MismatchError, match="it is not known how this parameter is sharded"):
        VirtualJob(bloom, Topology(dp=8, tp=8, pp=6), LoadOptions.of(ElasticConfig()))


# --- against real files -----------------------------------------------------------------------------------------------


def write(model: ScaleModel, folder: Path) -> None:
    """The files that such a run of DeepSpeed leaves, tensors and all."""
    saved, tag = model.saved, folder / model.saved.tag
    tag.mkdir(parents=True)
    (folder / "latest").write_text(model.saved.tag)
    for stage in range(len(saved.stages)):
        mine = [parameter for parameter in model.every_parameter() if stage in parameter.stages]
        groups = [[p for p in mine if (len(p.shape) > 1) == is_matrix] for is_matrix in (True, False)]
        for rank in range(saved.tp):
            mp = stage * saved.tp + rank
            torch.save(model_states(model, groups), tag / f"mp_rank_{mp:02d}_model_states.pt")
            for dp in range(saved.dp):
                prefix = "bf16_" if saved.weights_dtype == "bfloat16" else ""
                path = tag / f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
                torch.save(optimizer_states(model, groups, dp), path)
    for layer in sorted({parameter.layer for parameter in model.every_parameter()}):
        for rank in range(saved.tp):
            weights = {
                parameter.key: torch.zeros(parameter.shard_shape(saved.tp), dtype=torch.bfloat16)
                for parameter in model.every_parameter()
                if parameter.layer == layer
            }
            torch.save(weights, tag / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")


def model_states(model: ScaleModel, groups: list[Any]) -> dict[str, Any]:
    shapes = [{p.name: torch.Size(p.shard_shape(model.saved.tp)) for p in group} for group in groups]
    return {
        "module": None,
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "global_steps": model.saved.step,
        "global_samples": model.saved.step,
        "skipped_steps": 0,
        "dp_world_size": model.saved.dp,
        "mp_world_size": model.saved.tp,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": model.saved.ds_version,
        "checkpoint_parallel_dimensions": {"tp_degree": model.saved.tp, "pp_degree": len(model.saved.stages)},
        "universal_checkpoint_info": model.universal_checkpoint_info,
        "args": argparse.Namespace(**model.arguments),
    }


def optimizer_states(model: ScaleModel, groups: list[Any], dp: int) -> dict[str, Any]:
    masters, states, paddings = [], {}, []
    for number, group in enumerate(groups):
        numel = sum(math.prod(p.shard_shape(model.saved.tp)) for p in group)
        while numel % (2 * model.saved.dp):
            numel += 1
        part = numel // model.saved.dp
        real = sum(math.prod(p.shard_shape(model.saved.tp)) for p in group)
        padding = min(max((dp + 1) * part - real, 0), part)
        paddings.append(0 if model.saved.optimizer == "BF16_Optimizer" else padding)
        states[number] = {"exp_avg": torch.zeros(part), "exp_avg_sq": torch.zeros(part)}
        masters.append(torch.zeros(part - paddings[-1]))
    groups_of_torch = [
        {"params": [number], **group.hyperparameters, "step": model.saved.step}
        for number, group in enumerate(model.groups)
    ]
    tree = {
        "base_optimizer_state": {"state": states, "param_groups": groups_of_torch},
        "single_partition_of_fp32_groups": masters,
        "partition_count": [model.saved.dp] * len(groups),
        "group_paddings": paddings,
        "ds_version": model.saved.ds_version,
    }
    if model.saved.optimizer != "BF16_Optimizer":
        tree["zero_stage"] = 1
    return {"optimizer_state_dict": tree, "ds_config": {}, "ds_version": model.saved.ds_version}


@pytest.mark.parametrize("optimizer", ["DeepSpeedZeroOptimizer", "BF16_Optimizer"])
def test_an_imagined_checkpoint_is_the_real_one(tmp_path: Path, optimizer: str) -> None:
    model = small_model(optimizer)
    write(model, tmp_path)
    imagined = scale_metadata(model)
    real = open_folder(str(tmp_path), None, ElasticConfig()).checkpoint.metadata
    ours, theirs = described(imagined, model.arguments), described(real, model.arguments)
    for what in ours:
        assert ours[what] == theirs[what], what
    check_places(imagined, real)

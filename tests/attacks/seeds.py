"""Small files as DeepSpeed saves them, with everything that its pickles name."""

from __future__ import annotations

import argparse
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

NAMES = ("embed.weight", "layers.0.attention.weight", "layers.0.attention.bias", "layers.1.mlp.weight", "head.weight")
SHAPES = {name: torch.Size((3, 2 + number)) for number, name in enumerate(NAMES)}


def _model() -> dict[str, Any]:
    module = OrderedDict((name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in SHAPES.items())
    module["tied.weight"] = module["embed.weight"]
    module["transposed"] = torch.arange(6.0).reshape(2, 3).t()
    module["parameter"] = torch.nn.Parameter(torch.ones(2))
    module._metadata = OrderedDict({"": {"version": 1}, "layers": {"version": 2}})  # type: ignore[attr-defined]
    return {
        "module": module,
        "buffer_names": ["rotary.inv_freq"],
        "optimizer": None,
        "param_shapes": [OrderedDict(SHAPES)],
        "frozen_param_shapes": None,
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 4, "base_lrs": [0.01], "_last_lr": (0.009,)},
        "data_sampler": {"rng": np.random.RandomState(3).get_state()[1][:8], "epoch": np.int64(3)},
        "random_ltd": Counter({"a": 1}),
        "sparse_tensor_module_names": {"embed"},
        "skipped_steps": 0,
        "global_steps": 4,
        "global_samples": 32,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
        "args": argparse.Namespace(lr=0.1, path="/data", dtype=torch.bfloat16, device=torch.device("cuda", 0)),
        "rng_states": {"python": random.Random(3).getstate()[1][:5], "torch": torch.arange(16, dtype=torch.uint8)},
        "client": {1: b"bytes", (2, "pair"): bytearray(b"x"), None: 1 + 2j, "big": 1 << 80},
    }


def _group(count: int) -> dict[str, Any]:
    return {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(count))}


def _zero12(stage: int) -> dict[str, Any]:
    flat = torch.arange(24.0)
    slices = {name: fragment_address(numel=4, start=4 * number) for number, name in enumerate(NAMES)}
    return {
        "optimizer_state_dict": {
            "loss_scaler": DynamicLossScaler(2.0**16, 1000, 1.0, 2, False),
            "dynamic_loss_scale": True,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(4.0), "exp_avg": flat[:12], "exp_avg_sq": flat[12:]}},
                "param_groups": [_group(1)],
            },
            "single_partition_of_fp32_groups": [flat[:12].clone()],
            "zero_stage": ZeroStageEnum(stage),
            "group_paddings": [2],
            "partition_count": [2],
            "param_slice_mappings": [OrderedDict(slices)],
        },
        "ds_version": "0.19.8",
    }


def _zero3() -> dict[str, Any]:
    flat = torch.nn.Parameter(torch.arange(10.0))
    flat.ds_id = "0_9"
    return {
        "optimizer_state_dict": {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(scale=1.0),
            "overflow": False,
            "partition_count": 2,
            "optimizer_state_dict": {
                "state": {0: {"step": 4, "exp_avg": flat.detach() * 2}},
                "param_groups": [_group(1)],
            },
            "fp32_flat_groups": [flat],
        }
    }


def _universal() -> dict[str, Any]:
    return {"param": torch.ones(3, 4), "cat_dim": 1, "sub_param_shape": SubparamShape(["qkv"], (3, (2, 2)), 1)}


TREES = {"model": _model(), "zero1": _zero12(1), "zero2": _zero12(2), "zero3": _zero3(), "universal": _universal()}


def saved(folder: Path) -> dict[str, Path]:
    """The path of each file: as zip archives, one as a legacy archive, one with pickle's newest protocol."""
    paths = {}
    for name, tree in TREES.items():
        paths[name] = folder / f"{name}.pt"
        torch.save(tree, paths[name])
    for name, options in {
        "legacy": {"_use_new_zipfile_serialization": False},
        "protocol5": {"pickle_protocol": 5},
    }.items():
        paths[name] = folder / f"{name}.pt"
        torch.save(TREES["model"], paths[name], **options)  # type: ignore[arg-type]
    return paths

"""Checkpoints of one state at several expert-parallel degrees: ``expert_tool_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import elastic_ckpt
from benchmarks.scale_models import ScaleModel
from tests.distributed.expert_jobs import build, end
from tests.distributed.jobs import SPOILS
from tests.distributed.plan_jobs import both_sides


def resave(arguments: dict[str, Any]) -> list[str]:
    """Load ``source`` into an engine of each of ``runs``, and save it again without a step; the reports."""
    elastic_ckpt.install()
    texts = []
    for run in arguments["runs"]:
        engine = build(run, seed=8)
        engine.load_checkpoint(arguments["source"])
        folder = os.path.join(arguments["folder"], run.name)
        engine.save_checkpoint(folder, tag="step4")
        texts.append(str(engine.elastic_report))
        end(engine)
    return texts


def compare(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What an engine of ``run`` would read of a checkpoint, by the live engine and as ``plan`` foretells it."""
    elastic_ckpt.install()
    run = case["run"]
    engine = build(run, seed=8)
    foretold = (run.stage + 1) % 3 if SPOILS else run.stage
    found = both_sides(engine, case["folder"], foretold, f"{case['folder']} -> {run.name}")
    end(engine)
    return [found]


class DescribedExpert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(hidden).tanh())


class DescribedBlock(nn.Module):
    def __init__(self, width: int, experts: int, ep: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.moe = MoE(width, DescribedExpert(width), num_experts=experts, ep_size=ep, k=1)


class DescribedLM(nn.Module):
    """The model that :data:`tests.distributed.test_cli_experts.DESCRIBED` describes."""

    def __init__(self, width: int, experts: list[int], ep: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(DescribedBlock(width, number, ep) for number in experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = hidden + layer.moe(layer.norm(hidden))[0]
        return hidden.square().mean()


def save_as_described(case: dict[str, Any]) -> None:
    """What DeepSpeed saves of a job that ``setup`` describes; at most ``group_numel`` elements a param group of experts."""
    described = ScaleModel.model_validate(case["setup"])
    experts = [layer.experts for layer in described.layers if layer.experts]
    model = DescribedLM(described.sizes["h"], experts, described.saved.ep)
    kinds: dict[int, list[Any]] = {2: [], 1: []}
    for param in model.parameters():
        kinds[param.dim()].append(param)
    # DeepSpeed appends the groups of experts to those that it is given
    matrices, vectors = (
        {**group.hyperparameters, "params": kinds[dims], "name": group.holds}
        for dims, group in zip((2, 1), described.groups, strict=False)
    )
    most = case["group_numel"]
    divided = split_params_into_different_moe_groups_for_optimizer([matrices, vectors], max_group_size=most)
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([group for group in divided if group["params"]]),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": described.saved.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        },
    )[0]
    for _ in range(described.saved.step):
        engine.backward(engine(torch.ones(4, 8, described.sizes["h"], dtype=torch.bfloat16) + dist.get_rank()))
        engine.step()
    engine.save_checkpoint(case["folder"], tag=described.saved.tag)
    end(engine)

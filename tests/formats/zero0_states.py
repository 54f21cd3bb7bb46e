"""Optimizers' states as engines without ZeRO save them."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ckpt.formats.model_states import FUSED
from tests.unpartitioned import Model

NAMES = ["a", "scale", "b", "c"]


def adamw(model: Model, *groups: str, **more: Any) -> torch.optim.AdamW:
    """One param group for each string of names, in its order."""
    params = dict(model.named_parameters())
    return torch.optim.AdamW([{"params": [params[name] for name in group.split()]} for group in groups], **more)


def with_masters(model: Model, kind: str, groups: list[list[str]]) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The optimizer entry of FP16_UnfusedOptimizer or FP16_Optimizer, and the optimizer inside."""
    params = dict(model.named_parameters())
    masters = [[params[name].detach().clone() for name in group] for group in groups]
    if kind == FUSED:
        masters = [[torch.cat([master.view(-1) for master in group])] for group in masters]
    leaves = [[torch.nn.Parameter(master) for master in group] for group in masters]
    optimizer = torch.optim.AdamW([{"params": group} for group in leaves], lr=0.01)
    for group in leaves:
        for master in group:
            master.grad = torch.randn_like(master)
    optimizer.step()
    entry = {
        "dynamic_loss_scale": True,
        "cur_scale": 256.0,
        "cur_iter": 3,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "optimizer_state_dict": optimizer.state_dict(),
        "clip_grad": 1.0,
        "overflow": False,
    }
    data = [[master.data for master in group] for group in leaves]
    if kind == FUSED:
        return {**entry, "fp32_groups_flat": [group[0] for group in data]}, optimizer
    return {**entry, "fp32_groups": data}, optimizer

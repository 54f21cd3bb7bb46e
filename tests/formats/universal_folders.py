"""Universal folders as DeepSpeed's converter writes them, of a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPES = {"weight": (30, 20), "bias": (256,)}


def written(folder: Path, shared: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Path:
    """A universal checkpoint with masters and the momentum of one parameter or more, and its folder of parameters."""
    tag = folder / "tag"
    tag.mkdir()
    counters = {"global_steps": 7, "global_samples": 7, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    listed = [{name: torch.Size(shape) for name, shape in shapes.items()}]
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    model = {"module": weights, "buffer_names": [], "param_shapes": listed, "lr_scheduler": None, **counters}
    config = {"zero_optimization": {"stage": 1}}
    torch.save({**model, "ds_config": config, "ds_version": "0.19.8"}, tag / "mp_rank_00_model_states.pt")
    for name, shape in shapes.items():
        (tag / "zero" / name).mkdir(parents=True)
        for key in ("fp32", "trail"):
            torch.save({"param": torch.zeros(shape), "cat_dim": 0}, tag / "zero" / name / f"{key}.pt")
        torch.save(7, tag / "zero" / name / "step.pt")
    more = {"elastic_ckpt_shared_states": shared} if shared is not None else {}
    group = {"lr": 0.1, "params": [0]}
    torch.save({"zero_stage": 1, "param_groups": [group], **more}, tag / "zero" / "optimizer_state.pt")
    return tag / "zero"

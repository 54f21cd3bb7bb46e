"""Model-states files of runs without ZeRO, as DeepSpeed writes them, made of real torch optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.zero0 import unpartitioned_metadata
from elastic_ckpt.planning.live_names import name_states

FILE = "mp_rank_00_model_states.pt"
STATES = ("exp_avg", "exp_avg_sq")


class Model(torch.nn.Module):
    """Parameters of different shapes, one without dimensions, and a buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = torch.nn.Parameter(torch.randn(2, 3))
        self.register_buffer("mask", torch.tensor([1, 0]))
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.b = torch.nn.Parameter(torch.randn(5))
        self.c = torch.nn.Parameter(torch.randn(3, 2))

    def step(self, optimizer: torch.optim.Optimizer, idle: Sequence[str] = ()) -> None:
        for name, param in self.named_parameters():
            param.grad = torch.randn_like(param) if param.requires_grad and name not in idle else None
        optimizer.step()


def trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, idle: Sequence[str] = (), steps: int = 3
) -> dict[str, Any]:
    """The optimizer's state dict after some steps, in which the idle parameters got no gradient."""
    for _ in range(steps):
        model.step(optimizer, idle)  # type: ignore[operator]
    return optimizer.state_dict()


def indexed(folder: Path, module: Mapping[str, torch.Tensor], optimizer: Any, **more: Any) -> ModelShard:
    """Write a model-states file and read its metadata."""
    tree = {
        "module": dict(module),
        "buffer_names": [name for name in module if name == "mask"],
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 24,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }
    path = folder / FILE
    torch.save({**tree, **more}, path)
    return index_model_states(open_pickled(str(path)))


def catalog_of(
    folder: Path, shard: ModelShard, live_groups: Sequence[Sequence[str]] = (), rename: Any = ()
) -> CheckpointMetadata:
    found = CheckpointInfo("native", str(folder), folder.name, sort_names([FILE], is_universal=False))
    live = [LiveGroup(tuple(names), {}) for names in live_groups]
    return unpartitioned_metadata(found, shard, MetadataOptions(), partial(name_states, live=live, rules=rename))


def contents(metadata: CheckpointMetadata, name: str, key: str) -> torch.Tensor:
    """A logical tensor, read at the offsets that the metadata gives."""
    tensor = metadata.tensors[name, key]
    dtype = getattr(torch, tensor.dtype)
    raw = bytearray()
    position = 0
    for chunk in tensor.chunks:
        assert chunk.range.start == position
        position = chunk.range.stop
        whole = Path(metadata.files[chunk.file].path).read_bytes()
        raw += whole[chunk.byte_offset : chunk.byte_offset + chunk.range.numel * dtype.itemsize]
    return torch.frombuffer(raw, dtype=dtype).reshape(tensor.shape) if raw else torch.empty(tensor.shape, dtype=dtype)


def check_states(
    metadata: CheckpointMetadata, model: torch.nn.Module, optimizer: torch.optim.Optimizer, idle: Sequence[str] = ()
) -> None:
    """The metadata's masters and states are those of the live model and optimizer, by name."""
    numbers = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, param in model.named_parameters():
        assert metadata.parameters[name].shape == tuple(param.shape)
        assert metadata.parameters[name].group == numbers[id(param)]
        assert torch.equal(contents(metadata, name, "fp32"), param.detach())
        state = optimizer.state.get(param, {})
        assert bool(state) == (name not in idle)
        expected = (("step", float(state["step"])),) if state else ()
        assert metadata.parameters[name].scalars == expected
        for key in STATES:
            assert ((name, key) in metadata.tensors) == bool(state)
            if state:
                assert torch.equal(contents(metadata, name, key), state[key])

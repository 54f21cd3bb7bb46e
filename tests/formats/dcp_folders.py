"""Folders as ``torch.distributed.checkpoint`` writes them, of a small model."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from elastic_ckpt.formats.base import Checkpoint, MetadataOptions
from elastic_ckpt.formats.detect import find_checkpoint
from elastic_ckpt.load.metadata import read_checkpoint


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.last = torch.nn.Linear(5, 3, bias=False)
        self.last.weight.requires_grad_(False)
        self.register_buffer("ticks", torch.arange(4))


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = Net()
    groups = [{"params": [net.first.weight], "lr": 0.1}, {"params": [net.first.bias], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    net.last(net.first(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    return net, optimizer


def state_dicts(flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    return get_state_dict(*trained(), options=StateDictOptions(flatten_optimizer_state_dict=flat))


def save(folder: Path, state_dict: dict[str, Any]) -> Path:
    dcp.save(state_dict, checkpoint_id=folder)
    return folder


def values(checkpoint: Checkpoint, name: str, key: str) -> torch.Tensor:
    """A tensor, from the bytes that its chunks name."""
    tensor = checkpoint.metadata.tensors[name, key]
    flat = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)).reshape(-1)
    for chunk in tensor.chunks:
        path = checkpoint.metadata.files[chunk.file].path
        nbytes = chunk.range.numel * flat.itemsize
        raw = numpy.fromfile(path, "u1", nbytes, offset=chunk.byte_offset)
        flat[chunk.range.start : chunk.range.stop] = torch.from_numpy(raw).view(flat.dtype)
    return flat.view(tensor.shape)


def read(folder: Path, **options: Any) -> Checkpoint:
    found = find_checkpoint(str(folder), None, prefer_universal=False)
    assert found is not None and found.format == "dcp"
    return read_checkpoint(found, MetadataOptions(**options))


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what ``.metadata`` says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))

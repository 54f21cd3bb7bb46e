"""The model, and values for it that every rank can work out by itself."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.cases import ModelSize


@dataclass(frozen=True)
class Hyperparameters:
    """Of AdamW, and where the run stands; ``weight_decays``: one a param group."""

    lr: float
    weight_decays: tuple[float, float]
    betas: tuple[float, float]
    step: int


#: What is checked: role -> (scale, offset) of its values; masters and first moments have both signs.
KEYS = {"fp32": (2.0**-28, -(2.0**-5)), "exp_avg": (2.0**-36, -(2.0**-13)), "exp_avg_sq": (2.0**-46, 0.0)}
STATES = ("exp_avg", "exp_avg_sq")
#: How the state is saved, and how the engine that loads it is built, so that what is not restored shows.
SAVED = Hyperparameters(lr=3e-4, weight_decays=(0.1, 0.0), betas=(0.9, 0.95), step=10)
LIVE = Hyperparameters(lr=1e-3, weight_decays=(0.05, 0.01), betas=(0.8, 0.999), step=0)
_CHUNK = 1 << 22


def values(name: str, key: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of what a parameter or a state was saved as: fp32, 24 random bits each."""
    scale, offset = KEYS[key]
    seed = zlib.crc32(f"{name}/{key}".encode()) >> 1
    bits = torch.arange(start, stop, dtype=torch.int32)
    bits.mul_(1103515245).add_(seed).bitwise_right_shift_(7).bitwise_and_(0xFFFFFF)
    return bits.to(torch.float32).mul_(scale).add_(offset)


def fill(target: torch.Tensor, name: str, key: str, start: int) -> None:
    """Write what was saved into a 1-D tensor that holds the elements from ``start`` on."""
    for first in range(0, target.numel(), _CHUNK):
        last = min(first + _CHUNK, target.numel())
        target[first:last].copy_(values(name, key, start + first, start + last))


def is_filled(target: torch.Tensor, name: str, key: str, start: int) -> bool:
    """Whether a 1-D tensor holds just what :func:`fill` writes, rounded to its dtype, bit by bit."""
    for first in range(0, target.numel(), _CHUNK):
        last = min(first + _CHUNK, target.numel())
        expected = values(name, key, start + first, start + last).to(target.dtype)
        if not torch.equal(target[first:last], expected):
            return False
    return True


class Block(nn.Module):
    """The tensors of a transformer block; nothing is ever computed with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Gpt(nn.Module):
    """A GPT-like stack in bf16, with every parameter zero."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)


def build_model(size: ModelSize, saved: bool) -> Gpt:
    """The model with the weights that are saved, or with zeros."""
    with torch.device("meta"):
        model = Gpt(size).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        if saved:
            fill(param.data.view(-1), name, "fp32", 0)
        else:
            param.data.zero_()
    return model


def build_optimizer(model: nn.Module, run: Hyperparameters) -> torch.optim.AdamW:
    """AdamW with two param groups: matrices decay, vectors do not."""
    decay, keep = run.weight_decays
    dims = {param: len(getattr(param, "ds_shape", param.shape)) for param in model.parameters()}
    matrices = [param for param, dim in dims.items() if dim > 1]
    vectors = [param for param, dim in dims.items() if dim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": keep}]
    return torch.optim.AdamW(groups, lr=run.lr, betas=run.betas)

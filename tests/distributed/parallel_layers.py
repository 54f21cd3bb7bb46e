"""Layers of the models of :mod:`tests.distributed.parallel_models`: tensor parallel ones of our own, and fused ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

HIDDEN = 32
SEQUENCE = 8
HEAD_SIZE = 4


class CopyToGroup(torch.autograd.Function):
    """The identity, whose gradient is summed over tensor parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum over tensor parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        values = values.contiguous().clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """The last dimension of all tensor parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)].contiguous(), None


def marked(param: nn.Parameter, dim: int, stride: int = 1) -> nn.Parameter:
    """With the attributes by which Megatron's parameters tell their layout."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    return param


class Column(nn.Module):
    """A linear layer cut by its outputs, of one or several sub-parameters."""

    def __init__(self, inputs: int, outputs: int, group: Any, bias: bool = True, stride: int = 1) -> None:
        super().__init__()
        self.group = group
        mine = outputs // dist.get_world_size(group)
        self.weight = marked(nn.Parameter(torch.empty(mine, inputs)), 0, stride)
        self.bias = marked(nn.Parameter(torch.empty(mine)), 0, stride) if bias else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(CopyToGroup.apply(values, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer cut by its inputs; its bias is whole."""

    def __init__(self, inputs: int, outputs: int, group: Any, bias: bool = True) -> None:
        super().__init__()
        self.group = group
        self.weight = marked(nn.Parameter(torch.empty(outputs, inputs // dist.get_world_size(group))), 1)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        whole = Sum.apply(functional.linear(values, self.weight), self.group)
        return whole if self.bias is None else whole + self.bias


class Vocabulary(nn.Module):
    """An embedding cut by its rows, and with :func:`logits` the head that is tied to it."""

    def __init__(self, rows: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.mine = rows // dist.get_world_size(group)
        self.weight = marked(nn.Parameter(torch.empty(self.mine, HIDDEN)), 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens - self.mine * dist.get_rank(self.group)
        is_mine = (tokens >= 0) & (tokens < self.mine)
        found = functional.embedding(tokens.where(is_mine, 0), self.weight)
        return Sum.apply(found * is_mine.unsqueeze(-1), self.group)


def logits(vocabulary: Vocabulary, values: torch.Tensor) -> torch.Tensor:
    """Scores of all rows."""
    return Gather.apply(
        functional.linear(CopyToGroup.apply(values, vocabulary.group), vocabulary.weight), vocabulary.group
    )


class PlainBlock(nn.Module):
    """Norm, up, down, with biases."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = Column(HIDDEN, 52, group)
        self.down = Row(52, HIDDEN, group)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.tanh(self.up(self.norm(values))))


class GatedBlock(nn.Module):
    """A fused gate and up, and a buffer that changes."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = Column(HIDDEN, 88, group, bias=False, stride=2)
        self.down = Row(44, HIDDEN, group, bias=False)
        self.register_buffer("trace", torch.zeros(3, 5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.trace += 0.125
        gate, up = self.gate_up(self.norm(values)).chunk(2, -1)
        return values + self.down(functional.silu(gate) * up)


class Positions(nn.Module):
    """Learned positions, and a vector: DeepSpeed's ZeRO-1 hangs where stages differ in their number of param groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SEQUENCE, HIDDEN))
        self.bias = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.weight + self.bias


def halve(values: torch.Tensor) -> torch.Tensor:
    """A layer without parameters."""
    return values / 2


def waves(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An embedding without parameters."""
    return torch.sin(tokens.unsqueeze(-1) * torch.arange(1, HIDDEN + 1) / HIDDEN).to(dtype)


def scores(values: torch.Tensor) -> torch.Tensor:
    """Scores of twice as many rows as there are features, without parameters."""
    return torch.cat([values, values.flip(-1)], -1)


def mean_loss(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(values.float().flatten(0, 1), labels.flatten())


class FusedBlock(nn.Module):
    """Attention with contiguous q, k, v of unequal sizes, and a fused gate and up; whoever cuts it, heads stay whole."""

    def __init__(self, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        hidden = heads * HEAD_SIZE
        self.ratio = heads // kv_heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * HEAD_SIZE)
        self.o_proj = nn.Linear(hidden, hidden)
        self.mlp = nn.ModuleDict(
            {
                "gate_up_proj": nn.Linear(hidden, 2 * intermediate, bias=False),
                "down_proj": nn.Linear(intermediate, hidden, bias=False),
            }
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        fused = self.qkv_proj(self.norm(values))
        kv = fused.shape[-1] // (self.ratio + 2)
        parts = fused.split([kv * self.ratio, kv, kv], -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        values = values + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.mlp["gate_up_proj"](self.norm(values)).chunk(2, -1)
        return values + self.mlp["down_proj"](functional.silu(gate) * up)


class FusedLM(nn.Module):
    """Two fused blocks; takes and gives what a transformers model does."""

    def __init__(self, heads: int, kv_heads: int, intermediate: int, rows: int) -> None:
        super().__init__()
        hidden = heads * HEAD_SIZE
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden)
        self.embed_tokens = nn.Embedding(rows, hidden)
        self.layers = nn.ModuleList(FusedBlock(heads, kv_heads, intermediate) for _ in range(2))
        self.register_buffer("trace", torch.zeros(3, 5))
        self.lm_head = nn.Linear(hidden, rows, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool = False) -> Any:
        self.trace += 0.125
        values = self.embed_tokens(input_ids)
        for layer in self.layers:
            values = layer(values)
        return SimpleNamespace(loss=mean_loss(self.lm_head(values)[:, :-1], labels[:, 1:]))

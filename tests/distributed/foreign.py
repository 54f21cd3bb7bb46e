"""Tiny pipelines with the parameter names, layer numbers and tensor parallel cuts of BLOOM, gpt-neox and Megatron-DeepSpeed.

They are written anew after those code bases, so that their checkpoints, which cannot be fetched, can be made here. The
kind of a :class:`tests.distributed.parallel_models.Parallel` says which: ``bloom``; ``neox`` and ``neoxj`` (gpt-neox
without and with ``gpt_j_residual``); ``thirds`` (Megatron-DeepSpeed since December 2024).
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional

from tests.distributed.custom_optimizers import FusedAdam
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS
from tests.distributed.parallel_layers import (
    HEAD_SIZE,
    HIDDEN,
    Column,
    CopyToGroup,
    Gather,
    Row,
    Sum,
    Vocabulary,
    mean_loss,
)
from tests.distributed.parallel_layouts import Cut, Rule, piece_of, widths
from tests.distributed.parallel_models import Parallel, forget_groups, initial, micro_batch_size, place_of

FFN = 64
#: BLOOM's final norm then is layer 6.
BLOCKS = {"bloom": 2, "thirds": 2, "neox": 3, "neoxj": 3}

# --- layers -----------------------------------------------------------------------------------------------------------


class WordEmbeddings(Vocabulary):
    """BLOOM's has a norm, which the last stage's copy has too, and never trains."""

    def __init__(self, rows: int, group: Any, has_norm: bool) -> None:
        super().__init__(rows, group)
        if has_norm:
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = super().forward(tokens)
        return self.norm(values) if hasattr(self, "norm") else values


class EmbeddingPipe(nn.Module):
    """The first layer, and with :func:`tied_logits` the head that is tied to it."""

    def __init__(self, rows: int, group: Any, has_norm: bool = False) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings(rows, group, has_norm)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens)


def head(values: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    """Scores of all rows of a vocabulary that is cut."""
    return Gather.apply(functional.linear(CopyToGroup.apply(values, group), weight), group)


def tied_logits(embedding: EmbeddingPipe, values: torch.Tensor) -> torch.Tensor:
    return head(values, embedding.word_embeddings.weight, embedding.word_embeddings.group)


class Head(nn.Module):
    """A head of its own; ``name`` is what the code base calls it."""

    def __init__(self, name: str, rows: int, group: Any) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, Column(HIDDEN, rows, group, bias=False))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        linear = getattr(self, self.name)
        return head(values, linear.weight, linear.group)


class NormPipe(nn.Module):
    """gpt-neox's final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values)


class PartialRow(Row):
    """Not summed over the ranks yet: each adds its share of the bias to its part of the outputs."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, self.weight, self.bias)


class RotaryEmbedding(nn.Module):
    """Turns pairs of elements by their positions; the frequencies are a buffer."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(values.shape[-2])[:, None] * self.inv_freq.float()
        angles = torch.cat([angles, angles], -1)
        first, second = values.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (values * angles.cos() + turned * angles.sin()).to(values.dtype)


class Attention(nn.Module):
    """Causal attention over the heads of this rank."""

    def __init__(self, kind: str, group: Any, base: float) -> None:
        super().__init__()
        self.is_contiguous = kind == "thirds"
        self.query_key_value = Column(HIDDEN, 3 * HIDDEN, group)
        self.dense = (PartialRow if kind == "neoxj" else Row)(HIDDEN, HIDDEN, group)
        if kind.startswith("neox"):
            self.rotary_emb = RotaryEmbedding(base)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mixed = self.query_key_value(values)
        if self.is_contiguous:
            parts = [part.unflatten(-1, (-1, HEAD_SIZE)) for part in mixed.chunk(3, -1)]
        else:
            parts = list(mixed.unflatten(-1, (-1, 3, HEAD_SIZE)).unbind(-2))
        q, k, v = (part.transpose(1, 2) for part in parts)
        if hasattr(self, "rotary_emb"):
            q, k = self.rotary_emb(q), self.rotary_emb(k)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, kind: str, group: Any) -> None:
        super().__init__()
        self.dense_h_to_4h = Column(HIDDEN, FFN, group)
        self.dense_4h_to_h = (PartialRow if kind == "neoxj" else Row)(FFN, HIDDEN, group)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(values)))


class ParallelTransformerLayerPipe(nn.Module):
    """A block; with ``gpt_j_residual`` attention and MLP are summed over the ranks together, biases included."""

    def __init__(self, kind: str, group: Any, base: float) -> None:
        super().__init__()
        self.group = group if kind == "neoxj" else None
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        attention = Attention(kind, group, base)
        if kind.startswith("neox"):
            self.attention = attention
        else:
            self.self_attention = attention
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP(kind, group)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        attention = getattr(self, "attention", None) or self.self_attention
        attended = attention(self.input_layernorm(values))
        if self.group is not None:
            return values + Sum.apply(attended + self.mlp(self.post_attention_layernorm(values)), self.group)
        values = values + attended
        return values + self.mlp(self.post_attention_layernorm(values))


def as_it_is(values: torch.Tensor) -> torch.Tensor:
    """Stands for their casts and transpositions, which have a layer number and no parameters."""
    return values


# --- modules ----------------------------------------------------------------------------------------------------------


def layers_of(parallel: Parallel, group: Any, seed: int) -> list[Any]:
    """All layers, numbered as the code base numbers them."""
    kind, rows = parallel.kind, parallel.rows
    blocks = [LayerSpec(ParallelTransformerLayerPipe, kind, group, 100.0 * seed) for _ in range(BLOCKS[kind])]
    if kind == "bloom":
        tied = {"tied_weight_attr": "word_embeddings.weight"}
        embed = TiedLayerSpec("embed", EmbeddingPipe, rows, group, True, **tied)
        last = TiedLayerSpec("embed", EmbeddingPipe, rows, group, True, forward_fn=tied_logits, **tied)
        return [as_it_is, embed, as_it_is, *blocks, as_it_is, LayerSpec(nn.LayerNorm, HIDDEN), last, as_it_is]
    embed = LayerSpec(EmbeddingPipe, rows, group)
    if kind == "thirds":
        return [as_it_is, embed, *blocks, LayerSpec(nn.LayerNorm, HIDDEN), LayerSpec(Head, "lm_head", rows, group)]
    return [embed, as_it_is, *blocks, as_it_is, LayerSpec(NormPipe), LayerSpec(Head, "final_linear", rows, group)]


def module_of(parallel: Parallel, seed: int) -> PipelineModule:
    """The whole pipeline, with the parameters of :func:`initial`. Collective."""
    group = None
    for start in range(0, dist.get_world_size(), parallel.tp):
        members = range(start, start + parallel.tp)
        made = dist.new_group(list(members))
        group = made if dist.get_rank() in members else group
    topology = PipeModelDataParallelTopology(num_pp=parallel.pp, num_mp=parallel.tp, num_dp=parallel.dp)
    method = "type:transformer|embedding" if parallel.kind == "bloom" else "type:transformer"
    layers = layers_of(parallel, group, seed)
    module = PipelineModule(layers, topology=topology, loss_fn=mean_loss, partition_method=method)
    if parallel.kind.startswith("neox"):
        module.neox_args = neox_args(parallel)
    rank = place_of(parallel, dist.get_rank()).tp
    for name, param in module.named_parameters():
        mark_as_they_do(parallel, param)
        whole = initial(name, whole_shape(parallel, name, param.shape), seed)
        param.data.copy_(shard_of(parallel, name, whole, rank))
    return module


def neox_args(parallel: Parallel) -> argparse.Namespace:
    """What gpt-neox's module keeps of its arguments, as far as they matter here."""
    saved = {"tokenizer_type": "HFTokenizer", "padded_vocab_size": parallel.rows, "model_parallel_size": parallel.tp}
    decisive = {"activation": "gelu", "num_kv_heads": None, "output_layer_parallelism": "column"}
    return argparse.Namespace(**saved, **decisive, gpt_j_residual=parallel.kind == "neoxj")


def mark_as_they_do(parallel: Parallel, param: nn.Parameter) -> None:
    """Megatron's training loop gives every parameter the three attributes; gpt-neox calls one of them otherwise."""
    is_cut = vars(param).setdefault("tensor_model_parallel", False)
    if parallel.kind.startswith("neox"):
        del param.tensor_model_parallel
        if is_cut:
            param.model_parallel = True
    elif not is_cut:
        param.partition_dim, param.partition_stride = -1, 1


# --- cuts, written down by hand ---------------------------------------------------------------------------------------

CUTS = {
    r".*word_embeddings\.weight|\d+\.(lm_head|final_linear)\.weight": Rule(0),
    r".*query_key_value\.(weight|bias)": Rule(0),
    r".*dense_h_to_4h\.(weight|bias)": Rule(0),
    r".*(attention\.dense|dense_4h_to_h)\.weight": Rule(1),
}
CONTIGUOUS = {r".*query_key_value\.(weight|bias)": Rule(0, (1, 1, 1))}
#: Of how much of a summed bias each rank starts with its share.
SHARES = {1: (1.0,), 2: (0.75, 0.25), 4: (0.5, 0.25, 0.125, 0.125)}


def is_summed(parallel: Parallel, name: str) -> bool:
    """Whether each rank holds a share of a parameter, to be added."""
    return parallel.kind == "neoxj" and re.fullmatch(r".*(attention\.dense|dense_4h_to_h)\.bias", name) is not None


def rule_of(parallel: Parallel, name: str) -> Rule | None:
    """How a parameter is cut; none: every tensor parallel rank holds all of it, or a share."""
    rules = {**CUTS, **(CONTIGUOUS if parallel.kind == "thirds" else {})}
    return next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, name)), None)


def cut_of(parallel: Parallel, name: str, shape: list[int]) -> Cut | None:
    """How a whole parameter of a shape is cut."""
    rule = rule_of(parallel, name)
    if rule is None or parallel.tp == 1:
        return None
    sizes = [shape[rule.dim] * part // sum(rule.parts) for part in rule.parts]
    return Cut(rule.dim, tuple(widths(size, parallel.tp, 0) for size in sizes))


def whole_shape(parallel: Parallel, name: str, shape: torch.Size) -> list[int]:
    """The shape of a whole parameter whose shards have this one."""
    rule = rule_of(parallel, name)
    return [size * parallel.tp if rule and rule.dim == dim else size for dim, size in enumerate(shape)]


def shard_of(parallel: Parallel, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a fresh tensor parallel rank holds."""
    if is_summed(parallel, name):
        return whole * SHARES[parallel.tp][rank]
    return piece_of(whole, cut_of(parallel, name, list(whole.shape)), rank)


# --- engines ----------------------------------------------------------------------------------------------------------


def group_members(parallel: Parallel, module: nn.Module) -> list[list[str]]:
    """Names by param group, on this rank: BLOOM halves those with weight decay; summed biases have one of their own."""
    named = dict(module.named_parameters())
    decayed = [name for name in named if named[name].dim() > 1]
    others = [name for name in named if name not in decayed]
    if parallel.kind == "bloom":
        half = len(decayed) // 2
        return [decayed[:half], decayed[half:], others]
    summed = [name for name in others if is_summed(parallel, name)]
    return [decayed, [name for name in others if name not in summed], *([summed] if summed else [])]


def build(parallel: Parallel, seed: int = 7, config: dict[str, Any] | None = None) -> Any:
    """A live engine on the default process group; ``config`` has more entries for DeepSpeed. Collective."""
    forget_groups()
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    module = module_of(parallel, seed)
    members, named = group_members(parallel, module), dict(module.named_parameters())
    decayed = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
    plain = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-5}
    values = [decayed if named[names[0]].dim() > 1 else plain for names in members]
    groups = [{"params": [named[n] for n in names], **v} for names, v in zip(members, values, strict=True)]
    optimizer = FusedAdam(groups) if parallel.kind == "bloom" else torch.optim.AdamW(groups)
    rows = GLOBAL_BATCH // parallel.dp
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch_size(rows, parallel),
        "gradient_accumulation_steps": rows // micro_batch_size(rows, parallel),
        "zero_optimization": {"stage": parallel.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        **PRECISIONS[parallel.precision],
        **(config or {}),
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=settings)[0]
    engine.members = members
    return engine

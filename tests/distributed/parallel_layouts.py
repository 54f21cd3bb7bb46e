"""How the whole parameters of :mod:`tests.distributed.parallel_models` are cut, written down by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deepspeed
import torch
from packaging.version import Version

if TYPE_CHECKING:
    from tests.distributed.parallel_models import Parallel

#: Whether AutoTP follows Transformers' plan for the language model's head; it left it whole before.
SHARDS_HEAD = Version(deepspeed.__version__) >= Version("0.19.7")


@dataclass(frozen=True)
class Rule:
    """How a parameter is cut at any degree.

    Attributes:
        dim: the dimension.
        parts: relative sizes of the sub-parameters, each of which is cut by itself.
        heads: cut between so many heads of keys and values; zero: as evenly as can be.
    """

    dim: int
    parts: tuple[int, ...] = (1,)
    heads: int = 0


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut at one degree: of every sub-parameter, the width of each rank's piece."""

    dim: int
    widths: tuple[tuple[int, ...], ...]


MEGATRON = {
    r"embedding\.word_embeddings\.weight|output_layer\.weight": Rule(0),
    r".*linear_qkv\.(weight|bias)": Rule(0),
    r".*linear_(proj|fc2)\.weight": Rule(1),
    r".*linear_fc1\.(weight|bias)": Rule(0),
}
MEGATRON_LLAMA = {r".*linear_fc1\.weight": Rule(0, (1, 1))}
PIPELINE = {
    r"tied_modules\.embed\.weight": Rule(0),
    r".*\.up\.(weight|bias)": Rule(0),
    r".*\.gate_up\.weight": Rule(0, (1, 1)),
    r".*\.down\.weight": Rule(1),
}
SPLIT = {r"(embed|head)\.weight": Rule(0), **PIPELINE}


def autotp_rules(style: str) -> dict[str, Rule]:
    """DeepSpeed cuts attention between heads of keys and values, and the rest as evenly as can be."""
    kv = 3 if style.endswith("uneven") else 4
    if style.startswith("fused"):
        return {
            r".*qkv_proj\.(weight|bias)": Rule(0, (2, 1, 1), kv),
            r".*gate_up_proj\.weight": Rule(0, (1, 1)),
            r".*\.o_proj\.weight": Rule(1, heads=kv),
            r".*down_proj\.weight": Rule(1),
        }
    vocabulary = r"model\.embed_tokens\.weight" if style == "tied" else r"lm_head\.weight"
    return {
        r".*\.[qkv]_proj\.weight": Rule(0, heads=kv),
        r".*\.o_proj\.weight": Rule(1, heads=kv),
        r".*(gate|up)_proj\.weight": Rule(0),
        r".*down_proj\.weight": Rule(1),
        **({vocabulary: Rule(0)} if style == "tied" or SHARDS_HEAD else {}),
    }


def rule_of(parallel: Parallel, name: str) -> Rule | None:
    """The first rule that knows a name; none: every tensor parallel rank holds all of it."""
    tables = {
        "megatron": {**(MEGATRON_LLAMA if parallel.style == "llama" else {}), **MEGATRON},
        "autotp": autotp_rules(parallel.style),
        "split": SPLIT,
    }
    rules = tables.get(parallel.kind, PIPELINE)
    return next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, name)), None)


def whole_shape(parallel: Parallel, name: str, shapes: list[torch.Size]) -> list[int]:
    """The shape of a whole parameter, whose pieces have these shapes."""
    rule = rule_of(parallel, name)
    shape = list(shapes[0])
    if rule is not None:
        shape[rule.dim] = sum(piece[rule.dim] for piece in shapes)
    return shape


def cut_of(parallel: Parallel, name: str, shape: list[int]) -> Cut | None:
    """How a whole parameter of a shape is cut; ``None`` where every tensor parallel rank holds all of it."""
    rule = rule_of(parallel, name)
    if rule is None or parallel.tp == 1:
        return None
    sizes = [shape[rule.dim] * part // sum(rule.parts) for part in rule.parts]
    return Cut(rule.dim, tuple(widths(size, parallel.tp, rule.heads) for size in sizes))


def widths(size: int, tp: int, heads: int) -> tuple[int, ...]:
    """The width of every rank's piece."""
    count = heads or size
    return tuple((count // tp + (rank < count % tp)) * (size // count) for rank in range(tp))


def piece_of(whole: torch.Tensor, cut: Cut | None, rank: int) -> torch.Tensor:
    """A tensor parallel rank's shard of a whole parameter."""
    if cut is None:
        return whole
    parts = whole.split([sum(part) for part in cut.widths], cut.dim)
    return torch.cat([part.split(each, cut.dim)[rank] for part, each in zip(parts, cut.widths, strict=True)], cut.dim)


def whole_of(pieces: list[torch.Tensor], cut: Cut | None, name: str) -> torch.Tensor:
    """The whole parameter of all shards, which have to be equal where there is no cut."""
    if cut is None:
        assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs between tensor parallel ranks"
        return pieces[0]
    split = [piece.split(mine, cut.dim) for piece, mine in zip(pieces, zip(*cut.widths, strict=True), strict=True)]
    return torch.cat([piece for part in zip(*split, strict=True) for piece in part], cut.dim)

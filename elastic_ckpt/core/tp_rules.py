"""What a tensor-parallel rule can say. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from elastic_ckpt.core.strided import Shape, Stretch, TPLayout, fused, replicated

Kind = Literal["column", "row", "vocabulary", "replicated", "averaged", "summed", "custom", "whole_only"]
COLUMN: Kind = "column"
ROW: Kind = "row"
VOCABULARY: Kind = "vocabulary"
REPLICATED: Kind = "replicated"
AVERAGED: Kind = "averaged"
SUMMED: Kind = "summed"
CUSTOM: Kind = "custom"
AMBIGUOUS: Kind = "whole_only"
#: Kinds of which every rank holds the whole.
WHOLE_KINDS = frozenset({REPLICATED, AVERAGED, SUMMED})
_DIMS = {COLUMN: 0, VOCABULARY: 0, ROW: 1, CUSTOM: 0}
KV_HEADS = ("num_key_value_heads", "num_query_groups", "num_kv_heads")


class Rule(BaseModel):
    """How parameters whose names match a pattern are cut; the same in the user's config and in presets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(max_length=512, description="Python regex for the whole name of a parameter")
    kind: Kind
    dim: Annotated[int | None, Field(ge=0)] = None
    sub_parameters: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)] | Literal["qkv"] | None = None
    groups: Annotated[int | None, Field(gt=0)] = None
    slices: dict[int, list[list[tuple[int, int]]]] = {}
    vocabulary: Annotated[int | None, Field(gt=0)] = None
    when: dict[str, Any] = {}
    ambiguous: str = ""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Rule:
        if (self.kind == CUSTOM) != bool(self.slices):
            raise ValueError('"slices" belongs to the kind "custom", and it needs them')
        if self.sub_parameters is not None and self.kind not in (COLUMN, ROW):
            raise ValueError(f'"sub_parameters" means nothing for the kind "{self.kind}"')
        return self

    @property
    def cut_dim(self) -> int:
        """The dimension that is cut."""
        return _DIMS.get(self.kind, 0) if self.dim is None else self.dim

    def applies(self, name: str, run: Mapping[str, Any]) -> bool:
        """Whether it is about a parameter of a run with these arguments."""
        if not re.fullmatch(self.pattern, name):
            return False
        return all(key in run and run[key] in _values(wanted) for key, wanted in self.when.items())


def _values(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


class CannotSplit(Exception):
    """A rule and the shapes of the shards contradict each other; the text says how."""


@dataclass(frozen=True)
class Facts:
    """What is known of the run that saved a checkpoint.

    Attributes:
        args: its arguments (Megatron's ``args``), for rules that depend on them.
        vocabulary: rows of the vocabulary that are no padding.
    """

    args: Mapping[str, Any]
    vocabulary: int | None = None


def split_by(rule: Rule, shapes: Sequence[Shape], facts: Facts) -> TPLayout:
    """How ranks with shards of these shapes hold a parameter, by a rule.

    Raises:
        CannotSplit: they cannot hold it like that.
    """
    if rule.kind in WHOLE_KINDS:
        if len(set(shapes)) > 1:
            raise CannotSplit(f"{rule.kind}, but the shards have the shapes {_shown(shapes)}")
        return replicated(shapes[0], len(shapes))
    dim = rule.cut_dim
    if any(len(shape) <= dim for shape in shapes):
        raise CannotSplit(f"cut along dimension {dim}, but the shards have the shapes {_shown(shapes)}")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise CannotSplit(f"cut along dimension {dim}, but the shards differ in others: {_shown(shapes)}")
    if rule.kind == CUSTOM:
        return _custom(rule, shapes, dim)
    sizes = [shape[dim] for shape in shapes]
    whole = (*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :])
    _check_groups(rule, sizes)
    return fused(whole, dim, _widths(rule, sizes, facts))


def _custom(rule: Rule, shapes: Sequence[Shape], dim: int) -> TPLayout:
    held = rule.slices.get(len(shapes))
    if held is None or len(held) != len(shapes):
        raise CannotSplit(f'"slices" says nothing of {len(shapes)} tensor-parallel ranks')
    stretches: tuple[tuple[Stretch, ...], ...] = tuple(tuple((a, b) for a, b in rank) for rank in held)
    for rank, (mine, shape) in enumerate(zip(stretches, shapes, strict=True)):
        if sum(stop - start for start, stop in mine) != shape[dim] or any(not 0 <= a < b for a, b in mine):
            raise CannotSplit(f'"slices" {list(mine)} of rank {rank} are not {shape[dim]} elements')
    size = max(stop for mine in stretches for _, stop in mine)
    covered = sorted({place for mine in stretches for a, b in mine for place in range(a, b)})
    if covered != list(range(size)):
        raise CannotSplit(f'"slices" of {len(shapes)} ranks leave out elements of dimension {dim}')
    return TPLayout((*shapes[0][:dim], size, *shapes[0][dim + 1 :]), dim, stretches)


def _check_groups(rule: Rule, sizes: Sequence[int]) -> None:
    """Groups that lie one behind the other are only cut between each other."""
    if rule.groups is None:
        return
    total = sum(sizes)
    if not total or total % rule.groups or any(size % (total // rule.groups) for size in sizes):
        raise CannotSplit(f"{rule.groups} groups, but the shards have {list(sizes)} of {total} elements")


def _widths(rule: Rule, sizes: Sequence[int], facts: Facts) -> list[list[int]]:
    """Per sub-parameter, how much of it each rank holds."""
    relative = relative_widths(rule, facts) or [1]
    parts = sum(relative)
    if any(size % parts for size in sizes):
        raise CannotSplit(f"sub-parameters in proportions {relative}, but the shards have {list(sizes)} elements")
    return [[size // parts * share for size in sizes] for share in relative]


def relative_widths(rule: Rule, facts: Facts) -> list[int] | None:
    """How wide the sub-parameters are, relative to each other; ``None``: there are none.

    Raises:
        CannotSplit: it takes the number of heads, and the run does not say it.
    """
    return _qkv(facts.args) if isinstance(rule.sub_parameters, str) else rule.sub_parameters


def _qkv(args: Mapping[str, Any]) -> list[int]:
    heads = args.get("num_attention_heads")
    groups = next((args[key] for key in KV_HEADS if args.get(key)), heads)
    if args.get("group_query_attention") is False:  # Megatron Core writes one group then, and means as many as heads
        groups = heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise CannotSplit(
            'sub-parameters "qkv", but the checkpoint does not say how many attention heads there are; give their '
            'relative widths: "sub_parameters": [heads, key_value_heads, key_value_heads]'
        )
    return [heads // groups, 1, 1]


def _shown(shapes: Sequence[Shape]) -> str:
    return " and ".join(map(str, dict.fromkeys(shapes)))

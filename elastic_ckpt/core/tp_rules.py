"""Tensor-parallel rules, and the layout of shards that follow one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated

Kind = Literal["column", "row", "vocabulary", "replicated", "averaged", "summed", "whole_only"]
COLUMN: Kind = "column"
ROW: Kind = "row"
VOCABULARY: Kind = "vocabulary"
REPLICATED: Kind = "replicated"
AVERAGED: Kind = "averaged"
SUMMED: Kind = "summed"
AMBIGUOUS: Kind = "whole_only"
#: Kinds with which every rank holds the whole parameter.
REPLICATED_KINDS = frozenset({REPLICATED, AVERAGED, SUMMED})
KV_HEADS = ("num_key_value_heads", "num_query_groups", "num_kv_heads")


class Rule(BaseModel):
    """How parameters whose names match a pattern are sharded, in the user's config and in presets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(max_length=512, description="Python regex for the whole name of a parameter")
    kind: Kind
    dim: Annotated[int | None, Field(ge=0)] = None
    sub_parameters: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)] | Literal["qkv"] | None = None
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
        if self.sub_parameters is not None and self.kind not in (COLUMN, ROW):
            raise ValueError(f'"sub_parameters" means nothing for the kind "{self.kind}"')
        return self

    @property
    def cut_dim(self) -> int:
        """The sharded dimension."""
        return int(self.kind == ROW) if self.dim is None else self.dim

    def contradicts(self, other: Rule) -> bool:
        """Whether both are specific and differ."""
        if AMBIGUOUS in (self.kind, other.kind):
            return False
        whole = [rule.kind in REPLICATED_KINDS for rule in (self, other)]
        if any(whole):
            return not all(whole)
        parts = [rule.sub_parameters for rule in (self, other)]
        return self.cut_dim != other.cut_dim or (None not in parts and parts[0] != parts[1])

    def applies(self, name: str, run: Mapping[str, Any]) -> bool:
        """Whether the rule applies to a parameter of a run with these arguments."""
        if not re.fullmatch(self.pattern, name):
            return False
        allowed = {key: wanted if isinstance(wanted, list) else [wanted] for key, wanted in self.when.items()}
        return all(key in run and run[key] in values for key, values in allowed.items())


class CannotSplit(Exception):
    """A rule contradicts the shapes of the shards; the message says how."""


def split_by(rule: Rule, shapes: Sequence[Shape], run: Mapping[str, Any]) -> TPLayout:
    """The layout of shards of these shapes, by rank, according to a rule.

    Rules may depend on ``run``, the arguments of the run that saved the shards (Megatron's ``args``).

    Raises:
        CannotSplit: shapes or arguments contradict the rule.
    """
    if rule.kind in REPLICATED_KINDS:
        if len(set(shapes)) > 1:
            raise CannotSplit(f"{rule.kind}, but the shards have the shapes {_shown(shapes)}")
        return replicated(shapes[0], len(shapes))
    dim = rule.cut_dim
    if any(len(shape) <= dim for shape in shapes):
        raise CannotSplit(f"cut along dimension {dim}, but the shards have the shapes {_shown(shapes)}")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise CannotSplit(f"cut along dimension {dim}, but the shards differ in others: {_shown(shapes)}")
    sizes = [shape[dim] for shape in shapes]
    relative = relative_widths(rule, run) or [1]
    unit = sum(relative)
    if any(size % unit for size in sizes):
        raise CannotSplit(f"sub-parameters in proportions {relative}, but the shards have {sizes} elements")
    widths = [[size // unit * share for size in sizes] for share in relative]
    return fused((*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :]), dim, widths)


def relative_widths(rule: Rule, run: Mapping[str, Any]) -> list[int] | None:
    """Relative widths of the sub-parameters, or ``None`` if the rule has none.

    Raises :class:`CannotSplit` if they depend on the number of heads, which the run's arguments do not give.
    """
    if not isinstance(rule.sub_parameters, str):
        return rule.sub_parameters
    heads = run.get("num_attention_heads")
    groups = next((run[key] for key in KV_HEADS if run.get(key)), heads)
    if run.get("group_query_attention") is False:  # Megatron Core then records one group, and has as many as heads
        groups = heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise CannotSplit(
            'sub-parameters "qkv", but the checkpoint does not say how many attention heads there are; give their '
            'relative widths: "sub_parameters": [heads, key_value_heads, key_value_heads]'
        )
    return [heads // groups, 1, 1]


def _shown(shapes: Sequence[Shape]) -> str:
    return " and ".join(map(str, dict.fromkeys(shapes)))

"""How parameters are sharded over tensor-parallel ranks, as configs, presets and checkpoints say it. Pure.

A checkpoint says it in ``universal_checkpoint_info``. Keys: ``deepspeed/checkpoint/constants.py``; their meaning:
``merge_tp_slices`` (ds_to_universal.py) and ``ParamAffineMap`` (affine.py). Patterns are unanchored there
(``re.match``). A parameter that no pattern matches is undeclared: the converter assumes dimension 0, and a run with one
tensor-parallel rank declares no rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from elastic_ckpt.core.counts import in_proportion
from elastic_ckpt.core.flat_ranges import checked_shape
from elastic_ckpt.core.name_patterns import LONGEST, NamePatterns, matches_whole
from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.wrappers import pattern_without_hidden
from elastic_ckpt.errors import ConfigError

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
#: Characters of a name that :mod:`re` may try in several ways: a checkpoint has chosen each.
_LONGEST_BACKTRACKED = 256
KV_HEADS = ("num_key_value_heads", "num_query_groups", "num_kv_heads")
#: Origin of specs that the user gave.
USER = 'your "tp_rules"'
#: Origin of specs that equal or fitting shapes alone suggest, which is a guess.
BY_SHAPES = "the shapes"

#: Raised by reading an entry of ``universal_checkpoint_info`` that does not have DeepSpeed's form.
_MALFORMED = (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError)
#: Most patterns of a kind, and most sub-parameters of one parameter.
_MOST_ENTRIES = 10_000
#: Most sub-parameters of all patterns.
_MOST_SUB_PARAMETERS = 1 << 18
_AFFINE_VERSION = 1
#: In the converter's order; it applies vocabulary patterns on top of the others.
_LISTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vocabulary_parameter_patterns", {"kind": VOCABULARY}),
    ("tp_replicated_parameter_patterns", {"kind": REPLICATED}),
    ("parameter_to_average_patterns", {"kind": AVERAGED}),
    ("parameter_with_row_parallelism_patterns", {"kind": ROW}),
    ("parameter_with_2_sub_params_cat_dim_0", {"kind": COLUMN, "sub_parameters": [1, 1]}),
)


class CannotSplit(Exception):
    """What is said of a parameter contradicts the shapes of its shards, or cannot be understood; the message: how."""


class ShardSpec(BaseModel):
    """How parameters whose names match a pattern are sharded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(max_length=LONGEST, description="Python regex for the whole name of a parameter")
    kind: Kind
    dim: Annotated[int | None, Field(ge=0)] = None
    sub_parameters: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)] | Literal["qkv"] | None = None
    vocabulary: Annotated[int | None, Field(gt=0)] = None
    when: dict[str, Any] = {}
    ambiguous: str = ""
    origin: Annotated[str, Field(max_length=0)] = ""  # who says so, in words, which no config or preset may give

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> ShardSpec:
        if self.sub_parameters is not None and self.kind not in (COLUMN, ROW):
            raise ValueError(f'"sub_parameters" means nothing for the kind "{self.kind}"')
        return self

    def by(self, origin: str) -> ShardSpec:
        """The same, said by someone."""
        return self.model_copy(update={"origin": origin})

    @property
    def is_ambiguous(self) -> bool:
        """Whether it only declares the layout ambiguous."""
        return self.kind == AMBIGUOUS

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return self.kind in REPLICATED_KINDS

    @property
    def cut_dim(self) -> int:
        """The sharded dimension."""
        return int(self.kind == ROW) if self.dim is None else self.dim

    def contradicts(self, other: ShardSpec) -> bool:
        """Whether both are specific and differ."""
        if self.is_ambiguous or other.is_ambiguous:
            return False
        if self.is_replicated or other.is_replicated:
            return self.is_replicated != other.is_replicated
        parts = self.sub_parameters, other.sub_parameters
        return self.cut_dim != other.cut_dim or (None not in parts and parts[0] != parts[1])

    def applies(self, name: str, run: Mapping[str, Any]) -> bool:
        """Whether it applies to a parameter of a run with these arguments.

        Raises :class:`ConfigError` if it takes :mod:`re` to tell, and the name is too long for it.
        """
        matches = matches_whole(self.pattern, name)
        if matches is None and len(name) > _LONGEST_BACKTRACKED:
            problem = f"the pattern {self.pattern[:40]!r} of a tensor-parallel rule could take forever to match"
            found = f"the name {name[:40]!r}..., of {len(name)} characters"
            remedy = "write it without flags, assertions about what is before, and groups that are referred to"
            raise ConfigError(
                problem, None, f"names of at most {_LONGEST_BACKTRACKED} characters", found, remedy=remedy
            )
        if not (re.fullmatch(self.pattern, name) if matches is None else matches):
            return False
        allowed = {key: wanted if isinstance(wanted, list) else [wanted] for key, wanted in self.when.items()}
        return all(key in run and run[key] in values for key, values in allowed.items())

    def layout(self, shapes: Sequence[Shape], run: Mapping[str, Any]) -> TPLayout:
        """The layout of shards of these shapes, by rank; :class:`CannotSplit` if they or ``run`` contradict it."""
        shown = " and ".join(map(str, dict.fromkeys(shapes)))
        if self.is_replicated:
            if len(set(shapes)) > 1:
                raise CannotSplit(f"{self.kind}, but the shards have the shapes {shown}")
            return replicated(shapes[0], len(shapes))
        dim = self.cut_dim
        if any(len(shape) <= dim for shape in shapes):
            raise CannotSplit(f"cut along dimension {dim}, but the shards have the shapes {shown}")
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
            raise CannotSplit(f"cut along dimension {dim}, but the shards differ in others: {shown}")
        sizes = [shape[dim] for shape in shapes]
        relative = self.relative_widths(run) or [1]
        unit = sum(relative)
        if any(size % unit for size in sizes):
            raise CannotSplit(f"sub-parameters in proportions {relative}, but the shards have {sizes} elements")
        widths = [[size // unit * share for size in sizes] for share in relative]
        return fused((*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :]), dim, widths)

    def relative_widths(self, run: Mapping[str, Any]) -> list[int] | None:
        """Relative widths of the sub-parameters, or ``None`` if there are none.

        Raises :class:`CannotSplit` if they depend on the number of heads, which the run's arguments do not give.
        """
        if not isinstance(self.sub_parameters, str):
            return self.sub_parameters
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


#: What is recorded, by precedence: why no layout is, an affine map, or (dimension, each sub-parameter's size by rank).
_UNSUPPORTED, _AFFINE, _WIDTHS = range(3)


@dataclass(frozen=True)
class DeclaredSpecs:
    """What a checkpoint declares, over all pipeline stages; the first spec whose pattern matches a name applies."""

    specs: tuple[ShardSpec, ...] = ()
    recorded: Mapping[tuple[int, str], Any] = field(default_factory=dict)  # what is recorded, by kind of it and pattern
    vocabulary: int | None = None  # rows of the vocabulary without padding
    unreadable: str = ""  # why the declaration cannot be used at all; empty if it can
    one_stage: tuple[str, ...] = ()  # of tied parameters of which the first pipeline stage's copy is the parameter

    def __or__(self, other: DeclaredSpecs) -> DeclaredSpecs:
        known = {spec.pattern for spec in self.specs}
        return DeclaredSpecs(
            self.specs + tuple(spec for spec in other.specs if spec.pattern not in known),
            dict(sorted({**other.recorded, **self.recorded}.items(), key=lambda entry: entry[0][0])),
            self.vocabulary or other.vocabulary,
            self.unreadable or other.unreadable,
            tuple(dict.fromkeys(self.one_stage + other.one_stage)),
        )

    @cached_property
    def _patterns(self) -> NamePatterns:
        recorded = (pattern for _, pattern in self.recorded)
        return NamePatterns([*(spec.pattern for spec in self.specs), *recorded, *self.one_stage])

    @cached_property
    def _spec_of_pattern(self) -> dict[str, ShardSpec]:
        return {spec.pattern: spec for spec in reversed(self.specs)}

    @cached_property
    def _recorded_of_pattern(self) -> dict[str, list[tuple[int, tuple[int, str]]]]:
        """Positions and keys of what is recorded, by pattern."""
        found: dict[str, list[tuple[int, tuple[int, str]]]] = {}
        for position, key in enumerate(self.recorded):
            found.setdefault(key[1], []).append((position, key))
        return found

    def _matching(self, name: str) -> tuple[str, ...]:
        """The patterns that a name begins with; :class:`CannotSplit` if that takes too long."""
        try:
            return self._patterns.matching(name)
        except ValueError as error:
            raise CannotSplit(f"its universal_checkpoint_info cannot be understood: {error}") from error

    def _entries_for(self, name: str) -> list[tuple[int, str]]:
        """Keys of what is recorded for a name, in their order."""
        places = (self._recorded_of_pattern.get(pattern, ()) for pattern in self._matching(name))
        return [key for _, key in sorted(chain.from_iterable(places))]

    def spec(self, name: str) -> ShardSpec | None:
        """The first spec for a name. Raises :class:`CannotSplit` if the declaration is unreadable."""
        if self.unreadable:
            raise CannotSplit(f"its universal_checkpoint_info cannot be understood: {self.unreadable}")
        found = (self._spec_of_pattern.get(pattern) for pattern in self._matching(name))
        return next((spec for spec in found if spec is not None), None)

    def is_of_one_stage(self, name: str) -> bool:
        """Whether a tied parameter is that of the first pipeline stage."""
        return not set(self.one_stage).isdisjoint(self._matching(name)) if self.one_stage else False

    def check_patterns(self) -> None:
        """Raise :class:`CannotSplit` unless all patterns can be matched."""
        self._matching("")

    def is_recorded(self, name: str) -> bool:
        """Whether a layout of its shards is recorded."""
        return any(kind != _UNSUPPORTED for kind, _ in self._entries_for(name))

    @cached_property
    def _affine_layouts(self) -> dict[str, TPLayout | Exception]:
        return {}

    def _layout_of_affine(self, pattern: str) -> TPLayout:
        """The layout of a recorded affine map, which is made once, or found wanting, for all names."""
        if pattern not in self._affine_layouts:
            try:
                self._affine_layouts[pattern] = layout_of_affine(self.recorded[_AFFINE, pattern])
            except (CannotSplit, *_MALFORMED) as error:
                self._affine_layouts[pattern] = error
        found = self._affine_layouts[pattern]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def layout(self, name: str, shapes: Sequence[Shape] = ()) -> TPLayout | None:
        """The recorded layout, for shards of these shapes; raises :class:`CannotSplit` if it does not describe them.

        Without shapes: of an affine map, which alone shows them.
        """
        layout = None
        try:
            for kind, pattern in self._entries_for(name):
                entry = self.recorded[kind, pattern]
                if kind == _UNSUPPORTED:
                    raise CannotSplit(f"the run that saved it could not describe its layout: {entry}")
                # ZeRO-3 records unusable maps, of empty parameters
                if kind == _AFFINE and (math.prod(entry["logical_shape"]) or not any(map(math.prod, shapes))):
                    layout = self._layout_of_affine(pattern)
                    break
                if kind == _WIDTHS and shapes:
                    dim, parts = entry
                    layout = fused((*shapes[0][:dim], sum(map(sum, parts)), *shapes[0][dim + 1 :]), dim, parts)
                    break
        except _MALFORMED as error:
            raise CannotSplit(f"its recorded layout cannot be understood: {type(error).__name__}: {error}") from error
        if layout is not None and shapes and tuple(map(layout.shard_shape, range(layout.degree))) != tuple(shapes):
            raise CannotSplit(f"the checkpoint records a layout of {counted(layout.degree, 'rank')} for {layout.shape}")
        return layout


def declared_by(info: Any) -> DeclaredSpecs:
    """Parse one file's ``universal_checkpoint_info``; errors are deferred until a layout is asked for."""
    try:
        return _declared({} if info is None else info)
    except (*_MALFORMED, re.error, RecursionError, CannotSplit) as error:
        return DeclaredSpecs(unreadable=f"{type(error).__name__}: {error}"[:200])


def _declared(info: Mapping[str, Any]) -> DeclaredSpecs:
    specs = [ShardSpec(pattern=pattern, **kind) for key, kind in _LISTS for pattern in _patterns(info.get(key))]
    of_fused = _specs_of_fused(info)
    dims = {spec.pattern: spec.cut_dim for spec in of_fused}
    recorded = dict[tuple[int, str], Any]()
    affine = info.get("affine_map") or {}
    if affine.get("version", _AFFINE_VERSION) != _AFFINE_VERSION:
        raise ValueError(f"affine_map of version {affine['version']}, of which only {_AFFINE_VERSION} is known")
    maps = _by_pattern(affine.get("params"))
    unsupported = _by_pattern(info.get("autotp_unsupported_parameter_patterns"))
    recorded |= {(_UNSUPPORTED, pattern): why for pattern, why in unsupported.items()}
    for pattern, entry in maps.items():
        if not isinstance(entry["ranks"], Mapping):
            raise TypeError("an affine map without ranks")
        recorded[_AFFINE, pattern] = {**entry, "logical_shape": checked_shape(entry["logical_shape"], pattern)}
    for pattern, saved in _by_pattern(info.get("sub_param_shard_widths")).items():
        parts = tuple(tuple(map(int, ranks)) for ranks in saved)
        if len(set(map(len, parts))) != 1 or not parts[0]:
            raise ValueError("sub_param_shard_widths of unequal length")
        recorded[_WIDTHS, pattern] = dims[pattern], parts
    vocabulary = info.get("original_vocab_size")
    known = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None
    stages = tuple(_patterns(info.get("pipeline_replicated_parameter_patterns")))
    declared = DeclaredSpecs((*specs, *of_fused), recorded, known, one_stage=stages)
    declared.check_patterns()
    return declared


def _specs_of_fused(info: Mapping[str, Any]) -> list[ShardSpec]:
    """A single number in the shape is a count of equal sub-parameters."""
    specs = []
    sub_parameters = 0
    for saved in _entries(info.get("parameter_with_sub_params")):
        entry = saved if isinstance(saved, Mapping) else vars(saved)
        dim = int(entry["partition_dim"])
        size = entry["shape"][dim]
        are_widths = isinstance(size, (list, tuple))
        widths = [int(each) if are_widths else 1 for each in _entries(size if are_widths else range(int(size)))]
        patterns = _patterns(entry["patterns"])
        sub_parameters += max(len(patterns), 1) * len(widths)
        if sub_parameters > _MOST_SUB_PARAMETERS:
            raise ValueError(f"more than {_MOST_SUB_PARAMETERS} sub-parameters")
        if widths and min(widths) > 0:
            spec: dict[str, Any] = {"kind": COLUMN, "dim": dim, "sub_parameters": in_proportion(widths)}
        else:
            why = f"the checkpoint declares sub-parameters of the widths {size}, which say nothing"
            spec = {"kind": AMBIGUOUS, "dim": dim, "ambiguous": why}
        specs += [ShardSpec(pattern=pattern, **spec) for pattern in patterns]
    return specs


def _patterns(values: Any) -> list[str]:
    """The patterns of a list."""
    patterns = _entries(values)
    for value in patterns:
        if not isinstance(value, str) or len(value) > LONGEST:
            raise TypeError(f"{str(value)[:40]!r} is no pattern")
    NamePatterns(patterns)  # before each is compiled
    return [pattern_without_hidden(pattern) for pattern in patterns]


def _by_pattern(entry: Any) -> dict[str, Any]:
    """What an entry has for each pattern."""
    values = dict(entry or {})
    return dict(zip(_patterns(list(values)), values.values(), strict=True))


def _entries(values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or len(values or ()) > _MOST_ENTRIES:
        raise TypeError(f"{str(values)[:40]!r} is no list of at most {_MOST_ENTRIES} entries")
    return list(values or ())


def layout_of_affine(entry: Mapping[str, Any]) -> TPLayout:
    """A recorded affine map as a cut along one dimension. Raises :class:`CannotSplit` if it is not one."""
    shape = tuple(int(size) for size in entry["logical_shape"])
    by_rank = {int(rank): list(shard["pieces"]) for rank, shard in entry["ranks"].items()}
    every = list(chain.from_iterable(by_rank.values()))
    if any(float(piece.get("scale", 1.0)) != 1.0 for piece in every):
        raise CannotSplit("its shards are recorded as scaled, which is not supported")
    if all(len(pieces) == 1 and tuple(pieces[0]["shape"]) == shape for pieces in by_rank.values()):
        return replicated(shape, len(by_rank))
    differing = {dim for piece in every for dim, (a, b) in enumerate(zip(piece["shape"], shape, strict=True)) if a != b}
    if len(differing) != 1:
        raise CannotSplit(f"its shards are recorded as cut along dimensions {sorted(differing)}")
    dim = differing.pop()
    layout = TPLayout(shape, dim, tuple(_ranges(by_rank[rank], shape, dim) for rank in range(len(by_rank))))
    covered = 0
    for start, stop in sorted(chain.from_iterable(layout.ranges)):
        covered = max(covered, stop) if start <= covered else covered
    if covered != shape[dim]:
        raise CannotSplit(f"its shards are recorded with holes in dimension {dim}")
    return layout


def _ranges(pieces: Sequence[Mapping[str, Any]], shape: Shape, dim: int) -> tuple[tuple[int, int], ...]:
    """One rank's ranges of a dimension. Each recorded piece is a view (offset, strides) of the tensor and the shard."""
    width = sum(int(piece["shape"][dim]) for piece in pieces)
    strides, shard_strides = (
        tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(shape)))
        for sizes in (shape, (*shape[:dim], width, *shape[dim + 1 :]))
    )
    inner = max(strides[dim], 1)
    found = []
    position = 0
    for piece in sorted(pieces, key=lambda piece: int(piece["dest"][0])):
        (source_offset, source_strides) = piece["source"]
        (dest_offset, dest_strides) = piece["dest"]
        start, rest = divmod(int(source_offset), inner)
        size = int(piece["shape"][dim])
        if rest or tuple(source_strides) != strides or tuple(dest_strides) != shard_strides:
            raise CannotSplit("its shards are recorded in a form that is no cut along one dimension")
        if int(dest_offset) != position * inner:
            raise CannotSplit("its shards are recorded with holes")
        found.append((start, start + size))
        position += size
    return tuple(found)

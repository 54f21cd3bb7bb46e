"""``universal_checkpoint_info``: what a checkpoint declares about its tensor-parallel shards.

Keys: ``deepspeed/checkpoint/constants.py``; their meaning: ``merge_tp_slices`` (ds_to_universal.py) and
``ParamAffineMap`` (affine.py). Patterns are unanchored there (``re.match``). A parameter that no pattern matches is
undeclared: the converter assumes dimension 0, and a run with one tensor-parallel rank declares no rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.tp_rules import AMBIGUOUS, AVERAGED, COLUMN, REPLICATED, ROW, VOCABULARY, CannotSplit, Rule

T = TypeVar("T")
#: Raised by reading an entry that does not have DeepSpeed's form.
_MALFORMED = (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError)
#: A checkpoint must not be able to stall a job: neither by nested quantifiers, which backtrack exponentially ...
_SLOW = re.compile(r"(?:[*+|}]|(?<!\()\?).*\)[*+{]", re.DOTALL)
#: ... nor by many quantifiers and alternatives in a row, each of which multiplies what has to be tried.
_REPEATS = re.compile(r"(?<![\\(])[*+?{]")
_MOST_TRIES, _MOST_TRIES_OF_ALL, _TRIES_OF_A_REPEAT = 20, 400, 4
#: Most patterns of a kind, and most sub-parameters of one parameter.
_MOST_ENTRIES = 10_000
_AFFINE_VERSION = 1
#: Longest pattern accepted, in characters.
_LONGEST = 512
#: In the converter's order; it applies vocabulary patterns on top of the others.
_LISTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vocabulary_parameter_patterns", {"kind": VOCABULARY}),
    ("tp_replicated_parameter_patterns", {"kind": REPLICATED}),
    ("parameter_to_average_patterns", {"kind": AVERAGED}),
    ("parameter_with_row_parallelism_patterns", {"kind": ROW}),
    ("parameter_with_2_sub_params_cat_dim_0", {"kind": COLUMN, "sub_parameters": [1, 1]}),
)


@contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        raise CannotSplit(f"its recorded layout cannot be understood: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Declared:
    """What a checkpoint declares, over all pipeline stages; the first rule whose pattern matches a name applies.

    Attributes:
        affine, widths: by pattern, the recorded affine map; or (dimension, per sub-parameter each rank's size).
        unsupported: pattern -> why its layout cannot be described.
        vocabulary: rows of the vocabulary without padding.
        one_stage: patterns of tied parameters of which the first pipeline stage's copy is the parameter.
        unreadable: why the declaration cannot be used at all; empty if it can.
    """

    rules: tuple[Rule, ...] = ()
    affine: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    widths: Mapping[str, tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int | None = None
    unreadable: str = ""
    one_stage: tuple[str, ...] = ()

    def __or__(self, other: Declared) -> Declared:
        known = {rule.pattern for rule in self.rules}
        return Declared(
            self.rules + tuple(rule for rule in other.rules if rule.pattern not in known),
            {**other.affine, **self.affine},
            {**other.widths, **self.widths},
            {**other.unsupported, **self.unsupported},
            self.vocabulary or other.vocabulary,
            self.unreadable or other.unreadable,
            tuple(dict.fromkeys(self.one_stage + other.one_stage)),
        )

    def of_first_stage(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the names of which the first pipeline stage's copy is declared to be the parameter."""
        return frozenset(name for name in names if any(re.match(pattern, name) for pattern in self.one_stage))

    def rule(self, name: str) -> Rule | None:
        """The first rule for a name. Raises :class:`CannotSplit` if the declaration is unreadable."""
        if self.unreadable:
            raise CannotSplit(f"its universal_checkpoint_info cannot be understood: {self.unreadable}")
        return next((rule for rule in self.rules if re.match(rule.pattern, name)), None)

    def is_recorded(self, name: str) -> bool:
        """Whether a layout of its shards is recorded."""
        return any(re.match(pattern, name) for pattern in (*self.affine, *self.widths))

    @_understanding()
    def recorded(self, name: str) -> TPLayout | None:
        """The recorded map of a parameter. Raises :class:`CannotSplit` if it is not a cut along one dimension."""
        entry = _matching(self.affine, name)
        return None if entry is None else split_of_affine(entry)

    @_understanding()
    def split(self, name: str, shapes: Sequence[Shape]) -> TPLayout | None:
        """The recorded layout for shards of these shapes; raises :class:`CannotSplit` if it does not describe them."""
        why = _matching(self.unsupported, name)
        if why is not None:
            raise CannotSplit(f"the run that saved it could not describe its layout: {why}")
        entry, widths = _matching(self.affine, name), _matching(self.widths, name)
        split = None
        if entry is not None and (math.prod(entry["logical_shape"]) or not any(map(math.prod, shapes))):
            split = split_of_affine(entry)  # ZeRO-3 records unusable maps, of empty parameters
        elif widths is not None:
            dim, parts = widths
            whole = (*shapes[0][:dim], sum(map(sum, parts)), *shapes[0][dim + 1 :])
            split = fused(whole, dim, parts)
        if split is not None and tuple(map(split.shard_shape, range(split.degree))) != tuple(shapes):
            raise CannotSplit(f"the checkpoint records a layout of {split.degree} ranks for {split.shape}")
        return split


def _matching(entries: Mapping[str, T], name: str) -> T | None:
    return next((entry for pattern, entry in entries.items() if re.match(pattern, name)), None)


def declared_by(info: Any) -> Declared:
    """Parse one file's ``universal_checkpoint_info``; errors are deferred until a layout is asked for."""
    if info is None or info == {}:
        return Declared()
    try:
        return _declared(info)
    except (*_MALFORMED, re.error, CannotSplit) as error:
        return Declared(unreadable=f"{type(error).__name__}: {error}"[:200])


def _declared(info: Mapping[str, Any]) -> Declared:
    rules = [Rule(pattern=pattern, **kind) for key, kind in _LISTS for pattern in _patterns(info.get(key))]
    sub_params = _sub_param_rules(info)
    dims, widths = {rule.pattern: rule.cut_dim for rule in sub_params}, {}
    for pattern, saved in (info.get("sub_param_shard_widths") or {}).items():
        parts = tuple(tuple(map(int, ranks)) for ranks in saved)
        if len(set(map(len, parts))) != 1 or not parts[0]:
            raise ValueError("sub_param_shard_widths of unequal length")
        widths[pattern] = dims[pattern], parts
    affine = info.get("affine_map") or {}
    if affine.get("version", _AFFINE_VERSION) != _AFFINE_VERSION:
        raise ValueError(f"affine_map of version {affine['version']}, of which only {_AFFINE_VERSION} is known")
    maps, unsupported = dict(affine.get("params") or {}), dict(info.get("autotp_unsupported_parameter_patterns") or {})
    _patterns([*maps, *unsupported])
    for entry in maps.values():
        if not isinstance(entry["ranks"], Mapping) or not isinstance(entry["logical_shape"], (list, tuple)):
            raise TypeError("an affine map without ranks")
    vocabulary = info.get("original_vocab_size")
    known = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None
    stages = tuple(_patterns(info.get("pipeline_replicated_parameter_patterns")))
    return Declared((*rules, *sub_params), maps, widths, unsupported, known, one_stage=stages)


def _patterns(values: Any) -> list[str]:
    """The patterns, checked to compile and to match in reasonable time."""
    patterns, of_all = _entries(values), 0
    for value in patterns:
        if not isinstance(value, str) or len(value) > _LONGEST:
            raise TypeError(f"{str(value)[:40]!r} is no pattern")
        re.compile(value)
        tries = _TRIES_OF_A_REPEAT * len(_REPEATS.findall(value)) + value.count("|")
        of_all += tries
        if _SLOW.search(value) or tries > _MOST_TRIES or of_all > _MOST_TRIES_OF_ALL:
            raise ValueError(f"the pattern {value[:40]!r} repeats too much: to match it could take for ever")
    return patterns


def _entries(values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or len(values or ()) > _MOST_ENTRIES:
        raise TypeError(f"{str(values)[:40]!r} is no list of at most {_MOST_ENTRIES} entries")
    return list(values or ())


def _sub_param_rules(info: Mapping[str, Any]) -> list[Rule]:
    """Rules of fused parameters: relative widths; a single number in the shape is a count of equal sub-parameters."""
    rules = []
    for saved in _entries(info.get("parameter_with_sub_params")):
        entry = saved if isinstance(saved, Mapping) else vars(saved)
        dim = int(entry["partition_dim"])
        spec = entry["shape"][dim]
        are_widths = isinstance(spec, (list, tuple))
        sizes = _entries(spec if are_widths else range(int(spec)))
        widths = [int(size) if are_widths else 1 for size in sizes]
        if widths and min(widths) > 0:
            relative = [width // math.gcd(*widths) for width in widths]
            rule: dict[str, Any] = {"kind": COLUMN, "dim": dim, "sub_parameters": relative}
        else:
            why = f"the checkpoint declares sub-parameters of the widths {spec}, which say nothing"
            rule = {"kind": AMBIGUOUS, "dim": dim, "ambiguous": why}
        rules += [Rule(pattern=pattern, **rule) for pattern in _patterns(entry["patterns"])]
    return rules


def split_of_affine(entry: Mapping[str, Any]) -> TPLayout:
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
    ranges = tuple(_ranges(by_rank[rank], shape, dim) for rank in range(len(by_rank)))
    covered = 0
    for start, stop in sorted(chain.from_iterable(ranges)):
        covered = max(covered, stop) if start <= covered else covered
    if covered != shape[dim]:
        raise CannotSplit(f"its shards are recorded with holes in dimension {dim}")
    return TPLayout(shape, dim, ranges)


def _ranges(pieces: Sequence[Mapping[str, Any]], shape: Shape, dim: int) -> tuple[tuple[int, int], ...]:
    """One rank's ranges of a dimension. Each recorded piece is a view (offset, strides) of the tensor and the shard."""
    inner = max(math.prod(shape[dim + 1 :]), 1)
    width = sum(int(piece["shape"][dim]) for piece in pieces)
    strides, shard_strides = _strides(shape), _strides((*shape[:dim], width, *shape[dim + 1 :]))
    found, position = [], 0
    for piece in sorted(pieces, key=lambda piece: int(piece["dest"][0])):
        (source_offset, source_strides), (dest_offset, dest_strides) = piece["source"], piece["dest"]
        start, rest = divmod(int(source_offset), inner)
        size = int(piece["shape"][dim])
        if rest or tuple(source_strides) != strides or tuple(dest_strides) != shard_strides:
            raise CannotSplit("its shards are recorded in a form that is no cut along one dimension")
        if int(dest_offset) != position * inner:
            raise CannotSplit("its shards are recorded with holes")
        found.append((start, start + size))
        position += size
    return tuple(found)


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

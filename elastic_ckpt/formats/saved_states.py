"""Optimizer states, param groups and quantization maps as saved, whatever the ZeRO stage."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

from elastic_ckpt.core.metadata import WEIGHTS
from elastic_ckpt.core.state_kinds import COMPANIONS, REPLICATED, BlockFormat, Codebook, StateOptions, codebook
from elastic_ckpt.core.values import merged
from elastic_ckpt.formats.classify import Digest, SavedKind
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.values import hyperparameters, read_bytes, read_numbers, tensor_values, to_numbers

T = TypeVar("T")
#: Tensors up to this size are read: they might be the same on all ranks.
_SMALL_NUMEL = 4096
_MOST_REPLICATED_NUMEL = 1 << 24
_QMAPS = frozenset(qmap for _, qmap in COMPANIONS.values())
#: Entry under which bitsandbytes hides quantized tensors from FSDP in ``state_dict`` since 0.49.2.
NESTED = "__bnb_optimizer_quant_state__"
_STEP = "step"
_NOT_READ = ("params", "param_names")
#: Hyperparameters of pytorch_optimizer's, some of which have ``bias_correction`` too.
_OF_OTHERS = frozenset({"weight_decouple", "foreach", "growth_rate"})
#: Hyperparameters that no optimizer changes by what a rank holds, as some do the rate: the same in all files of a save.
_SETTINGS = frozenset(
    {"initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad"} | {"name"}
)
Groups = tuple[Mapping[str, Any], ...]
Scalars = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class StatesOfOne:
    """The optimizer states of one flat tensor or parameter in one file.

    Attributes:
        tensors: those with dimensions.
        points: tensors without dimensions, also in ``scalars``: states if the parameter has no dimensions either.
        scalars: (key, value) sorted by key: numbers, :class:`~elastic_ckpt.core.values.TensorValue` and ``None``.
        opaque: other objects: key -> description.
    """

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("digests",)

    tensors: Mapping[str, TensorRef]
    scalars: Scalars = ()
    opaque: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, Digest] = field(default_factory=dict)
    codebooks: Mapping[str, Codebook] = field(default_factory=dict)
    points: Mapping[str, TensorRef] = field(default_factory=dict)


def with_strangers(states: Mapping[T, StatesOfOne], base: Mapping[str, Any]) -> dict[T, StatesOfOne]:
    """The states of a base optimizer's ``state_dict``; the first are marked if it has any that are of no parameter."""
    strange = [str(key) for key in base["state"] if not isinstance(key, int)]
    strange += [str(key) for key in base if key not in ("state", "param_groups")]
    found = dict(states)
    for first in [*found][: bool(strange)]:
        opaque = {**found[first].opaque, **dict.fromkeys(strange, "a state of no parameter")}
        found[first] = replace(found[first], opaque=opaque)
    return found


def sort_states(file: PickledFile, saved: Mapping[str, Any], options: StateOptions) -> StatesOfOne:
    """Sort the optimizer states of one flat tensor or parameter, and read the small ones. Local."""
    flat = {**saved, **saved.get(NESTED, {})}
    flat.pop(NESTED, None)
    tensors: dict[str, TensorRef] = {}
    points: dict[str, TensorRef] = {}
    scalars: dict[str, Any] = {}
    opaque: dict[str, str] = {}
    for key, value in flat.items():
        if key in WEIGHTS:
            opaque[key] = "a state of a name that masters, buffers or frozen parameters go by here"
        elif isinstance(value, TensorRef):
            (tensors if value.shape else points)[key] = value
        elif value is None or isinstance(value, (int, float)):  # None: a buffer that the optimizer does not use
            scalars[key] = value
        else:
            opaque[key] = f"a {type(value).__name__}"
    codebooks = {key: ref for key, ref in tensors.items() if key in _QMAPS and ref.numel <= _SMALL_NUMEL}
    digested = {key: ref for key, ref in tensors.items() if key not in codebooks and _is_small(key, ref, options)}
    for key, point in zip(points, tensor_values(file, points.values()), strict=True):
        if point is None:
            opaque[key] = f"a number of {points[key].dtype}"
        else:
            scalars[key] = point
    maps = zip(codebooks, read_numbers(file, codebooks.values()), strict=True)
    return StatesOfOne(
        tensors,
        tuple(sorted(scalars.items(), key=itemgetter(0))),
        opaque,
        # in turn: together they might take more memory than a load may
        {key: _digest(ref.dtype, *read_bytes(file, [ref])) for key, ref in digested.items()},
        {key: codebook(values.astype(float).tolist()) for key, values in maps},
        points,
    )


def _is_small(key: str, ref: TensorRef, options: StateOptions) -> bool:
    is_replicated = options.layout(key) == REPLICATED and ref.numel <= _MOST_REPLICATED_NUMEL
    return is_replicated or (ref.numel <= _SMALL_NUMEL and "absmax" not in key)


def _digest(dtype: str, raw: bytes) -> Digest:
    flat = to_numbers(dtype, raw)
    ascending = len(flat) > 1 and flat.dtype.kind not in "cV" and bool((flat[1:] > flat[:-1]).all())
    return Digest(zlib.crc32(raw), ascending, len(flat) > 1 and bool((flat == flat[0]).all()))


def block_format(key: str, kind: SavedKind, codebooks: Mapping[str, Codebook]) -> BlockFormat | None:
    """How the saved state ``key`` is quantized, with the maps of :func:`resolve_codebooks`; ``None``: it is not."""
    if not kind.block_numel:
        return None
    scales, qmap = COMPANIONS[key]
    return BlockFormat(kind.block_numel, scales, codebooks[qmap])


def resolve_codebooks(files: Iterable[tuple[str, StatesOfOne]]) -> tuple[dict[str, Codebook], dict[str, str]]:
    """The map of each ``qmap`` key, given (path, states) of every flat tensor and rank; and what is wrong with others.

    A quantization map must be the same well-formed one in all files.
    """
    saved: dict[str, dict[Codebook | None, str]] = {}
    for path, states in files:
        for key, (_, qmap) in COMPANIONS.items():
            if key in states.tensors and states.tensors[key].dtype == "uint8":
                saved.setdefault(qmap, {}).setdefault(states.codebooks.get(qmap), path)
    resolved, damaged = {}, {}
    for qmap, found in saved.items():
        problems = {path: "none" if each is None else each.problem for each, path in found.items()}
        if len(found) > 1 or any(problems.values()):
            path = next((path for path, problem in problems.items() if problem), list(problems)[-1])
            damaged[qmap] = f"{qmap} in {path}: {problems[path] or 'another one than in other files'}"
        else:
            resolved[qmap] = next(each for each in found if each is not None)
    return resolved, damaged


def kind_notes(kinds: Mapping[str, SavedKind]) -> tuple[str, ...]:
    """Notes about states that were classified by a guess."""
    return tuple(
        f"optimizer state {key} was taken as replicated: {kind.why}"
        for key, kind in kinds.items()
        if kind.kind == REPLICATED and kind.why
    )


def unmatched_names(
    kinds: Mapping[str, SavedKind], options: StateOptions, values: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """A warning about names in the user's options that no saved state has, nor any of the ``values`` beside them."""
    companions = {name for key, kind in kinds.items() if kind.block_numel for name in COMPANIONS[key]}
    unmatched = sorted(options.schema.keys() - {*kinds, *companions, *values}) if kinds else []
    if not unmatched:
        return ()
    return (f'the checkpoint holds no optimizer state named {", ".join(unmatched)}, which "states" names',)


def read_groups(file: PickledFile, param_groups: Iterable[Mapping[str, Any]]) -> Groups:
    """Hyperparameters of every param group."""
    groups = ({key: value for key, value in group.items() if key not in _NOT_READ} for group in param_groups)
    return tuple(hyperparameters(file, group) for group in groups)


def merged_groups(ranks: Iterable[tuple[range, Sequence[Mapping[str, Any]]]]) -> Groups:
    """The param groups of several ranks, each with the files that it saved."""
    files, groups = zip(*ranks, strict=True)
    return tuple(merged(zip(files, of_ranks, strict=True)) for of_ranks in zip(*groups, strict=True))


def settings(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What files of one save cannot differ in of their param groups."""
    return [{key: value for key, value in group.items() if key in _SETTINGS} for group in groups]


def with_group_step(scalars: Scalars, has_states: bool, group: Mapping[str, Any]) -> Scalars:
    """A parameter's scalar states, with the step that NVIDIA apex's FusedAdam counts per group (``fused_adam.py``)."""
    counts = _is_fused(group) and has_states and _STEP not in dict(scalars) and isinstance(group.get(_STEP), int)
    return tuple(sorted((*scalars, (_STEP, group[_STEP])), key=itemgetter(0))) if counts else scalars


def normal_groups(groups: Sequence[Mapping[str, Any]], is_bitsandbytes: bool) -> Groups:
    """Groups without the step count where it is a state, and bitsandbytes' kind of weight decay under torch's name."""
    decoupled = {"decoupled_weight_decay": True} if is_bitsandbytes else {}
    return tuple(
        {**{k: v for k, v in group.items() if k != _STEP or not _is_fused(group)}, **decoupled} for group in groups
    )


def _is_fused(group: Mapping[str, Any]) -> bool:
    """DeepSpeed's and apex's fused optimizers; others may count steps in the group for purposes of their own."""
    return "bias_correction" in group and not _OF_OTHERS & group.keys()

"""Optimizer states, param groups and quantization maps as saved, whatever the ZeRO stage, and the kind of each state.

A kind is as the user declares it, else by known optimizers, else by the tensor's shape. It is decided over all ranks at
once, since one rank's file cannot distinguish a quantization map from a small moment. What stays uncertain is *opaque*:
refused by name, with the config line that settles it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

from elastic_ckpt.core.metadata import WEIGHTS
from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    ELEMENTWISE,
    REPLICATED,
    TOUCHED,
    Codebook,
    StateOptions,
    block_numel_of,
    codebook,
)
from elastic_ckpt.core.values import merged
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.pickled import PickledFile, opened_once
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import hyperparameters, read_bytes, read_numbers, tensor_values, to_numbers

T = TypeVar("T")
_SMALL_NUMEL = 4096  # tensors up to this size are read: they might be the same on all ranks
_MOST_REPLICATED_NUMEL = 1 << 24
_QMAPS = frozenset(qmap for _, qmap in COMPANIONS.values())
#: Entry under which bitsandbytes hides quantized tensors from FSDP in ``state_dict`` since 0.49.2.
NESTED = "__bnb_optimizer_quant_state__"
_NOT_READ = ("params", "param_names")
#: Hyperparameters of pytorch_optimizer's, some of which have ``bias_correction`` too.
_OF_OTHERS = frozenset({"weight_decouple", "foreach", "growth_rate"})
#: Hyperparameters that no optimizer changes by what a rank holds, as some do the rate: the same in all files of a save.
_SETTINGS = {"initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "name"}
Groups = tuple[Mapping[str, Any], ...]
Scalars = tuple[tuple[str, Any], ...]
OPAQUE = "opaque"
DAMAGED = "damaged"  # a tensor of the state is missing or too short
FRESH = "fresh"  # not restored, as the user asks
#: Names under which known optimizers keep elementwise states.
ELEMENTWISE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "variance", "prev", "step_size", "state1", "state2"}
)
_CODES_DTYPES = frozenset({"uint8", "int8"})
MOST_VALUES = 8  # values per element, at most: AdEMAMix has two in one state


class Digest(NamedTuple):
    """A small tensor's values: ``ascending`` strictly, or ``constant``, which is no evidence that ranks must agree."""

    crc32: int
    ascending: bool
    constant: bool = False


@dataclass(frozen=True)
class SavedKind:
    """The kind of one saved state."""

    kind: str  # one of :mod:`elastic_ckpt.core.state_kinds`, :data:`OPAQUE`, :data:`DAMAGED`, or :data:`FRESH`
    planes: int = 1  # values per element: the leading dimension of an elementwise state
    block_numel: int = 0  # elements per quantization block; 0: not quantized
    why: str = ""  # what an opaque or damaged state looks like, or by which guess a state is replicated


@dataclass(frozen=True)
class StatesOfOne:
    """The optimizer states of one flat tensor or parameter in one file."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("digests",)

    tensors: Mapping[str, TensorRef]  # those with dimensions
    scalars: Scalars = ()  # sorted: numbers, :class:`~elastic_ckpt.core.values.TensorValue` and ``None``
    opaque: Mapping[str, str] = field(default_factory=dict)  # descriptions of other objects
    digests: Mapping[str, Digest] = field(default_factory=dict)  # of small tensors
    codebooks: Mapping[str, Codebook] = field(default_factory=dict)
    #: Tensors without dimensions, also in ``scalars``: states if the parameter has no dimensions either.
    points: Mapping[str, TensorRef] = field(default_factory=dict)
    block_numels: Mapping[str, int] = field(default_factory=dict)  # of codes, where the file records them


class RankStates(NamedTuple):
    """What one rank saved for one flat partition, or for a parameter that is not in one."""

    path: str
    shape: tuple[int, ...]  # of the partition with its padding, or of the parameter
    touched_numel: int  # all elements of the parameters that have any in the partition
    states: StatesOfOne

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        return self.states.tensors

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def with_strangers(states: Mapping[T, StatesOfOne], base: Mapping[str, Any]) -> dict[T, StatesOfOne]:
    """The states of a base optimizer's ``state_dict``; the first are marked if it has any that are of no parameter."""
    strange = [str(key) for key in base["state"] if not isinstance(key, int)]
    strange += [str(key) for key in base if key not in ("state", "param_groups")]
    found = dict(states)
    for first in [*found][: bool(strange)]:
        opaque = {**found[first].opaque, **dict.fromkeys(strange, "a state of no parameter")}
        found[first] = replace(found[first], opaque=opaque)
    return found


@opened_once
def sort_states(file: PickledFile, saved: Mapping[str, Any], options: StateOptions) -> StatesOfOne:
    """Sort the optimizer states of one flat tensor or parameter, and read the small ones. Local."""
    entries = {**saved, **saved.get(NESTED, {})}
    entries.pop(NESTED, None)
    file.budget.charge_objects(len(entries))  # many parameters may share one long dictionary
    tensors: dict[str, TensorRef] = {}
    points: dict[str, TensorRef] = {}
    scalars: dict[str, Any] = {}
    opaque: dict[str, str] = {}
    for key, value in entries.items():
        if key in WEIGHTS:
            opaque[key] = "a state of a name that masters, buffers or frozen parameters go by here"
        elif isinstance(value, TensorRef):
            (tensors if value.shape else points)[key] = value
        elif value is None or isinstance(value, (int, float)):  # None: a buffer that the optimizer does not use
            scalars[key] = value
        else:
            opaque[key] = f"a {type(value).__name__}"
    codebooks = {key: ref for key, ref in tensors.items() if key in _QMAPS and ref.numel <= _SMALL_NUMEL}
    digests = {}
    for key, ref in ((key, ref) for key, ref in tensors.items() if key not in codebooks):
        most = _MOST_REPLICATED_NUMEL if options.layout(key) == REPLICATED else -1 if "absmax" in key else _SMALL_NUMEL
        if ref.numel <= most:
            (raw,) = read_bytes(file, [ref])  # in turn: together they might take more memory than a load may
            flat = to_numbers(ref.dtype, raw)
            ascending = len(flat) > 1 and flat.dtype.kind not in "cV" and bool((flat[1:] > flat[:-1]).all())
            constant = len(flat) > 1 and bool((flat == flat[0]).all())
            digests[key] = Digest(zlib.crc32(raw), ascending, constant)
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
        digests,
        {key: codebook(tuple(values.astype(float).tolist())) for key, values in maps},
        points,
    )


def resolve_codebooks(files: Iterable[tuple[str, StatesOfOne]]) -> tuple[dict[str, Codebook], dict[str, str]]:
    """The map of each ``qmap`` key, well-formed and the same in all (path, states); and what is wrong with others."""
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


def notes_and_warnings(
    kinds: Mapping[str, SavedKind], options: StateOptions, values: frozenset[str] = frozenset()
) -> tuple[list[str], list[str]]:
    """About guessed kinds, and names in the user's options that neither ``kinds`` nor ``values`` beside them have."""
    guesses = {key: kind.why for key, kind in kinds.items() if kind.kind == REPLICATED and kind.why}
    companions = {name for key, kind in kinds.items() if kind.block_numel for name in COMPANIONS[key]}
    unmatched = ", ".join(sorted(options.schema.keys() - {*kinds, *companions, *values})) if kinds else ""
    warning = f'the checkpoint holds no optimizer state named {unmatched}, which "states" names'
    notes = [f"optimizer state {key} was taken as replicated: {why}" for key, why in guesses.items()]
    return notes, [warning] if unmatched else []


@opened_once
def read_groups(file: PickledFile, param_groups: Iterable[Mapping[str, Any]]) -> Groups:
    """Hyperparameters of every param group; :class:`DamagedError` if one has no name."""
    param_groups = list(param_groups)
    if unnamed := [key for group in param_groups for key in group if type(key) is not str]:
        problem, expected = "a param group has an entry that is no hyperparameter of any optimizer", "names as keys"
        raise DamagedError(problem, file.path, expected, f"a key of type {type(unnamed[0]).__name__}")
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
    counts = _is_fused(group) and has_states and "step" not in dict(scalars) and isinstance(group.get("step"), int)
    return tuple(sorted((*scalars, ("step", group["step"])), key=itemgetter(0))) if counts else scalars


def normal_groups(groups: Sequence[Mapping[str, Any]], is_bitsandbytes: bool) -> Groups:
    """Groups without the step count where it is a state, and bitsandbytes' kind of weight decay under torch's name."""
    decoupled = {"decoupled_weight_decay": True} if is_bitsandbytes else {}
    return tuple(
        {**{k: v for k, v in group.items() if k != "step" or not _is_fused(group)}, **decoupled} for group in groups
    )


def _is_fused(group: Mapping[str, Any]) -> bool:
    """DeepSpeed's and apex's fused optimizers; others may count steps in the group for purposes of their own."""
    return "bias_correction" in group and not _OF_OTHERS & group.keys()


def classify(
    ranks: Sequence[RankStates], options: StateOptions, shared: frozenset[str] = frozenset()
) -> dict[str, SavedKind]:
    """The kinds of all states of one flat partition that are tensors on any of the ``ranks``.

    ``shared``: states that the checkpoint itself records as replicated. Scales and quantization maps belong to their
    quantized states and have no kind. Raises :class:`MismatchError` if the user's declaration contradicts the tensors.
    """
    tensors = {key: ref for key, ref in ranks[0].tensors.items() if all(key in rank.tensors for rank in ranks)}
    others = {key for rank in ranks for key in rank.tensors} - tensors.keys()
    codes = {key for key in COMPANIONS if key in tensors and tensors[key].dtype == "uint8"}
    companions = {companion for key in codes for companion in COMPANIONS[key]}
    kinds = {key: _kind_of_codes(ranks, key, options) for key in tensors if key in codes}
    for key in sorted(companions & tensors.keys()):  # they belong to their codes, but a map may be declared as such
        word = options.layout(key)
        is_map = key.startswith("qmap")
        if word is not None and not (is_map and word == REPLICATED):
            raise _contradiction(ranks, key, word, "a quantization map" if is_map else "scales of 8-bit blocks")
    kinds |= {key: SavedKind(OPAQUE, why="a tensor on some ranks, and none on others") for key in others - companions}
    for key in (key for key in tensors if key not in codes | companions):
        if key not in shared or options.schema.get(key) == FRESH:
            kinds[key] = _kind(ranks, key, options)
        elif options.schema.get(key) == ELEMENTWISE:
            raise _contradiction(ranks, key, ELEMENTWISE, "recorded as one tensor for all")
        else:
            is_declared = options.layout(key) == REPLICATED
            kinds[key] = SavedKind(REPLICATED, why="" if is_declared else "the checkpoint records it as such")
    return kinds


def _kind_of_codes(ranks: Sequence[RankStates], key: str, options: StateOptions) -> SavedKind:
    """bitsandbytes: codes as long as the partition, elementwise whatever is declared, and one scale per block."""
    if options.schema.get(key) == FRESH:
        return SavedKind(FRESH)
    if options.layout(key) == REPLICATED:
        raise _contradiction(ranks, key, REPLICATED, f"8-bit codes of {ranks[0].numel} elements")
    scales_key, planes = COMPANIONS[key][0], _planes(ranks, key)
    if planes is not None:
        block_numels = {_block_numel(states, key, planes) for states in ranks}
        if len(block_numels) == 1 and (block_numel := block_numels.pop()) is not None:
            return SavedKind(ELEMENTWISE, planes, block_numel)
    shapes = [
        {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in states.tensors.items() if name in (key, scales_key)}
        for states in ranks
    ]
    what = f"8-bit codes and scales of shapes {shapes[0]} for a partition of {ranks[0].numel} elements"
    if f"max{key[-1]}" in ranks[0].tensors:
        return SavedKind(OPAQUE, why=f"{what}: quantized tensor-wise (block_wise=False)")
    different = next((f", {shape} on another rank" for shape in shapes if shape != shapes[0]), "")
    return SavedKind(DAMAGED, why=f"{what}{different}")


def _block_numel(rank: RankStates, key: str, planes: int) -> int | None:
    """Elements of the blocks of quantized codes, as recorded or by the number of scales; ``None`` if that fits none."""
    scales = rank.tensors.get(COMPANIONS[key][0])
    count = scales.numel if scales is not None and scales.dtype == "float32" else 0
    if key in rank.states.block_numels:
        return rank.states.block_numels[key]
    return None if count % planes else block_numel_of(rank.numel, count // planes)


def _kind(ranks: Sequence[RankStates], key: str, options: StateOptions) -> SavedKind:
    """The kind of a state that is not quantized: as declared, else by its shape."""
    word, planes = options.schema.get(key), _planes(ranks, key)
    if word == FRESH:
        return SavedKind(FRESH)
    if word == ELEMENTWISE:
        if planes is None:
            raise _contradiction(ranks, key, word, f"of shape {ranks[0].tensors[key].shape}")
        if _is_one_table(ranks, key):
            raise _contradiction(ranks, key, word, "the same ascending values on every rank, as a quantization map")
        return SavedKind(ELEMENTWISE, planes)
    if options.layout(key) != REPLICATED:
        return _by_shape(ranks, key, planes, options)
    is_partitioned = planes is not None and not _is_one_table(ranks, key)
    is_named = word is not None or key in ELEMENTWISE_NAMES
    same_shape = len({states.tensors[key].shape for states in ranks}) == 1
    if not same_shape or (is_partitioned and is_named):
        raise _contradiction(ranks, key, REPLICATED, f"exactly as long as its partition ({ranks[0].numel} elements)")
    return SavedKind(REPLICATED)


def _by_shape(ranks: Sequence[RankStates], key: str, planes: int | None, options: StateOptions) -> SavedKind:
    tensor = ranks[0].tensors[key]
    looks = f"{tensor.dtype} of shape {tensor.shape} for a partition of {ranks[0].numel}"
    if planes is not None:
        if len(ranks) > 1 and _is_one_table(ranks, key) and key not in ELEMENTWISE_NAMES:
            why = "as long as its partition, yet with the same ascending values on every rank"
            return SavedKind(OPAQUE, why=f"{looks}, {why}")
        return SavedKind(ELEMENTWISE, planes)
    if key == "momentum_buffer" and all(states.tensors[key].shape == (states.touched_numel,) for states in ranks):
        return SavedKind(TOUCHED)
    digest = _same_digest(ranks, key)
    if key in ELEMENTWISE_NAMES or len({states.tensors[key].shape for states in ranks}) > 1:
        pass
    elif tensor.numel <= options.max_numel:
        why = f'"numel<={options.max_numel}" under "states"' if tensor.numel else "it has no elements"
        return SavedKind(REPLICATED, why=why)
    elif any(each.dtype in _CODES_DTYPES for each in ranks[0].tensors.values()):
        looks += ", beside 8-bit codes: it may be their scales"
    elif len(ranks) > 1 and digest is not None and not digest.constant:
        return SavedKind(REPLICATED, why="the same values on all ranks")
    return SavedKind(OPAQUE, why=looks)


def _planes(ranks: Sequence[RankStates], key: str) -> int | None:
    """A state's values per element; ``None``: ranks differ, or it is not elementwise, like preconditioners."""
    found = set()
    for states in ranks:
        shape, own = states.tensors[key].shape, states.shape
        leading = shape[: len(shape) - len(own)]
        if leading + own != shape or len(leading) > 1 or (leading and not 1 < leading[0] <= MOST_VALUES):
            return None
        found.add(leading[0] if leading else 1)
    return found.pop() if len(found) == 1 else None


def _same_digest(ranks: Sequence[RankStates], key: str) -> Digest | None:
    """The digest of a tensor that has the same values on all ranks."""
    digests = {rank.states.digests.get(key) for rank in ranks}
    return digests.pop() if len(digests) == 1 else None


def _is_one_table(ranks: Sequence[RankStates], key: str) -> bool:
    """Whether all ranks have the same ascending values, as of a quantization map."""
    digest = _same_digest(ranks, key)
    return digest is not None and digest.ascending


def _contradiction(ranks: Sequence[RankStates], key: str, word: str, what: str) -> MismatchError:
    tensor = ranks[0].tensors[key]
    problem = f'optimizer state {key!r} is not a state of the kind "{word}" that "elastic_checkpoint" names'
    expected = f"an {word} state" if word == ELEMENTWISE else f"a {word} state"
    found = f"{tensor.dtype} of shape {tensor.shape}: {what}"
    remedy = f'take "{key}" out of "states", or give it the layout that it has'
    return MismatchError(problem, ranks[0].path, expected, found, parameter=key, remedy=remedy)


def saved_shape(states: StatesOfOne) -> tuple[int, ...] | None:
    """The shape of the parameter with these states, if they show it, else ``None``."""
    for key in ("state2", *sorted(ELEMENTWISE_NAMES)):  # of state1, some optimizers keep two planes
        if key in states.tensors:
            return states.tensors[key].shape
    if {"row_var", "col_var"} <= set(states.tensors):  # torch's Adafactor
        return (*states.tensors["row_var"].shape[:-1], states.tensors["col_var"].shape[-1])
    if {"exp_avg_sq_row", "exp_avg_sq_col"} <= set(states.tensors):  # that of Transformers
        return (*states.tensors["exp_avg_sq_row"].shape, states.tensors["exp_avg_sq_col"].shape[-1])
    points = [key for key in states.points if key in ELEMENTWISE_NAMES]
    others = {ref.shape for ref in states.tensors.values()}
    return () if points else others.pop() if len(others) == 1 else None

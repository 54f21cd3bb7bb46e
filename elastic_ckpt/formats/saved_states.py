"""Optimizer states, param groups and quantization maps as saved, whatever the ZeRO stage.

Which kind each state is of, all ranks together tell (:mod:`elastic_ckpt.formats.classification`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

from elastic_ckpt.core.metadata import WEIGHTS
from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    REPLICATED,
    Codebook,
    StateOptions,
    codebook,
)
from elastic_ckpt.core.values import merged
from elastic_ckpt.formats.known_states import check_tensor, check_value
from elastic_ckpt.formats.own_entries import check_groups, check_states
from elastic_ckpt.formats.pickled import PickledFile, opened_once
from elastic_ckpt.formats.torch_archive.charges import limit_error
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import hyperparameters, read_bytes, read_numbers, tensor_values, to_numbers

T = TypeVar("T")
_SMALL_NUMEL = 4096  # tensors up to this size are read: they might be the same on all ranks
_MOST_REPLICATED_NUMEL = 1 << 24
#: States of one parameter, or of a flat tensor, whose members have them all: known optimizers keep ten at most.
_MOST_STATES = 1 << 10
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
#: Names under which known optimizers keep elementwise states.
ELEMENTWISE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "variance", "prev", "step_size", "state1", "state2"}
)


class Digest(NamedTuple):
    """A small tensor's values: ``ascending`` strictly, or ``constant``, which is no evidence that ranks must agree."""

    crc32: int
    ascending: bool
    constant: bool = False


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
    check_states(file, "states of a parameter", saved)
    nested = saved.get(NESTED, {})
    check_states(file, NESTED, nested)
    entries = {**saved, **nested}
    entries.pop(NESTED, None)
    if len(entries) > _MOST_STATES:  # all members of a flat tensor have them
        raise limit_error(f"at most {_MOST_STATES} states of a parameter", str(len(entries)), file.path)
    file.budget.charge_objects(len(entries))  # many parameters may share one long dictionary
    tensors: dict[str, TensorRef] = {}
    points: dict[str, TensorRef] = {}
    scalars: dict[str, Any] = {}
    opaque: dict[str, str] = {}
    for key, value in entries.items():
        if key in WEIGHTS:
            opaque[key] = "a state of a name that masters, buffers or frozen parameters go by here"
        elif isinstance(value, TensorRef):
            check_tensor(file.path, key, value.dtype, value.shape, options)
            (tensors if value.shape else points)[key] = value
        else:
            check_value(file.path, key, value, options)
            is_scalar = value is None or isinstance(value, (int, float))  # None: a buffer that is not used
            if is_scalar:
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
            check_value(file.path, key, point, options)
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
    resolved = {}
    damaged = {}
    for qmap, found in saved.items():
        problems = {path: "none" if each is None else each.problem for each, path in found.items()}
        if len(found) > 1 or any(problems.values()):
            path = next((path for path, problem in problems.items() if problem), list(problems)[-1])
            damaged[qmap] = f"{qmap} in {path}: {problems[path] or 'another one than in other files'}"
        else:
            resolved[qmap] = next(each for each in found if each is not None)
    return resolved, damaged


@opened_once
def read_groups(file: PickledFile, param_groups: Any) -> Groups:
    """Hyperparameters of every param group; :class:`DamagedError` if there is none, or these are no param groups."""
    checked = check_groups(file, param_groups, with_members=False)
    groups = ({key: value for key, value in group.items() if key not in _NOT_READ} for group in checked)
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

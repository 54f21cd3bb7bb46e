"""Whether files have what DeepSpeed's own loader reads of them: it asks for entries by key, and takes what is there.

An entry that is missing, or of another type, would end in the middle of a load with a ``KeyError`` or ``TypeError``, or
become part of the engine. :mod:`elastic_ckpt.formats.own_entries` has refused types that DeepSpeed never writes; here
are those that a load by elastic_ckpt does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Number
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from packaging.version import InvalidVersion, Version

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.coordinates import layers_with_files
from elastic_ckpt.errors import errors_of_file
from elastic_ckpt.formats import saved_config
from elastic_ckpt.formats.model_states import FUSED, MASTER_ENTRIES
from elastic_ckpt.formats.naming import FolderFiles
from elastic_ckpt.formats.own_entries import is_count, module_entries
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.calls import Call
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

#: What it reads by key of a model-states file, unless weights alone are asked for.
_COUNTERS = ("global_steps", "skipped_steps", "mp_world_size")
#: Of a loss scaler's entries beside the states, without ZeRO, and of a dynamic one.
_SCALER = ("cur_scale", "cur_iter")
_DYNAMIC_SCALER = ("last_overflow_iter", "scale_factor", "scale_window")


def can_read_model(file: PickledFile, engine: Any, with_counters: bool, with_states: bool) -> bool:
    """Whether a model-states file has all entries for an engine. Local.

    ``with_counters``: whether more than weights is asked for; ``with_states``: whether the optimizer's are, which are
    here without ZeRO.
    """
    tree = file.tree
    stage = engine.zero_optimization_stage()
    module = tree.get("module")
    counters = ("dp_world_size", *_COUNTERS) if with_counters else ("dp_world_size",)
    has_counters = all(is_count(tree.get(key)) for key in counters) and is_count(tree.get("global_samples", 0))
    has_scheduler = not with_counters or engine.lr_scheduler is None or "lr_scheduler" in tree
    if not has_counters or not has_scheduler or (engine.has_moe_layers and "num_experts" not in tree):
        return False
    has_module = bool(module) or isinstance(engine, PipelineEngine)  # whose stages have files of layers
    if not has_module or not _same_shapes(module_entries(module or {}, file.path), engine.module):
        return False
    if not _has_frozen(tree.get("frozen_param_fragments"), engine.module):
        return False
    if stage > 0 or not with_states or engine.has_moe_layers:
        return True
    return _can_read_unpartitioned(file, tree.get("optimizer")) and _has_members(file, engine)


def can_read_layers(files: FolderFiles, opened: Callable[[str], PickledFile], engine: Any) -> bool:
    """Whether the files of a pipeline's layers, and of experts, hold weights alone: those of the live module. Local.

    And whether there is one of each of this rank's layers, by the name that DeepSpeed looks for.

    Each rank reads the files of its own: one that failed alone would leave the others waiting in a collective.
    """
    found = {name.partition("-")[0] for name in files.layers.values()}
    if not all(f"layer_{number:02d}" in found for number in layers_with_files(engine.module)):
        return False
    experts = ((opened(name), "") for name in files.experts.values())
    layers = ((opened(name), f"{number}.") for (number, _), name in files.layers.items())
    return all(_holds_weights(file, prefix, engine.module) for file, prefix in chain(experts, layers))


def _holds_weights(file: PickledFile, prefix: str, live: Any) -> bool:
    if not isinstance(file.tree, Mapping) or not all(isinstance(name, str) for name in file.tree):
        return False
    weights = {name: value for name, value in file.tree.items() if not is_extra_state(name)}
    names = {name for name in live.state_dict() if prefix and name.startswith(prefix) and not is_extra_state(name)}
    if not all(isinstance(value, TensorRef) for value in weights.values()):
        return False
    named = {prefix + name: value for name, value in weights.items()}
    return not names or (names == named.keys() and _same_shapes(named, live))  # tied modules have other names


def can_read_partition(file: PickledFile, engine: Any) -> bool:
    """Whether an optimizer-states file has all entries for an engine with ZeRO. Local."""
    stage = engine.zero_optimization_stage()
    state = file.section("optimizer_state_dict")
    scaler = state.get("loss_scaler", None if stage == 3 else ...)
    if scaler is None or not isinstance(state.get("clip_grad", 0.0), Number):
        return False
    if stage == 3 and not {"dynamic_loss_scale", "overflow"} <= state.keys():
        return False
    if stage < 3:
        try:
            Version(state.get("ds_version"))
        except (InvalidVersion, TypeError):
            return False
    return _can_read_states(file) and _has_members(file, engine)


def can_take_scaler(file: PickledFile, fields: frozenset[str]) -> bool:
    """Whether the loss scaler of a file is like the live one, with its ``fields``, whose place it is given. Local.

    Raises :class:`DamagedError` for values that no scaler has.
    """
    state = file.tree.get("optimizer_state_dict") or file.tree.get("optimizer") or {}
    scaler = state.get("loss_scaler")
    for scale in (state, scaler):
        with errors_of_file(file.path):
            saved_config.loss_scale_of(scale)
    return scaler is None or vars(scaler).keys() == fields


def _same_shapes(module: Mapping[str, Any], live: Any) -> bool:
    """Whether the weights of a file have the shapes of the live module's, where both have the name.

    ZeRO-3's are empty in files, and in the module once DeepSpeed's loader has partitioned them.
    """
    empty = {name for name, param in live.named_parameters(remove_duplicate=False) if hasattr(param, "ds_shape")}
    for name, value in live.state_dict().items():
        if name in module and hasattr(value, "shape"):
            saved = module[name]
            shapes = [tuple(value.shape), (0,)] if name in empty else [tuple(value.shape)]
            if not isinstance(saved, TensorRef) or saved.shape not in shapes:
                return False
    return True


def _has_frozen(saved: Any, live: Any) -> bool:
    """Whether the weights of frozen parameters, if a file has any of them, are all there."""
    if saved is None:
        return True
    for name, param in live.named_parameters():
        if not param.requires_grad:
            wanted = getattr(param, "ds_tensor", param)
            if name not in saved or saved[name].shape != tuple(wanted.shape):
                return False
    return True


def _can_read_unpartitioned(file: PickledFile, optimizer: Any) -> bool:
    if not isinstance(optimizer, Mapping):
        return False
    if any(key in optimizer for key in MASTER_ENTRIES):
        keys = _SCALER + _DYNAMIC_SCALER if optimizer.get("dynamic_loss_scale") else _SCALER
        is_fused = any(key in optimizer and kind == FUSED for key, kind in MASTER_ENTRIES.items())
        is_whole = "dynamic_loss_scale" in optimizer and (not is_fused or "clip_grad" in optimizer)
        if not is_whole or not all(isinstance(optimizer.get(key), Number) for key in keys):
            return False
    return _can_read_states(file)


def _has_members(file: PickledFile, engine: Any) -> bool:
    """Whether the saved param groups number as many members as the live ones have, as torch numbers them.

    ``torch.optim.Optimizer.load_state_dict`` pairs members by order: other numbers give one the states of another.
    """
    groups = saved_config.base_state(file).get("param_groups")
    counts = compat.member_counts(engine)
    if not isinstance(groups, (list, tuple)) or len(groups) != len(counts):
        return False
    first = 0
    for group, count in zip(groups, counts, strict=True):
        if not isinstance(group, Mapping) or group.get("params") != list(range(first, first + count)):
            return False
        first += count
    return True


def _can_read_states(file: PickledFile) -> bool:
    """Whether torch makes the states of a file's base optimizer as they were: their steps, and all others."""
    for key, state in saved_config.base_state(file).get("state", {}).items():
        if not isinstance(key, int) and isinstance(state, (Number, TensorRef)):
            continue  # of the optimizer itself, not of a parameter, as MADGRAD's count: torch takes it over as it is
        if not isinstance(state, Mapping):
            return False
        if not isinstance(state.get("step", 0), (int, float, TensorRef)):
            return False
        if not all(map(_is_cast_whole, state.values())):
            return False
    return True


def _is_cast_whole(value: Any) -> bool:
    """Whether ``torch.optim.Optimizer.load_state_dict`` leaves a value of a state as it is.

    It makes whatever can be iterated over anew, by its class, of a generator of its items: text and arrays become that
    generator's text, or an error.
    """
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_cast_whole, value.values()))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_cast_whole, value))
    if type(value) is Call:
        return value.is_users or _is_number(value)
    return value is None or isinstance(value, (Number, bytes, TensorRef))


def _is_number(call: Call) -> bool:
    """Whether an object of numpy's is a scalar of a number."""
    dtype = call.args[0] if call.name.endswith("multiarray.scalar") and call.args else None
    return type(dtype) is Call and bool(dtype.args) and str(dtype.args[0])[:1] in set("biufc")

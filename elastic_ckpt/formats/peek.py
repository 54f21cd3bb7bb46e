"""What one model-states file says by itself: something is known even of a checkpoint that cannot be read as a whole."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.dtypes import is_floating
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.training_state import TrainingState
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.degrees import Degrees, stated_degrees
from elastic_ckpt.formats.pickled import PickledFile, TensorRef, open_pickled
from elastic_ckpt.formats.run_arguments import run_arguments
from elastic_ckpt.formats.saved_config import saved_config
from elastic_ckpt.formats.training_state import loss_scale_of, read_training_state
from elastic_ckpt.formats.zero0_index import UnpartitionedState, index_unpartitioned

#: Entries that DeepSpeed and Megatron write themselves; whatever else is there, the training script has put in.
_OWN_ENTRIES = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
    | {"global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"}
    | {"checkpoint_parallel_dimensions", "universal_checkpoint_info", "csr_tensor_module_names"}
    | {"ds_autoep_layers", "autoep_layers", "folding"}
)


@dataclass(frozen=True)
class Peeked:
    """One model-states file.

    Attributes:
        name: of the file.
        training_state: counters, batch sizes, scheduler, and the loss scale where it lies in this file.
        config: DeepSpeed config of the run; ``None``: only its path was saved, or nothing.
        ds_version: DeepSpeed version; empty: not said.
        degrees: parallel degrees of the run, as far as the file states them and other files bear them out.
        weight_dtypes: floating-point dtypes of the module's parameters, the most frequent first; those of an empty
            tensor count, which ZeRO-3 leaves in the place of a parameter.
        client_state: names of the entries that the training script put in.
        parameters: names that the file lists as trained, of its pipeline stage and tensor-parallel rank.
        unnamed: optimizer states that are numbered (ZeRO stage 0), by the model-parallel rank whose file they lie in.
        holds_optimizer: whether the optimizer's states lie in this file, so that there are no others for them.
    """

    name: str
    training_state: TrainingState
    config: Mapping[str, Any] | None
    ds_version: str
    degrees: Degrees
    weight_dtypes: tuple[str, ...]
    client_state: tuple[str, ...]
    parameters: tuple[str, ...]
    unnamed: Mapping[int, UnpartitionedState]
    holds_optimizer: bool


def peek(found: Found, trust_pickle: bool = False) -> Peeked | None:
    """Look into the first model-states file that can be read; ``None``: there is none. Local."""
    files = found.files
    places = [(mp, files.model[mp]) for mp in sorted(files.model)]
    places += [(mp, name) for (_, mp), name in sorted(files.model_zero3.items(), key=lambda item: item[0][::-1])]
    for mp, name in places:
        try:
            file = open_pickled(found.path(name), trust_pickle)
            if isinstance(file.tree, Mapping):
                return _peeked(found, mp, file, trust_pickle)
        except (ElasticCkptError, TypeError, ValueError, AttributeError):
            continue  # what is wrong with it, reading the whole checkpoint says
    return None


def _peeked(found: Found, mp: int, file: PickledFile, trust_pickle: bool) -> Peeked:
    tree = file.tree
    mine = _unnamed(file)
    others = {} if mine is None else _unnamed_elsewhere(found, mp, trust_pickle)
    scale = None if mine is None else loss_scale_of(mine.scaler)
    buffers = _texts(tree.get("buffer_names"))
    module = tree.get("module")
    weights = dict(module) if isinstance(module, Mapping) else {}
    dtypes = _dtypes(ref for key, ref in weights.items() if str(key) not in buffers)
    shapes = tree.get("param_shapes") or ()
    listed = [str(key) for group in shapes if isinstance(group, Mapping) for key in group]
    config = saved_config(file)
    stated = stated_degrees(tree, config or {}, run_arguments(tree.get("args"), found.folder))
    degrees = stated.borne_out(len(found.files.mp_ranks))
    return Peeked(
        name=os.path.basename(file.path),
        training_state=read_training_state(file, scale, overflow=False, same_ranks=False, sequence=degrees.sequence),
        config=config,
        ds_version=str(tree.get("ds_version") or ""),
        degrees=degrees,
        weight_dtypes=dtypes or _layer_dtypes(found, trust_pickle),
        client_state=tuple(sorted(str(key) for key in tree if key not in _OWN_ENTRIES)),
        parameters=tuple(listed),
        unnamed={} if mine is None else {mp: mine, **others},
        holds_optimizer=tree.get("optimizer") is not None,
    )


def _texts(values: Any) -> frozenset[str]:
    return frozenset(map(str, values)) if isinstance(values, (list, tuple, set)) else frozenset()


def _unnamed(file: PickledFile) -> UnpartitionedState | None:
    try:
        return index_unpartitioned(file, StateOptions())
    except ElasticCkptError:
        return None


def _unnamed_elsewhere(found: Found, mp: int, trust_pickle: bool) -> dict[int, UnpartitionedState]:
    """Each pipeline stage and tensor-parallel rank has a file of its own."""
    states: dict[int, UnpartitionedState] = {}
    for other, name in sorted(found.files.model.items()):
        try:
            state = None if other == mp else _unnamed(open_pickled(found.path(name), trust_pickle))
        except ElasticCkptError:
            continue
        states |= {} if state is None else {other: state}
    return states


def _layer_dtypes(found: Found, trust_pickle: bool) -> tuple[str, ...]:
    """Of the weights of a pipeline, from the first layer's file that has any."""
    for place in sorted(found.files.layers):
        try:
            tree = open_pickled(found.path(found.files.layers[place]), trust_pickle).tree
        except ElasticCkptError:
            continue
        dtypes = _dtypes(tree.values()) if isinstance(tree, Mapping) else ()
        if dtypes:
            return dtypes
    return ()


def _dtypes(values: Iterable[Any]) -> tuple[str, ...]:
    """The most frequent one first: by elements, and where there are none, by tensors."""
    counts: dict[str, tuple[int, int]] = {}
    for ref in values:
        if isinstance(ref, TensorRef) and is_floating(ref.dtype):
            numel, tensors = counts.get(ref.dtype, (0, 0))
            counts[ref.dtype] = numel + math.prod(ref.shape), tensors + 1
    return tuple(sorted(counts, key=lambda dtype: counts[dtype], reverse=True))

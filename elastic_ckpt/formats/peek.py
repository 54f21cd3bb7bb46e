"""Facts from one model-states file alone, even if the checkpoint cannot be read as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from elastic_ckpt.core.metadata import is_floating
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.training_state import TrainingState
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import Found, MetadataOptions
from elastic_ckpt.formats.model_states import (
    UnpartitionedState,
    index_unpartitioned,
    module_entries,
    saved_without_states,
)
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.saved_config import Degrees, features_in, run_arguments, saved_config, stated_degrees
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.training_state import loss_scale_of, read_training_state

#: Entries that DeepSpeed and Megatron write; the training script added all others.
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
        training_state: with the loss scale, if it is in this file.
        config, ds_version: of the run; ``None`` (also if only its path was saved) and empty: not stated.
        degrees: parallel degrees that the file states and the number of files confirms.
        weight_dtypes: floating-point dtypes of the module's parameters, most frequent first; those of the empty tensors
            that ZeRO-3 leaves for parameters count.
        client_state: names of the entries that the training script added.
        parameters: trained parameters of its pipeline stage and tensor-parallel rank.
        unnamed: numbered optimizer states (ZeRO stage 0), by the model- or expert-parallel rank whose file has them.
        experts: number of experts, by layer.
        holds_optimizer: whether the optimizer's states are in this file and in no other.
        without_states: whether no file has any (:func:`~elastic_ckpt.formats.model_states.saved_without_states`).
    """

    training_state: TrainingState
    config: Mapping[str, Any] | None
    ds_version: str
    degrees: Degrees
    weight_dtypes: tuple[str, ...]
    client_state: tuple[str, ...]
    parameters: tuple[str, ...]
    unnamed: Mapping[int, UnpartitionedState]
    holds_optimizer: bool
    experts: tuple[int, ...] = ()
    without_states: bool = False


def peek(found: Found, trust_pickle: bool = False) -> Peeked | None:
    """Read the first readable model-states file; ``None``: there is none. Local."""
    models = sorted(found.files.model.items())
    zero3 = sorted((mp, dp, name) for (dp, mp), name in found.files.model_zero3.items())
    for mp, file in _readable(found, [*models, *((mp, name) for mp, _, name in zero3)], trust_pickle):
        try:
            return _peeked(found, mp, file, trust_pickle)
        except (ElasticCkptError, TypeError, ValueError, AttributeError):
            continue  # reading the whole checkpoint reports what is wrong with it
    return None


def _readable(found: Found, names: Iterable[tuple[int, str]], trust_pickle: bool) -> Iterator[tuple[int, PickledFile]]:
    """The readable files, by rank."""
    for rank, name in names:
        try:
            file = open_pickled(found.path(name), trust_pickle)
        except ElasticCkptError:
            continue
        if isinstance(file.tree, Mapping):
            yield rank, file


def _peeked(found: Found, mp: int, file: PickledFile, trust_pickle: bool) -> Peeked:
    tree, config = file.tree, saved_config(file)
    unnamed, by_rank = _unnamed(file), {}
    if found.files.expert_optimizers:  # one of them is in the model-states file too
        by_rank = dict(_of_experts(found, trust_pickle))
    elif unnamed is not None:  # each pipeline stage and tensor-parallel rank has a file of its own
        others = sorted((rank, name) for rank, name in found.files.model.items() if rank != mp)
        states = ((rank, _unnamed(other)) for rank, other in _readable(found, others, trust_pickle))
        by_rank = {mp: unnamed, **{rank: state for rank, state in states if state is not None}}
    buffers, weights = tree.get("buffer_names"), module_entries(tree.get("module"))
    buffers = frozenset(map(str, buffers)) if isinstance(buffers, (list, tuple, set)) else frozenset()
    dtypes = _dtypes(ref for key, ref in weights.items() if key not in buffers)
    if not dtypes:  # those of a pipeline are in the files of its layers
        layers = [(layer, found.files.layers[layer, tp]) for layer, tp in sorted(found.files.layers)]
        of_layers = (_dtypes(layer.tree.values()) for _, layer in _readable(found, layers, trust_pickle))
        dtypes = next(filter(None, of_layers), ())
    stated = stated_degrees(tree, config or {}, run_arguments(tree.get("args"), found.folder))
    degrees = stated.borne_out(len(found.files.mp_ranks))
    scale = None if unnamed is None else loss_scale_of(unnamed.scaler)
    return Peeked(
        training_state=read_training_state(
            file, scale, False, False, degrees.sequence, MetadataOptions(with_client_state=False)
        ),
        config=config,
        ds_version=str(tree.get("ds_version") or ""),
        degrees=degrees,
        weight_dtypes=dtypes,
        client_state=tuple(sorted(str(key) for key in tree if key not in _OWN_ENTRIES)),
        parameters=tuple(
            str(key) for group in tree.get("param_shapes") or () if isinstance(group, Mapping) for key in group
        ),
        unnamed=by_rank,
        holds_optimizer=tree.get("optimizer") is not None,
        experts=features_in(file).experts,
        without_states=saved_without_states(file),
    )


def _of_experts(found: Found, trust_pickle: bool) -> Iterator[tuple[int, UnpartitionedState]]:
    """The optimizer of each expert-parallel rank, dense parameters in the first alone."""
    names = [(ep_rank, name) for (ep_rank, _), name in sorted(found.files.expert_optimizers.items())]
    for ep_rank, file in _readable(found, names, trust_pickle):
        state = _unnamed(file)
        if state is not None and ep_rank:
            pairs = zip(state.members, state.groups, strict=True)
            members = tuple(numbers if group.get("moe") else () for numbers, group in pairs)
            kept = set(chain.from_iterable(members))
            state = replace(state, members=members, states={n: s for n, s in state.states.items() if n in kept})
        if state is not None:
            yield ep_rank, state


def _unnamed(file: PickledFile) -> UnpartitionedState | None:
    try:
        return index_unpartitioned(file, StateOptions())
    except ElasticCkptError:
        return None


def _dtypes(values: Iterable[Any]) -> tuple[str, ...]:
    """Dtypes, most frequent first: by elements, or if there are none by tensors."""
    counts: dict[str, tuple[int, int]] = {}
    for ref in values:
        if isinstance(ref, TensorRef) and is_floating(ref.dtype):
            numel, tensors = counts.get(ref.dtype, (0, 0))
            counts[ref.dtype] = numel + math.prod(ref.shape), tensors + 1
    return tuple(sorted(counts, key=lambda dtype: counts[dtype], reverse=True))

"""Mixtures of experts, of DeepSpeed's ``MoE`` layers and of AutoEP: their files, and which ranks divide which experts.

Each expert has a file with its weights, ``layer_L_expert_E_mp_rank_00_model_states.pt``, L counting ``MoE`` layers. At
ZeRO-1 and 2 its masters and states are in the optimizer-states files of the ranks that hold it, by the names in their
module. Source: ``DeepSpeedEngine._save_moe_checkpoint`` (engine.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from elastic_ckpt.core.experts import expert_name, numbers_of_experts, stacked_name
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFile
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import LayoutError, listed
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.merging import with_module_files
from elastic_ckpt.formats.metadata_builder import Shapes
from elastic_ckpt.formats.model_states import ModelShard, UnpartitionedState, index_unpartitioned
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef


@dataclass(frozen=True)
class ExpertShard(SourceFile):
    """One expert's file: its tensors by FQN."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "layer", "expert", "weights")

    layer: int
    expert: int
    weights: Mapping[str, TensorRef]

    @property
    def path_of_layer(self) -> str:
        """Where its layer is in the model."""
        name = next(iter(self.weights))
        parts = expert_name(name)
        return stacked_name(name).rpartition(".")[0] if parts is None else parts.layer


def index_expert(file: PickledFile) -> ExpertShard:
    """Read one expert's file; :class:`LayoutError` if it has anything but that expert's tensors."""
    ((layer, expert, _),) = sort_names([os.path.basename(file.path)], is_universal=False).experts
    weights = {str(name): ref for name, ref in file.tree.items() if isinstance(ref, TensorRef)}
    found = {name: expert_name(name) for name in weights}
    others = [name for name, e in found.items() if (e.number != expert if e else not name.endswith(f".{expert}"))]
    if others or not weights:
        problem = "this file does not have the weights of the expert that its name says"
        have = listed(others) if others else "no tensors"
        raise LayoutError(problem, file.path, f"tensors of expert {expert} of one layer", have)
    return ExpertShard(file.path, file.nbytes, layer, expert, weights, records=file.records)


@dataclass(frozen=True)
class ExpertOptimizer(SourceFile):
    """The optimizer of one expert-parallel rank, which is whole without ZeRO: dense parameters, and its experts."""

    ep_rank: int
    state: UnpartitionedState


def index_expert_optimizer(file: PickledFile, ep_rank: int, options: StateOptions) -> ExpertOptimizer | SourceFile:
    """Read ``expp_rank_E_mp_rank_00_optim_states.pt``; under ZeRO, DeepSpeed before 0.19.8 writes it without states."""
    state = index_unpartitioned(file, options)
    if state is None:
        return SourceFile(file.path, file.nbytes, records=file.records)
    return ExpertOptimizer(file.path, file.nbytes, ep_rank, state, records=file.records)


class Division(NamedTuple):
    """Parameters of a flat tensor, and the data-parallel ranks that divide it among them.

    Attributes:
        shapes: FQNs and shapes in flat order.
        ranks: data-parallel ranks.
        stacked: of stacked parameters, the experts that these ranks hold.
    """

    shapes: Shapes
    ranks: range
    stacked: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def is_across(model: ModelShard, shards: Sequence[OptimizerShard], flat: int, tp: int) -> bool:
    """Whether experts of a flat tensor are on ranks of all ``tp`` tensor-parallel ranks, which do not slice them.

    AutoEP never slices experts; those of ``MoE`` layers are sliced with ``enable_expert_tensor_parallelism``.
    """
    if tp == 1 or any(name in model.stacked for name, _ in model.param_shapes[flat]):
        return tp > 1
    groups, number = shards[0].groups, shards[0].flat_groups[flat]
    ep = degree_in_name(groups[number]) if number < len(groups) else 0
    return ep * partitions_of(shards, flat) == len(shards) * tp


def degree_in_name(group: Mapping[str, object]) -> int:
    """The expert-parallel degree in the name of a param group of experts, ``ep_size_2``; 0 for any other group."""
    number = str(group.get("name")).removeprefix("ep_size_") if group.get("moe") else ""
    return int(number) if number.isdecimal() else 0


def divisions(model: ModelShard, shards: Sequence[OptimizerShard], flat: int) -> Iterator[Division]:
    """How ranks divide a flat tensor: all a dense one, those of one expert-parallel rank one of its experts.

    The model-states file, which rank 0 wrote, has the names of expert-parallel rank 0.
    """
    shapes, dp = model.param_shapes[flat], len(shards)
    ep = degree_of(shards, flat)
    partitions = dp // ep
    has_stacked = any(name in model.stacked for name, _ in shapes)
    if ep == 1 and not has_stacked:
        yield Division(shapes, range(dp))
        return
    local = _experts_of_a_rank(model.param_shapes)
    parts = [(expert_name(name), name, shape) for name, shape in shapes]
    for ep_rank in range(ep):
        first = ep_rank * partitions
        ranks = range(first, first + partitions) if shards[0].data_before_experts else range(ep_rank, dp, ep)
        named = [(name if e is None else str(e.on(ep_rank, local[e.layer])), shape) for e, name, shape in parts]
        stacked = {name: model.stacked[name][ep_rank] for name, _ in shapes if name in model.stacked}
        yield Division(named, ranks, stacked)


def partitions_of(shards: Sequence[OptimizerShard], flat: int) -> int:
    """How many ranks divide a flat tensor among them."""
    counts = shards[0].partition_count
    return counts[flat] if flat < len(counts) else len(shards)


def degree_of(shards: Sequence[OptimizerShard], flat: int) -> int:
    """The expert-parallel degree of a flat tensor's parameters; 1 for dense ones."""
    return len(shards) // max(partitions_of(shards, flat), 1) or 1


@lru_cache(maxsize=1)  # asked for every flat tensor of a model
def _experts_of_a_rank(param_shapes: tuple[Shapes, ...]) -> dict[str, int]:
    """Path of each ``MoE`` layer -> the number of its experts on one expert-parallel rank."""
    numbers = numbers_of_experts(name for name, _ in chain.from_iterable(param_shapes))
    return {layer: max(found) + 1 for layer, found in numbers.items()}


def check_experts(
    found: CheckpointInfo,
    model: ModelShard,
    shards: Sequence[OptimizerShard],
    experts: Sequence[ExpertShard],
    mp: str = "00",
) -> None:
    """Raise :class:`LayoutError` unless each expert has one file, and one place in the optimizer's files."""
    counts = model.features.experts
    without_files = model.stacked and shards and shards[0].zero_stage == 3  # AutoEP has them in the shards alone
    expected = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count) if not without_files}
    present = {(each.layer, each.expert): each for each in experts}
    for layer, expert in sorted(expected ^ present.keys()):
        name = f"layer_{layer}_expert_{expert}_mp_rank_{mp}_model_states.pt"
        problem = f"the file of an expert is {'missing' if (layer, expert) in expected else 'one too many'}"
        wanted = f"experts of {len(counts)} layers, {list(counts)} of them, according to {model.path}"
        raise LayoutError(problem, found.path(name), wanted, f"{len(present)} files of experts")
    names: dict[int, str] = {}
    for each in experts:
        if names.setdefault(each.layer, each.path_of_layer) != each.path_of_layer:
            problem = "files of one layer's experts name different layers: files of two saves are mixed"
            wanted, parameter = f"experts of {names[each.layer]}", next(iter(each.weights))
            raise LayoutError(problem, each.path, wanted, each.path_of_layer, parameter=parameter)
    degrees = {
        e.layer: degree_of(shards, flat)
        for flat, shapes in enumerate(model.param_shapes)
        for e in filter(None, (expert_name(name) for name, _ in shapes))
    }
    local = _experts_of_a_rank(model.param_shapes)
    for flat, shapes in enumerate(model.param_shapes):
        ep = degree_of(shards, flat)
        for name, placed in ((name, model.stacked[name]) for name, _ in shapes if name in model.stacked):
            if len(placed) != ep:
                problem = "experts of AutoEP are not placed as their optimizer states are divided"
                wanted = f"{ep} expert-parallel ranks, from the optimizer-states files"
                raise LayoutError(problem, model.path, wanted, f"experts on {len(placed)} ranks", parameter=name)
    for number, path in names.items():
        if path in local and local[path] * degrees[path] != counts[number]:
            problem = "experts in the optimizer's files are not as many as the model's"
            have = f"{local[path]} experts on each of {degrees[path]} expert-parallel ranks"
            raise LayoutError(problem, model.path, f"{counts[number]} experts", have, parameter=f"{path}*")


def with_experts(metadata: CheckpointMetadata, experts: Sequence[ExpertShard], model: ModelShard) -> CheckpointMetadata:
    """``metadata`` extended by what the files of experts hold: buffers, and parameters that no optimizer owned."""
    buffers = {(e.layer, e.rest) for e in filter(None, map(expert_name, model.buffer_names))}
    parts = {name: expert_name(name) for each in experts for name in each.weights}
    of_buffers = {name for name, e in parts.items() if e is not None and (e.layer, e.rest) in buffers}
    return with_module_files(metadata, [(each, 0, each.weights) for each in experts], of_buffers.__contains__)

"""Mixtures of experts without ZeRO: each expert-parallel rank has an optimizer file of its own.

``expp_rank_E_mp_rank_00_optim_states.pt`` holds the states of all dense parameters, and of the experts of that rank, by
number. Weights are in the model-states file and in the files of experts. Source: ``_save_moe_checkpoint`` (engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from elastic_ckpt.core.experts import expert_name
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.core.numbered import ExpertRank, NameStates
from elastic_ckpt.errors import LayoutError, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions, refuse_other_saves
from elastic_ckpt.formats.experts import ExpertOptimizer, ExpertShard, degree_in_name
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, dense_tensor, module_tensors, weights_crc32s
from elastic_ckpt.formats.model_states import PLAIN, ModelShard
from elastic_ckpt.formats.saved_states import merged_groups, settings
from elastic_ckpt.formats.zero0 import add_unpartitioned, member_names, shapes_of, weights_alone


def unpartitioned_experts(
    found: CheckpointInfo,
    model: ModelShard,
    experts: Sequence[ExpertShard],
    optimizers: Sequence[ExpertOptimizer],
    options: MetadataOptions,
    name_states: NameStates,
) -> CheckpointMetadata:
    """As :func:`unpartitioned_metadata`, given the files of experts and their optimizers, in order."""
    refuse_other_saves(optimizers, lambda each: {"param groups differ": settings(each.state.groups)})
    ep = _degree(found, optimizers)
    states = ((each.path, states) for each in optimizers for states in each.state.states.values())
    builder = MetadataBuilder(found, [model, *optimizers, *experts], options.states, states)
    for expert in experts:
        if model.features.experts[expert.layer] % ep:
            problem, name = "a layer's experts cannot be on so many expert-parallel ranks", f"{expert.path_of_layer}*"
            expected, have = f"a number of experts that {ep} divides", f"{model.features.experts[expert.layer]} experts"
            raise LayoutError(problem, expert.path, expected, have, parameter=name)
    local = {each.path_of_layer: model.features.experts[each.layer] // ep for each in experts}
    for each in optimizers:
        shard, files = _on_rank(model, experts, each, local, first_file=1 + ep)
        mine = ExpertRank(each.ep_rank, local, frozenset(shard.stacked), weights_crc32s([model]))
        named = member_names(shard, each.state, options, name_states, mine)
        if named is None:
            return weights_alone(found, model)
        names, notes = named
        if each.ep_rank:  # dense parameters are in each of these files
            of_experts = {name for name in shard.weights if name in shard.stacked or expert_name(name)}
            names = [[name if name in of_experts else None for name in group] for group in names]
        add_unpartitioned(builder, shard, each.state, names, 1 + each.ep_rank)
        if each.state.kind == PLAIN:  # the weights are the masters
            for name, _ in shapes_of(shard, filter(None, chain.from_iterable(names))):
                builder.tensors.add({(name, MASTER): dense_tensor(name, MASTER, shard.weights[name], files[name])})
        builder.notes += [note for note in notes if note not in builder.notes]
    builder.tensors.add(module_tensors([model], 0, builder.parameters)[0])
    groups = merged_groups((range(1 + each.ep_rank, 2 + each.ep_rank), each.state.groups) for each in optimizers)
    return builder.build(model, 0, groups, frozen_recorded=model.frozen_recorded)


def _degree(found: CheckpointInfo, optimizers: Sequence[ExpertOptimizer]) -> int:
    """The expert-parallel degree, which param groups of experts are named after, as ``ep_size_2``."""
    named = {degree_in_name(group) for each in optimizers for group in each.state.groups if group.get("moe")}
    if len(named) > 1:
        problem = "layers of different expert-parallel degrees are not supported without ZeRO"
        degrees = ", ".join(map(str, sorted(named)))
        raise UnsupportedError(problem, optimizers[0].path, "one degree, or ZeRO-1 or 2 at save time", degrees)
    ep = next(iter(named), 0) or len(optimizers)
    missing = set(range(ep)) ^ {each.ep_rank for each in optimizers}
    if missing:
        name = f"expp_rank_{min(missing)}_mp_rank_00_optim_states.pt"
        problem = f"a file of the checkpoint is {'missing' if min(missing) < ep else 'one too many'}"
        expected = f"the optimizers of {ep} expert-parallel ranks"
        have = f"those of ranks {sorted(each.ep_rank for each in optimizers)}"
        raise LayoutError(problem, found.path(name), expected, have)
    return ep


def _on_rank(
    model: ModelShard, experts: Sequence[ExpertShard], of: ExpertOptimizer, local: Mapping[str, int], first_file: int
) -> tuple[ModelShard, dict[str, int]]:
    """The model with the weights of one expert-parallel rank's experts, and the file of each weight.

    Stacked parameters have no weights of their own, only a shape.
    """
    weights, files = dict(model.weights), dict.fromkeys(model.weights, 0)
    stacked = {name: (placed[of.ep_rank],) for name, placed in model.stacked.items()}
    for file, each in enumerate(experts, first_file):
        placed = next((mine for name, (mine,) in stacked.items() if name.startswith(f"{each.path_of_layer}.")), None)
        is_mine = each.expert // local[each.path_of_layer] == of.ep_rank if placed is None else each.expert in placed
        if is_mine:
            weights |= each.weights
            files |= dict.fromkeys(each.weights, file)
    for name, (mine,) in stacked.items():
        part = weights[f"{name}.{mine[0]}"]
        weights[name] = replace(part, shape=(len(mine), *part.shape), stride=(part.numel, *part.stride))
    return replace(model, weights=weights, optimizer=of.state, stacked=stacked), files

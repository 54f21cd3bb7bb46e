"""Metadata of checkpoints without ZeRO partitions, whose optimizer may number its parameters.

Numbered ones get their names from whoever reads the folder (:mod:`elastic_ckpt.core.fqn`). Where there are masters
beside the weights, their values are compared too (:mod:`elastic_ckpt.formats.same_save`).

Of mixtures of experts, ``expp_rank_E_mp_rank_00_optim_states.pt`` holds the states of all dense parameters, and of the
experts of that rank, by number. Weights are in the model-states file and in the files of experts. Source:
``_save_moe_checkpoint`` (engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from elastic_ckpt.core.chunks import group_rules
from elastic_ckpt.core.counts import first_apart
from elastic_ckpt.core.flat_ranges import group_offsets
from elastic_ckpt.core.fqn import ExpertRank, NamedStates, NameStates, NumberedStates, expert_name
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata, SourceFile
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import LayoutError, MissingFilesError, MixedSavesError, Remedy, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions, refuse_other_saves
from elastic_ckpt.formats.classification import RankStates, compare_lengths
from elastic_ckpt.formats.merging import ExpertShard, LayerShard
from elastic_ckpt.formats.metadata_builder import (
    MetadataBuilder,
    Shape,
    Shapes,
    dense_tensor,
    module_tensors,
    weights_crc32s,
)
from elastic_ckpt.formats.model_states import FUSED, PLAIN, ModelShard, UnpartitionedState
from elastic_ckpt.formats.module_weights import weights_alone
from elastic_ckpt.formats.numbered_stages import StageFiles
from elastic_ckpt.formats.own_entries import not_tensors
from elastic_ckpt.formats.partitioned import degree_in_name, placed_otherwise
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES, StatesOfOne, merged_groups, saved_shape, settings
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef


def unpartitioned_metadata(
    found: CheckpointInfo,
    model: ModelShard,
    options: MetadataOptions,
    name_states: NameStates,
    experts: Sequence[ExpertShard] = (),
    optimizers: Sequence[UnpartitionedState] = (),
    stage: StageFiles | None = None,
) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer state is whole, or of its weights if ``name_states`` gives up.

    ``experts`` and ``optimizers`` are the files of experts, and of the optimizer of each expert-parallel rank, in
    order; without any, the optimizer is in the model-states file. Those of a pipeline's ``stage`` are numbered by
    stage, and its weights are in the files of layers.
    """
    ep = 1
    first = len(optimizers[:1])
    if optimizers:
        refuse_other_saves(optimizers, lambda each: {"param groups differ": settings(each.groups)})
        ep = _degree(found, model, experts, optimizers)
        for name in (name for name, placed in model.stacked.items() if len(placed) != ep):
            raise placed_otherwise(model, name, ep)
    local = {each.path_of_layer: model.features.experts[each.layer] // ep for each in experts}
    of_ranks = _by_expert_rank(model, experts, local, first_file=1 + ep) if optimizers else {}
    all_states = list(optimizers) or [state for state in (model.optimizer,) if state is not None]
    sources: list[_Source] = []
    notes: list[str] = []
    layers: list[LayerShard] = []
    of_first: _Crc32s = {}
    for ep_rank, state in enumerate(all_states):
        shard = model
        mine = None
        files = dict[str, int]()
        if optimizers:
            shard, files = _on_rank(model, of_ranks.get(ep_rank, ()), state)
            mine = ExpertRank(ep_rank, local, frozenset(shard.stacked), weights_crc32s([model]))
        if stage is not None:
            shard = stage.model
        _refuse_lost_weights(shard, state)
        numbered = numbered_states(shard, state, options, mine)
        if stage is not None:
            numbered = replace(numbered, stages=stage.numbered, stage=stage.number)
        named = _member_names(numbered, state, name_states)
        if named is None:
            return weights_alone(found, model)
        names, more = named
        notes += [note for note in more if note not in notes]
        if stage is not None:
            layers, files = stage.files_of(chain.from_iterable(names), first_file=1)
        of_experts = {name for name in shard.weights if name in shard.stacked or expert_name(name)}
        if ep_rank:  # dense parameters are in each of these files
            if options.check_shards:
                _refuse_other_states(all_states[0], state, _state_crc32s(state, names, of_experts), of_first)
            names = [[name if name in of_experts else None for name in group] for group in names]
        else:
            of_first = _state_crc32s(state, names, of_experts)
        of_groups = [_flats(shard, state, group, members) for group, members in enumerate(names)]
        sources.append(_Source(shard, state, first + ep_rank, files, of_groups))
    files_of_all = [model, *optimizers, *experts, *layers]
    if stage is not None:
        model = replace(model, shared=stage.model.shared)
    return _metadata(found, model, files_of_all, sources, options, notes)


def _metadata(
    found: CheckpointInfo,
    model: ModelShard,
    files: Sequence[SourceFile],
    sources: Sequence[_Source],
    options: MetadataOptions,
    notes: Iterable[str],
) -> CheckpointMetadata:
    """The metadata of these optimizers, and of what else the model-states file has."""
    flats = ((each.state.path, flat) for each in sources for flat in chain.from_iterable(each.groups))
    partitions = [RankStates(path, flat.shape, -1, flat.shard.states) for path, flat in flats]
    states = ((each.path, each.states) for each in partitions)
    builder = MetadataBuilder(found, files, options.states, states, compare_lengths(partitions))
    for source in sources:
        added = _add_unpartitioned(builder, source)
        for name in added if source.weights and source.state.kind == PLAIN else ():  # the weights are the masters
            master = dense_tensor(name, MASTER, source.model.weights[name], source.weights[name])
            builder.tensors.add({(name, MASTER): master})
    builder.notes += notes
    builder.tensors.add(module_tensors([model], None, builder.parameters)[0])
    groups = merged_groups((range(each.file, each.file + 1), each.state.groups) for each in sources)
    return builder.build(model, 0, groups, frozen_recorded=model.frozen_recorded)


class _Flat(NamedTuple):
    """One flat tensor of an optimizer that is whole, or one parameter."""

    shapes: Shapes
    shard: FlatShard

    @property
    def shape(self) -> Shape:
        """That of the parameter, if it is one."""
        return self.shapes[0][1] if len(self.shapes) == 1 else (self.shard.partition_numel,)


@dataclass(frozen=True)
class _Source:
    """An optimizer that is whole in one file, and the model whose parameters it updates."""

    model: ModelShard
    state: UnpartitionedState
    file: int  # of the optimizer
    weights: Mapping[str, int]  # parameter -> file of its weight, if that is not the model's
    groups: Sequence[Sequence[_Flat]]


#: CRC32s of the states, and of the master, of dense parameters; by the first one's name where several share one tensor.
_Crc32s = dict[str, dict[str, int]]


def _state_crc32s(
    state: UnpartitionedState, names: Sequence[Sequence[str | None]], of_experts: Collection[str]
) -> _Crc32s:
    """What the checksums of an optimizer's file tell of the states of dense parameters, as far as they are known."""
    known = {(offset, nbytes): crc32 for offset, nbytes, crc32 in state.records if crc32}
    found: _Crc32s = {}
    for group, members in enumerate(names):
        masters = state.masters[group] if state.masters else [None] * len(state.members[group])
        for name, number, master in zip(members, state.members[group], masters, strict=False):  # a flat one has several
            if name is None or name in of_experts:
                continue
            saved = state.states.get(number)
            refs = {} if saved is None else dict(saved.tensors)
            if master is not None:
                refs[MASTER] = master
            records = {key: (ref.byte_offset, ref.numel * ITEMSIZE[ref.dtype]) for key, ref in refs.items()}
            found[name] = {key: known[record] for key, record in records.items() if record in known}
    return found


def _refuse_other_states(
    first: UnpartitionedState, other: UnpartitionedState, of_other: _Crc32s, of_first: _Crc32s
) -> None:
    """Raise :class:`MixedSavesError` for the file of an expert-parallel rank with other states of a dense parameter."""
    for name, mine in of_first.items():
        theirs = of_other.get(name, mine)
        keys = [key for key in mine if mine[key] != theirs.get(key, mine[key])]
        if not keys:
            continue
        problem = "expert-parallel ranks have saved other optimizer states of a parameter that they all have"
        raise MixedSavesError(
            problem,
            other.path,
            f"{', '.join(keys)} as in {first.path}",
            "other values, by their checksums",
            parameter=name,
            remedy=(
                Remedy("use another tag", when="if the file is of another run"),
                Remedy("loads the first rank's", when="if ranks drifted apart", config={"verify": "bytes"}),
            ),
        )


def _flats(model: ModelShard, state: UnpartitionedState, group: int, members: Sequence[str | None]) -> list[_Flat]:
    """The flat tensors of one param group, whose ``members`` have these FQNs, or ``None`` if they are left out."""
    masters: list[tuple[list[str], int, TensorRef]]
    if state.kind == FUSED:
        trained = [name for name in members if name is not None]
        masters = [(trained, state.members[group][0], state.masters[group][0])] if trained else []
    else:
        own = state.masters[group] if state.masters else [model.weights[name] if name else None for name in members]
        each = zip(members, state.members[group], own, strict=True)
        masters = [([name], number, master) for name, number, master in each if name and master is not None]
    flats: list[_Flat] = []
    for trained, number, master in masters:
        shapes = [(name, model.weights[name].shape) for name in trained]
        states = state.states.get(number)
        flat = FlatShard(master, master.numel, states or StatesOfOne({}))
        if states is not None and state.kind != FUSED and shapes[0][1] == ():
            # elementwise states then have no dimensions either, and are no scalars
            points = {key: ref for key, ref in states.points.items() if key in ELEMENTWISE_NAMES}
            scalars = tuple((key, value) for key, value in states.scalars if key not in points)
            flat = replace(flat, states=replace(states, tensors={**points, **states.tensors}, scalars=scalars))
        flats.append(_Flat(shapes, flat))
    return flats


def _add_unpartitioned(builder: MetadataBuilder, source: _Source) -> list[str]:
    """Add masters and states of an optimizer that is whole in one file; returns the FQNs of all that were added."""
    model = source.model
    state = source.state
    every: list[str] = []
    for group, flats in enumerate(source.groups):
        added: list[str] = []
        for shapes, shard in flats:
            numels = [math.prod(shape) for _, shape in shapes]
            rules = group_rules(numels, group_offsets(numels), max(sum(numels), 1))
            stacked = {name: model.stacked[name][0] for name, _ in shapes if name in model.stacked}
            of_group = group, state.groups[group], [shard], range(source.file, source.file + 1), stacked
            added += builder.add_flat(shapes, rules, *of_group, is_alone=state.kind != FUSED)
        # DeepSpeed's FusedAdam, of which no class is saved, counts a group's steps in the state of its last tensor. It
        # alone keeps a step of 0 in each group beside those of its tensors; DeepSpeed's Lamb uses each tensor's
        saved = state.groups[group]
        counts_once = "bias_correction" in saved and not {"amsgrad", "max_coeff"} & saved.keys()
        if state.kind == PLAIN and counts_once and saved.get("step") == 0:
            stateful = [name for name in added if builder.parameters[name].scalars]
            counts = builder.parameters[stateful[-1]].scalars if stateful else ()
            for name in stateful:
                own_step = dict(builder.parameters[name].scalars).get("step")
                builder.parameters[name] = replace(builder.parameters[name], scalars=counts, own_step=own_step)
        every += added
    return every


def _refuse_lost_weights(model: ModelShard, state: UnpartitionedState) -> None:
    """Raise :class:`DamagedError` if the optimizer has more parameters than there are weights, or names one of them.

    Then, entries of the module that are no tensors are weights, and not what the module makes of itself.
    """
    others = model.other_entries
    if not others:
        return
    not_trained = {*model.buffers, *model.shared}
    weights = [ref for name, ref in model.weights.items() if name not in not_trained]
    if state.kind == FUSED:  # one flat tensor for each group
        is_short = sum(ref.numel for ref in weights) < sum(ref.numel for ref in chain.from_iterable(state.masters))
    else:
        is_short = len(weights) < sum(map(len, state.members))
    named = {name for names in state.names or () for name in names}
    lost = others if is_short else {name: found for name, found in others.items() if name in named}
    if lost:
        raise not_tensors(model.path, lost)


def numbered_states(
    model: ModelShard, state: UnpartitionedState, options: MetadataOptions, experts: ExpertRank | None = None
) -> NumberedStates:
    """What is known of the states of an optimizer and of the weights beside them, but for names in the former."""
    weights = {name: ref.shape for name, ref in model.weights.items()}
    shapes: list[list[Shape | None]] = [[master.shape for master in masters] for masters in state.masters]
    if state.kind == PLAIN:  # unknown for lack of a state: never a gradient
        every = [[state.states.get(number) for number in members] for members in state.members]
        shapes = [[None if each is None else saved_shape(each) for each in states] for states in every]
    compared = state.kind != PLAIN and options.check_shards
    flat = state.kind == FUSED
    facts = weights, model.shared, model.buffers, compared, experts, model.other_entries
    return NumberedStates(model.path, state.groups, shapes, flat, *facts)


def _member_names(numbered: NumberedStates, state: UnpartitionedState, name_states: NameStates) -> NamedStates | None:
    """Names of each saved group's members: the optimizer's own if they fit the module, else of ``name_states``."""
    if state.names is not None:  # those of parameters without a state may be missing
        weights = numbered.weights
        shapes = numbered.shapes
        named = [[name if name in weights else None for name in members] for members in state.names]
        fits = (
            [shape in (None, weights.get(name or "")) for shape, name in zip(*each, strict=False)]
            for each in zip(shapes, named, strict=True)
        )
        if list(map(len, shapes)) == list(map(len, named)) and all(chain.from_iterable(fits)):
            return named, ()
    return name_states(numbered)


def _degree(
    found: CheckpointInfo, model: ModelShard, experts: Sequence[ExpertShard], optimizers: Sequence[UnpartitionedState]
) -> int:
    """The expert-parallel degree, which param groups of experts are named after, as ``ep_size_2``."""
    named = {degree_in_name(group) for each in optimizers for group in each.groups if group.get("moe")}
    if len(named) > 1:
        problem = "layers of different expert-parallel degrees are not supported without ZeRO"
        degrees = ", ".join(map(str, sorted(named)))
        raise UnsupportedError(problem, optimizers[0].path, "one degree, or ZeRO-1 or 2 at save time", degrees)
    ep = next(iter(named), 0) or len(optimizers)
    rank = first_apart(ep, {each.ep_rank for each in optimizers})
    if rank is not None:
        name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        problem = f"a file of the checkpoint is {'missing' if rank < ep else 'one too many'}"
        expected = f"the optimizers of {counted(ep, 'expert-parallel rank')}"
        have = f"those of ranks {sorted(each.ep_rank for each in optimizers)}"
        error = MissingFilesError if rank < ep else LayoutError
        raise error(problem, found.path(name), expected, have)
    for expert in experts:
        if model.features.experts[expert.layer] % ep:
            problem = "a layer's experts cannot be on so many expert-parallel ranks"
            name = f"{expert.path_of_layer}*"
            expected = f"a number of experts that {ep} divides"
            have = f"{counted(model.features.experts[expert.layer], 'expert')}"
            raise LayoutError(problem, expert.path, expected, have, parameter=name)
    return ep


def _by_expert_rank(
    model: ModelShard, experts: Sequence[ExpertShard], local: Mapping[str, int], first_file: int
) -> dict[int, list[tuple[int, ExpertShard]]]:
    """By expert-parallel rank, the files of its experts, with the number of each file.

    Stacked experts are where AutoEP has placed them, others in turn, ``local`` of a layer on each rank.
    """
    placed: dict[tuple[str, int], int] = {}
    for name, of_ranks in model.stacked.items():
        layer = name.rpartition(".")[0]
        placed |= {(layer, expert): rank for rank, mine in enumerate(of_ranks) for expert in mine}
    found: dict[int, list[tuple[int, ExpertShard]]] = {}
    for file, each in enumerate(experts, first_file):
        in_turn = each.expert // local[each.path_of_layer]
        rank = placed.get((each.path_of_layer, each.expert), in_turn)
        found.setdefault(rank, []).append((file, each))
    return found


def _on_rank(
    model: ModelShard, experts: Sequence[tuple[int, ExpertShard]], of: UnpartitionedState
) -> tuple[ModelShard, dict[str, int]]:
    """The model with the weights of one rank's experts (of stacked ones, a shape alone), and the file of each.

    Raises :class:`LayoutError` for stacked experts that are in no file.
    """
    weights = dict(model.weights)
    files = dict.fromkeys(model.weights, 0)
    stacked = {name: (placed[of.ep_rank],) for name, placed in model.stacked.items()}
    for file, each in experts:
        weights |= each.weights
        files |= dict.fromkeys(each.weights, file)
    for name, (mine,) in stacked.items():
        part = weights.get(f"{name}.{mine[0]}")
        if part is None:
            problem = "the weights of stacked experts are in no file"
            expected = f"{name}.{mine[0]} in a file of that expert, as {model.path} places it"
            raise LayoutError(problem, model.path, expected, "none", parameter=name)
        weights[name] = replace(part, shape=(len(mine), *part.shape), stride=(part.numel, *part.stride))
    return replace(model, weights=weights, stacked=stacked), files

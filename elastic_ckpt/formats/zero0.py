"""Metadata of checkpoints without ZeRO partitions, whose optimizer may number its parameters.

Numbered ones get their names from whoever reads the folder (:mod:`elastic_ckpt.core.numbered`). Where there are masters
beside the weights, their values are compared too (:mod:`elastic_ckpt.formats.same_save`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from elastic_ckpt.core.chunks import group_rules
from elastic_ckpt.core.experts import slices
from elastic_ckpt.core.flat_ranges import group_offsets
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.core.numbered import ExpertRank, Members, NamedStates, NameStates, NumberedStates
from elastic_ckpt.core.state_kinds import ELEMENTWISE, PER_PARAMETER
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.experts import cannot_slice
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Shape, module_tensors, refuse_view
from elastic_ckpt.formats.model_states import FUSED, PLAIN, ModelShard, UnpartitionedState, saved_shape
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES, RankStates, StatesOfOne
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef


def unpartitioned_metadata(
    found: CheckpointInfo, model: ModelShard, options: MetadataOptions, name_states: NameStates
) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer state is whole, or of its weights if ``name_states`` gives up."""
    state = model.optimizer
    assert state is not None
    named = member_names(model, state, options, name_states)
    if named is None:
        return weights_alone(found, model)
    names, notes = named
    states = ((model.path, states) for states in state.states.values())
    builder = MetadataBuilder(found, [model], options.states, states)
    add_unpartitioned(builder, model, state, names)
    builder.tensors.add(module_tensors([model], 0, builder.parameters)[0])
    builder.notes += notes
    return builder.build(model, 0, state.groups, frozen_recorded=model.frozen_recorded)


def add_unpartitioned(
    builder: MetadataBuilder, model: ModelShard, state: UnpartitionedState, names: Members, file: int = 0
) -> None:
    """Add the masters and states of an optimizer that is whole in one file, given the names of its members."""
    for group, members in enumerate(names):
        masters: list[tuple[list[str], int, TensorRef]]
        if state.kind == FUSED:
            trained = [name for name in members if name is not None]
            masters = [(trained, state.members[group][0], state.masters[group][0])]
        else:
            own = state.masters[group] if state.masters else [model.weights[name] if name else None for name in members]
            each = zip(members, state.members[group], own, strict=True)
            masters = [([name], number, master) for name, number, master in each if name and master is not None]
        for trained, number, master in masters:
            if trained:
                flat = FlatShard(master, master.numel, state.states.get(number, StatesOfOne({})))
                _add_flat(builder, model, state, group, trained, flat, file)
        if state.kind == PLAIN and _is_fused_adam(state.groups[group]):
            _use_last_step(builder, [name for name, _ in shapes_of(model, filter(None, members))])


def weights_alone(found: CheckpointInfo, model: ModelShard) -> CheckpointMetadata:
    """The metadata of the module's weights; those of a pipeline are in the files of its layers."""
    builder = MetadataBuilder(found, [model])
    builder.tensors.add(module_tensors([model], 0, ())[0])
    return builder.build(model, 0, (), frozen_recorded=False)


def _add_flat(
    builder: MetadataBuilder,
    model: ModelShard,
    state: UnpartitionedState,
    group: int,
    names: Sequence[str],
    flat: FlatShard,
    file: int,
) -> None:
    shapes, states = shapes_of(model, names), flat.states
    own_shape = flat.master.shape if state.kind == FUSED else model.weights[names[0]].shape
    if own_shape == ():  # elementwise states then have no dimensions either, and are no scalars
        points = {key: ref for key, ref in states.points.items() if key in ELEMENTWISE_NAMES}
        scalars = tuple((key, value) for key, value in states.scalars if key not in points)
        states = replace(states, tensors={**points, **states.tensors}, scalars=scalars)
    flattened = {key: replace(ref, shape=_flattened(ref.shape, own_shape)) for key, ref in states.tensors.items()}
    saved = RankStates(model.path, flat.partition_numel, -1, flattened, states.digests)
    kinds = builder.classify([saved], [states], names[-1], any_shape=state.kind != FUSED)
    for key, ref in {MASTER: flat.master, **states.tensors}.items():
        if key == MASTER or (key in kinds and kinds[key].kind in (ELEMENTWISE, PER_PARAMETER)):
            refuse_view(names[0], f"{key} of this parameter", ref, model.path)
    whole = next((key for key, kind in kinds.items() if kind.kind == PER_PARAMETER), None)
    if whole is not None and names[0] in model.stacked:
        raise cannot_slice(whole, names[0])
    numels = [math.prod(shape) for _, shape in shapes]
    rules = group_rules(numels, group_offsets(numels), max(sum(numels), 1))
    flats = [replace(flat, states=states)]
    builder.add_flat(shapes, rules, group, state.groups[group], flats, range(file, file + 1), kinds)


def shapes_of(model: ModelShard, names: Iterable[str]) -> list[tuple[str, Shape]]:
    """FQNs and shapes of parameters; of one with stacked experts, those of its slices."""
    found: list[tuple[str, Shape]] = []
    for name in names:
        shape, experts = model.weights[name].shape, model.stacked.get(name)
        parts = slices(name, shape, experts[0]) if experts else ()
        found += [(part.name, part.shape) for part in parts] or [(name, shape)]
    return found


def _use_last_step(builder: MetadataBuilder, members: Sequence[str]) -> None:
    """FusedAdam counts a whole group's steps in the state of its last tensor alone (fused_adam.py)."""
    stateful = [name for name in members if builder.parameters[name].scalars]
    counts = builder.parameters[stateful[-1]].scalars if stateful else ()
    for name in stateful:
        saved = builder.parameters[name]
        builder.parameters[name] = replace(saved, scalars=counts, own_step=dict(saved.scalars).get("step"))


def _flattened(shape: Shape, parameter: Shape) -> Shape:
    """The shape of a state beside a flattened parameter."""
    if shape == parameter:
        return (math.prod(parameter),)
    if len(parameter) > 0 and shape[1:] == parameter:
        return (shape[0], math.prod(parameter))
    # another tensor, even if its last dimension happens to be as long as the parameter
    return (*shape, 1) if shape else shape


def _is_fused_adam(group: Mapping[str, object]) -> bool:
    """DeepSpeed's FusedAdam, by its hyperparameters, since the checkpoint does not name the class.

    It alone keeps a ``step`` of 0 in each group beside those of its tensors; DeepSpeed's Lamb uses each tensor's step.
    """
    return "bias_correction" in group and not {"amsgrad", "max_coeff"} & group.keys() and group.get("step") == 0


def member_names(
    model: ModelShard,
    state: UnpartitionedState,
    options: MetadataOptions,
    name_states: NameStates,
    experts: ExpertRank | None = None,
) -> NamedStates | None:
    """Names of every saved group's members, and notes; ``None`` if they are numbered, and nobody needs them.

    They are the optimizer's own, if they are the module's and shapes agree, or those that ``name_states`` tells.
    """
    weights = {name: ref.shape for name, ref in model.weights.items()}
    shapes = [_saved_shapes(state, group) for group in range(len(state.members))]
    if state.names is not None:  # those of parameters without a state may be missing
        named = [[name if name in weights else None for name in members] for members in state.names]
        fits = (
            [shape in (None, weights.get(name or "")) for shape, name in zip(*each, strict=False)]
            for each in zip(shapes, named, strict=True)
        )
        if list(map(len, shapes)) == list(map(len, named)) and all(chain.from_iterable(fits)):
            return named, ()
    compared = state.kind != PLAIN and options.check_shards
    is_flat = state.kind == FUSED
    return name_states(
        NumberedStates(
            model.path, state.groups, shapes, is_flat, weights, model.shared, model.buffers, compared, experts
        )
    )


def _saved_shapes(state: UnpartitionedState, group: int) -> list[Shape | None]:
    """Shapes of a saved group's members; ``None``: unknown for lack of a state (fp32, never a gradient)."""
    if state.kind != PLAIN:
        return [master.shape for master in state.masters[group]]
    states = (state.states.get(number) for number in state.members[group])
    return [None if found is None else saved_shape(found) for found in states]

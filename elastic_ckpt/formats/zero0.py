"""Metadata of checkpoints without ZeRO partitions.

The optimizer numbers its parameters: :mod:`elastic_ckpt.formats.zero0_names` finds their names. Where there are masters
beside the weights, their values are compared too (:mod:`elastic_ckpt.formats.same_save`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elastic_ckpt.core.flat_ranges import FlatRange, Placement, group_offsets
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.core.state_kinds import ELEMENTWISE, WHOLE
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.base import Found, MetadataOptions
from elastic_ckpt.formats.classify import ELEMENTWISE_NAMES, RankStates
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Shape, module_tensors, refuse_view
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.zero0_index import FUSED, PLAIN, UnpartitionedState
from elastic_ckpt.formats.zero0_names import member_names


def unpartitioned_metadata(found: Found, model: ModelShard, options: MetadataOptions) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer state is whole; without a live engine, of its weights if need be.

    Raises :class:`MismatchError` if names are unknown and there are live groups, or states are asked for.
    """
    state = model.optimizer
    assert state is not None
    try:
        names, notes = member_names(model, state, options)
    except MismatchError:
        if options.with_states or options.live_groups:
            raise
        return weights_alone(found, model)
    states = ((model.path, states) for states in state.states.values())
    builder = MetadataBuilder(found, [model], options.states, states)
    for group, members in enumerate(names):
        for trained, flat in _flats(model, state, group, members):
            _add_flat(builder, model, state, group, trained, flat)
        if state.kind == PLAIN and _is_fused_adam(state.groups[group]):
            _use_last_step(builder, [name for name in members if name is not None])
    builder.tensors |= module_tensors([model], 0, builder.parameters)[0]
    builder.notes += notes
    return builder.build(model, 0, state.groups, frozen_recorded=model.frozen_recorded)


def weights_alone(found: Found, model: ModelShard) -> CheckpointMetadata:
    """The metadata of the module's weights; those of a pipeline are in the files of its layers."""
    builder = MetadataBuilder(found, [model])
    builder.tensors, _ = module_tensors([model], 0, ())
    return builder.build(model, 0, (), frozen_recorded=False)


def _flats(
    model: ModelShard, state: UnpartitionedState, group: int, members: Sequence[str | None]
) -> Iterator[tuple[list[str], FlatShard]]:
    """A param group as flat partitions of one rank, and their parameters: one for each, or (fused) one for all."""
    if state.kind == FUSED:
        named = [([name for name in members if name is not None], state.members[group][0], state.masters[group][0])]
    else:
        masters = state.masters[group] if state.masters else [None if n is None else model.weights[n] for n in members]
        each = zip(members, state.members[group], masters, strict=True)
        named = [([name], number, master) for name, number, master in each if name is not None and master is not None]
    for names, number, master in named:
        if names:
            yield names, FlatShard(master, master.numel, state.states.get(number, StatesOfOne({})))


def _add_flat(
    builder: MetadataBuilder,
    model: ModelShard,
    state: UnpartitionedState,
    group: int,
    names: Sequence[str],
    flat: FlatShard,
) -> None:
    shapes = [(name, model.weights[name].shape) for name in names]
    saved_shape = flat.master.shape if state.kind == FUSED else shapes[0][1]
    states = _without_points(flat.states) if saved_shape == () else flat.states
    flat = replace(flat, states=states)
    flattened = {key: replace(ref, shape=_flattened(ref.shape, saved_shape)) for key, ref in states.tensors.items()}
    saved = RankStates(model.path, flat.partition_numel, -1, flattened, states.digests)
    kinds = builder.classify([saved], [states], names[-1], any_shape=state.kind != FUSED)
    for key, ref in {MASTER: flat.master, **states.tensors}.items():
        if key == MASTER or (key in kinds and kinds[key].kind in (ELEMENTWISE, WHOLE)):
            refuse_view(names[0], f"{key} of this parameter", ref, model.path)
    numels = [math.prod(shape) for _, shape in shapes]
    placed = [
        Placement(index, FlatRange(0, numel), offset)
        for index, (numel, offset) in enumerate(zip(numels, group_offsets(numels), strict=True))
    ]
    builder.add_flat(shapes, group, state.groups[group], [(0, flat, placed)], kinds)


def _without_points(states: StatesOfOne) -> StatesOfOne:
    """The states of a parameter without dimensions, whose elementwise states have none either and are no scalars."""
    points = {key: ref for key, ref in states.points.items() if key in ELEMENTWISE_NAMES}
    scalars = tuple((key, value) for key, value in states.scalars if key not in points)
    return replace(states, tensors={**points, **states.tensors}, scalars=scalars)


def _use_last_step(builder: MetadataBuilder, members: Sequence[str]) -> None:
    """FusedAdam counts the steps of a whole group in the state of its last tensor alone (fused_adam.py)."""
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
    return (*shape, 1) if len(shape) > 1 else shape


def _is_fused_adam(group: Mapping[str, object]) -> bool:
    """DeepSpeed's FusedAdam, by its hyperparameters, since the checkpoint does not name the class.

    It alone keeps a ``step`` of 0 in each group beside those of its tensors; DeepSpeed's Lamb uses each tensor's step.
    """
    return "bias_correction" in group and not {"amsgrad", "max_coeff"} & group.keys() and group.get("step") == 0

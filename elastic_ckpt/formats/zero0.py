"""Metadata of checkpoints without ZeRO partitions, whose optimizer numbers its parameters.

Their names come from the optimizer itself (named parameters), the live param groups, or the order of the model, in this
order; shapes must agree. Where parameters were frozen, unfrozen, added or removed since the save, so that a live group
has more or fewer than the saved one, shapes must leave exactly one way to match them. Where there are masters beside
the weights, their values are compared too (:mod:`elastic_ckpt.formats.same_save`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from elastic_ckpt.core.chunks import group_rules
from elastic_ckpt.core.experts import slices
from elastic_ckpt.core.flat_ranges import group_offsets
from elastic_ckpt.core.fqn import rename
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.core.state_kinds import ELEMENTWISE, PER_PARAMETER
from elastic_ckpt.errors import MismatchError, listed
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.experts import cannot_slice
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Shape, module_tensors, refuse_view
from elastic_ckpt.formats.model_states import FUSED, PLAIN, ModelShard, UnpartitionedState, saved_shape
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES, RankStates, StatesOfOne
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

Names = Sequence[Sequence[str]]
#: Per group and number in it; ``None``: a parameter that no longer trains, whose state is not needed.
Members = Sequence[Sequence[str | None]]


def unpartitioned_metadata(found: CheckpointInfo, model: ModelShard, options: MetadataOptions) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer state is whole; :class:`MismatchError` if names are unknown."""
    state = model.optimizer
    assert state is not None
    names, notes = member_names(model, state, options)
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
    model: ModelShard, state: UnpartitionedState, options: MetadataOptions
) -> tuple[Members, tuple[str, ...]]:
    """Saved names of every saved group's members, and notes where they were inferred.

    Live names are as renamed by the user. Raises :class:`MismatchError` if which parameter is which is unknown.
    """
    shapes = {name: ref.shape for name, ref in model.weights.items()}
    if state.names is not None:
        fitted = _fit_named(state, shapes)
        if fitted is not None:
            return fitted, ()
    origins = {rename(name, options.rename): model.shared.get(name, name) for name in shapes}
    live = [[origins[name] for name in group if name in origins] for group in options.live_groups]
    unnumbered = {*model.buffers, *model.shared}
    in_order = [name for name in shapes if name not in unnumbered]
    candidates: dict[str, Members] = {}
    of_model = [in_order] if options.live_groups or len(state.members) == 1 else _dealt(state, in_order, shapes)
    for origin, names in (("the live param groups", _in_saved_order(state, live, options)), ("the model", of_model)):
        fitted = None if names is None else _fit(state, names, shapes)
        if fitted is not None and names is not None and not _loses(state, fitted, names, shapes):
            candidates[origin] = fitted
    proven = state.kind != PLAIN and options.check_shards
    distinct = {tuple(map(tuple, names)) for names in candidates.values()}
    if not candidates or (len(distinct) > 1 and not proven):
        raise _unnamed(model, state, options, list(candidates))
    origin, chosen = next(iter(candidates.items()))
    return chosen, _notes(state, model, chosen, origin, proven)


def _dealt(state: UnpartitionedState, names: Sequence[str], shapes: Mapping[str, Shape]) -> Names | None:
    """Names in the order of the model, dealt out to several saved groups; ``None`` unless shapes leave a single way.

    As of the Trainer, whose second group has biases and norms. What did not train is passed over if no member is of its
    shape.
    """
    if state.kind == FUSED:
        return None
    left = [deque(_saved_shapes(state, group)) for group in range(len(state.members))]
    saved = Counter(chain.from_iterable(left))
    named = Counter(shapes[name] for name in names if shapes[name] in saved)
    if saved.total() != len(names) and saved != named:
        return None
    dealt: list[list[str]] = [[] for _ in left]
    for name in names:
        fitting = [group for group, rest in enumerate(left) if rest and rest[0] in (None, shapes[name])]
        if len(fitting) > 1 or (not fitting and shapes[name] in saved):
            return None
        for group in fitting:
            left[group].popleft()
            dealt[group].append(name)
    return None if any(left) else dealt


def _in_saved_order(state: UnpartitionedState, live: Names, options: MetadataOptions) -> Names | None:
    """The live groups in saved order, by ``name`` if all have one; ``None``: in another order, without names."""
    saved_labels = [group.get("name") for group in state.groups]
    live_labels = [group.get("name") for group in options.live_hyperparameters]
    if None not in saved_labels and set(saved_labels) == set(live_labels) and len(set(live_labels)) == len(live):
        return [live[live_labels.index(label)] for label in saved_labels]
    return None if _are_in_another_order(state, options) else live


def _are_in_another_order(state: UnpartitionedState, options: MetadataOptions) -> bool:
    constant = ("initial_lr", "weight_decay", "eps", "betas")  # while a group trains
    saved, now = (
        [repr([group.get(key) for key in constant]) for group in groups]
        for groups in (state.groups, options.live_hyperparameters)
    )
    return saved != now and sorted(saved) == sorted(now)


def _notes(state: UnpartitionedState, model: ModelShard, chosen: Members, origin: str, proven: bool) -> tuple[str, ...]:
    proof = "shapes and values agree" if proven else "shapes agree"
    notes = [f"without ZeRO, DeepSpeed saves optimizer states without names: taken in the order of {origin}; {proof}"]
    placed = {name for group in chosen for name in group if name is not None}
    others = model.weights.keys() - placed - {*model.buffers, *model.shared}
    of_equal_shape = {model.weights[name].shape for name in placed} & {model.weights[name].shape for name in others}
    if of_equal_shape and not proven:
        notes.append("some parameters that do not train have the shape of some that do: they must be the same as then")
    dropped = sum(name is None for group in chosen for name in group)
    if dropped:
        notes.append(f"optimizer states of {dropped} saved parameters are skipped: they do not train in the live run")
    return tuple(notes)


def _fit(state: UnpartitionedState, names: Names, shapes: Mapping[str, Shape]) -> Members | None:
    """``names`` as the members of the saved groups, or ``None`` if they do not fit."""
    if len(names) != len(state.members):
        return None
    if state.kind == FUSED:
        fits = (
            math.prod(masters[0].shape) == sum(math.prod(shapes[name]) for name in group)
            for masters, group in zip(state.masters, names, strict=True)
        )
        return names if all(fits) else None
    fitted = [align(_saved_shapes(state, group), members, shapes) for group, members in enumerate(names)]
    return None if any(members is None for members in fitted) else [members or [] for members in fitted]


def _fit_named(state: UnpartitionedState, shapes: Mapping[str, Shape]) -> Members | None:
    """The optimizer's own names if they are the module's; those of parameters without a state may be missing."""
    assert state.names is not None
    fitted = [[name if name in shapes else None for name in members] for members in state.names]
    for group, known in enumerate(fitted):
        saved = _saved_shapes(state, group)
        fits = (shape in (None, shapes.get(name or "")) for shape, name in zip(saved, known, strict=False))
        if len(saved) != len(known) or not all(fits):
            return None
    return fitted


def _loses(state: UnpartitionedState, fitted: Members, names: Names, shapes: Mapping[str, Shape]) -> bool:
    """Whether a skipped saved state may belong to a live parameter that is left without one."""
    if state.kind == FUSED:
        return False
    placed = {name for group in fitted for name in group}
    without = {shapes[name] for group in names for name in group if name not in placed}
    return any(
        name is None and shape is not None and shape in without
        for group, members in enumerate(fitted)
        for shape, name in zip(_saved_shapes(state, group), members, strict=True)
    )


def _saved_shapes(state: UnpartitionedState, group: int) -> list[Shape | None]:
    """Shapes of a saved group's members; ``None``: unknown for lack of a state (fp32, never a gradient)."""
    if state.kind != PLAIN:
        return [master.shape for master in state.masters[group]]
    states = (state.states.get(number) for number in state.members[group])
    return [None if found is None else saved_shape(found) for found in states]


def align(saved: Sequence[Shape | None], names: Sequence[str], shapes: Mapping[str, Shape]) -> list[str | None] | None:
    """Match names to saved tensors by shape, both in their own order; a saved shape of ``None`` fits any.

    In lists of one length each must fit its counterpart; else the shorter must fit the longer in exactly one way.
    Returns the name of each saved tensor, ``None`` for those without; ``None`` if there is no or no single way.
    """
    named: list[Shape | None] = [shapes[name] for name in names]
    short, long = sorted((list(saved), named), key=len)
    first, last = _earliest(short, long), _earliest(short[::-1], long[::-1])  # from behind
    if first is None or last is None or first != [len(long) - 1 - at for at in reversed(last)]:
        return None
    if len(saved) <= len(names):
        return [names[at] for at in first]
    name_of = dict(zip(first, names, strict=True))
    return [name_of.get(at) for at in range(len(long))]


def _earliest(short: Sequence[Shape | None], long: Sequence[Shape | None]) -> list[int] | None:
    """The earliest positions in the longer list that the members of the shorter one can take, in their order."""
    positions = iter(enumerate(long))
    chosen = [next((at for at, shape in positions if None in (shape, one) or shape == one), -1) for one in short]
    return None if -1 in chosen else chosen


def _unnamed(
    model: ModelShard, state: UnpartitionedState, options: MetadataOptions, fitting: Sequence[str]
) -> MismatchError:
    sizes = [len(members) for members in (state.masters if state.kind != PLAIN else state.members)]
    if not options.live_groups:
        return MismatchError(
            "without ZeRO, DeepSpeed saves optimizer states without names, and only a load, which knows the live param "
            "groups, can tell which parameter is which",
            model.path,
            "one param group in the order of the model, or several of which shapes tell the members",
            f"{sizes} tensors in the saved groups",
            remedy="leave the optimizer states out; torch.optim with model.named_parameters() saves names",
        )
    found = f"{sizes} tensors in the saved groups, {[len(group) for group in options.live_groups]} in the live ones"
    if fitting:
        found = f"the orders of {' and of '.join(fitting)} both fit, and differ"
    elif _are_in_another_order(state, options):
        found = "live param groups with the saved hyperparameters, in another order, and no name in each group"
    return MismatchError(
        "without ZeRO, DeepSpeed saves optimizer states without names, and which parameter is which is not known",
        model.path,
        "live param groups with the parameters of the saved ones, in their order",
        found,
        parameter=listed(name for group in options.live_groups for name in group),
        remedy="build the param groups as when the checkpoint was saved, frozen parameters included, or load with "
        "load_optimizer_states=False",
    )

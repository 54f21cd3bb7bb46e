"""Which saved optimizer state belongs to which live one, flat partition by flat partition. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic_ckpt.core.local_state import FlatPartition, LocalState
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata, ReplicatedState
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.state_kinds import ELEMENTWISE, NON_SHARD_KEYS, REPLICATED, SCRATCH, WHOLE, LiveState
from elastic_ckpt.errors import DamagedError, MismatchError, listed
from elastic_ckpt.planning.matching import Matching
from elastic_ckpt.planning.optimizer_kinds import (
    UPDATE_NORM,
    refuse_lost_choices,
    refuse_other_kind,
    renamed_states,
    saved_optimizer,
)
from elastic_ckpt.planning.saved_state_checks import keys_by_name, refuse_opaque, refuse_partial

_ROLE = "optimizer states"
_FUSED_ADAM = "deepspeed.ops.adam.fused_adam.FusedAdam"
Scalars = Mapping[str, float]


@dataclass(frozen=True)
class StateLink:
    """One live state, and the saved one that it takes.

    Attributes:
        live: the live state.
        source: metadata key of the saved one; empty: it starts fresh.
        replicated: the saved one, where it is replicated.
    """

    live: LiveState
    source: str
    replicated: ReplicatedState | None = None


@dataclass(frozen=True)
class StateMatching:
    """What is known of optimizer states.

    Attributes:
        links: flat partition -> the states to restore; none where the checkpoint holds no state for its parameters.
        scalars: per flat partition, its scalar states; ``None`` where the checkpoint holds none. Empty: not asked for.
        stateful: parameters whose states are restored.
        restored: live state key -> the parameters that get it.
        outcomes: states that start fresh, and states without a place.
        converted: whether the states are those of another optimizer of the same family.
        notes: sentences for the report.
    """

    links: Mapping[int, tuple[StateLink, ...]] = field(default_factory=lambda: MappingProxyType({}))
    scalars: tuple[Scalars | None, ...] = ()
    stateful: frozenset[str] = frozenset()
    restored: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    outcomes: tuple[Outcome, ...] = ()
    converted: bool = False
    notes: tuple[str, ...] = ()


NOTHING_MATCHED = StateMatching()


def match_states(
    metadata: CheckpointMetadata, local_state: LocalState, matching: Matching, convert: bool = False
) -> StateMatching:
    """Find out which states to restore, and the scalar states (``step``) of every flat partition.

    Args:
        metadata: what the checkpoint holds.
        local_state: what the live engine holds.
        matching: parameters on both sides.
        convert: whether the states of another optimizer of the same family will do.

    Raises:
        UnsupportedError: the checkpoint holds a state of unknown layout.
        MismatchError: the optimizers keep different states, or one flat tensor would need two step counts.
        DamagedError: states that belong together are only partly there.
    """
    refuse_opaque(metadata)
    keys = keys_by_name(metadata)
    if not keys:
        reason = "the checkpoint holds no optimizer state (saved before the first step)"
        return StateMatching(scalars=(None,) * len(local_state.flats), outcomes=(Outcome(_ROLE, "fresh", (), reason),))
    refuse_partial(metadata, keys)
    stateful = frozenset(keys) & matching.restored
    links: dict[int, tuple[StateLink, ...]] = {}
    scalars: list[Scalars | None] = []
    restored: dict[str, set[str]] = {}
    converted = False
    for flat in local_state.flats:
        members = [name for name in flat.members if name in stateful]
        values = _flat_scalars(metadata, members)
        scalars.append(values)
        if values is None:
            continue
        # a member that lacks one of them is damage, which is found where its tensor is looked for
        saved = frozenset().union(*(keys[name] for name in members))
        renamed = _link(metadata, local_state, flat, members, saved, convert)
        converted = converted or renamed.converted
        links[flat.index] = renamed.links
        refuse_lost_choices(metadata, local_state, flat, members)
        _refuse_other_scalars(metadata, local_state, flat, values)
        for link in renamed.links:
            if link.live.layout != SCRATCH and link.source:
                restored.setdefault(link.live.key, set()).update(members)
    outcomes = _state_outcomes(metadata, local_state, matching, frozenset(keys), scalars)
    return StateMatching(
        links=links,
        scalars=tuple(_with_own_steps(metadata, local_state, scalars)),
        stateful=stateful,
        restored={key: tuple(sorted(names)) for key, names in sorted(restored.items())},
        outcomes=outcomes + _left_by_the_user(metadata) + _unused_replicated(metadata, links),
        converted=converted,
        notes=_notes(metadata, local_state, links, converted),
    )


@dataclass(frozen=True)
class _Linked:
    links: tuple[StateLink, ...]
    converted: bool = False


def _link(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    flat: FlatPartition,
    members: Sequence[str],
    saved: frozenset[str],
    convert: bool,
) -> _Linked:
    """The links of one flat partition."""
    if flat.states is None:
        refuse_other_kind(metadata, local_state, flat, members)
        _refuse_unknown_start(metadata, local_state, flat, members)
        return _Linked(_adopted(metadata, local_state, flat, members, saved))
    wanted = [live for live in flat.states if live.layout not in (REPLICATED, SCRATCH)]
    others = [live for live in flat.states if live.layout in (REPLICATED, SCRATCH)]
    # of an optimizer that is known, only what bitsandbytes keeps beside its states may have no place
    beside = {state.key for name in members for state in metadata.parameters[name].replicated}
    strange = beside - {live.key for live in others} - set(NON_SHARD_KEYS)
    if strange:
        raise _other_states(metadata, local_state, flat, members, saved | strange)
    names = {live.key: live.key for live in wanted if live.key not in metadata.states.fresh}
    converted = False
    if set(names) != saved:
        renamed = renamed_states(metadata, local_state, members[0], saved, frozenset(names))
        if renamed is None:
            raise _other_states(metadata, local_state, flat, members, saved)
        if not convert:
            raise _not_asked_to_convert(metadata, local_state, members)
        names, converted = dict(renamed), True
    else:
        refuse_other_kind(metadata, local_state, flat, members)
    links = [StateLink(live, names.get(live.key, "")) for live in wanted]
    for live in others:
        shared = _replicated(metadata, members, live.key) if live.layout == REPLICATED else None
        links.append(StateLink(live, live.key, shared))
    return _Linked(tuple(links), converted)


def _refuse_unknown_start(
    metadata: CheckpointMetadata, local_state: LocalState, flat: FlatPartition, members: Sequence[str]
) -> None:
    """What an unknown optimizer's states start with is not known: zeros could undo the weights."""
    fresh = sorted(set(flat.members) - set(members))
    if fresh or metadata.states.fresh:
        raise MismatchError(
            f"{local_state.optimizer} is not known, nor what its states start with where the checkpoint has none",
            parameter=listed(fresh or members),
            file=metadata.source.folder,
            expected="a saved state for every parameter of a flat tensor",
            found="none" if fresh else f'"state_schema": {listed(metadata.states.fresh)} fresh',
            remedy="put such parameters into param groups of their own, or load with load_optimizer_states=False",
        )


def _adopted(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    flat: FlatPartition,
    members: Sequence[str],
    saved: Iterable[str],
) -> tuple[StateLink, ...]:
    """States of an optimizer that is not known: as the checkpoint has them."""
    links = []
    for key in sorted(saved):
        name = next(name for name in members if (name, key) in metadata.tensors)
        tensor, shape = metadata.tensors[name, key], metadata.parameters[name].shape
        if any(chunk.code is not None for chunk in tensor.chunks) or (
            tensor.is_whole and (local_state.zero_stage > 0 or len(flat.members) > 1)
        ):
            raise _other_states(metadata, local_state, flat, members, saved)
        rows = 1 if tensor.is_whole or tensor.shape == shape else tensor.shape[0]
        layout = WHOLE if tensor.is_whole else ELEMENTWISE
        links.append(StateLink(LiveState(key, tensor.dtype, layout, rows, None, tensor.shape), key))
    for state in metadata.parameters[members[0]].replicated:
        live = LiveState(state.key, state.dtype, REPLICATED, shape=state.shape)
        links.append(StateLink(live, state.key, _replicated(metadata, members, state.key)))
    return tuple(links)


def _replicated(metadata: CheckpointMetadata, members: Sequence[str], key: str) -> ReplicatedState:
    """The saved copy of a replicated state, which must be the same for all members."""
    found = [state for name in members for state in metadata.parameters[name].replicated if state.key == key]
    same = len({(state.crc32, state.shape, state.dtype) for state in found}) == 1
    if len(found) != len(members) or not same or any(state.differs for state in found):
        raise MismatchError(
            f"optimizer state {key!r} should be one for all partitions, but ranks or partitions saved different values",
            parameter=listed(members),
            file=metadata.source.folder,
            expected="the same bytes everywhere",
            found=f"{len({state.crc32 for state in found})} different values, or differences between ranks",
            remedy=(
                f'it may be no replicated state: "elastic_checkpoint": {{"state_schema": {{"{key}": "elementwise" (or '
                '"fresh")}}, or load at the topology it was saved with'
            ),
        )
    return found[0]


def _other_states(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    flat: FlatPartition,
    members: Sequence[str],
    saved: Iterable[str],
) -> MismatchError:
    live = [state.key for state in flat.states or () if state.layout != SCRATCH]
    scalars = {key for name in members for key, _ in metadata.parameters[name].scalars}
    return MismatchError(
        "the checkpoint was saved by an optimizer that keeps other states",
        parameter=listed(members),
        file=metadata.source.folder,
        expected=f"{listed({*live, *(flat.scalars or ())})} (live optimizer {local_state.optimizer})",
        found=f"{listed({*saved, *scalars})} ({saved_optimizer(metadata)})",
        remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
    )


def _not_asked_to_convert(
    metadata: CheckpointMetadata, local_state: LocalState, members: Sequence[str]
) -> MismatchError:
    return MismatchError(
        "the checkpoint was saved by another optimizer, whose states can be converted",
        parameter=listed(members),
        file=metadata.source.folder,
        expected=f"states of the live optimizer {local_state.optimizer}",
        found=f"states of {saved_optimizer(metadata)}",
        remedy='"elastic_checkpoint": {"convert_optimizer": true}, or load_optimizer_states=False',
    )


def _flat_scalars(metadata: CheckpointMetadata, members: Sequence[str]) -> Scalars | None:
    """Scalar states of one flat tensor; ``None`` where the checkpoint holds no state of its members at all."""
    values = {name: metadata.parameters[name].scalars for name in members}
    distinct = sorted(set(values.values()), key=repr)
    if len(distinct) > 1:
        examples = [next(name for name in values if values[name] == value) for value in distinct[:2]]
        raise MismatchError(
            "parameters that now share one flat tensor were saved with different scalar states",
            parameter=", ".join(examples),
            expected="one value for all, since the optimizer keeps one per flat tensor",
            found=" and ".join(str(dict(value)) for value in distinct[:2]),
            remedy="put them in param groups of their own, or load with load_optimizer_states=False",
        )
    return dict(distinct[0]) if distinct else None


def _with_own_steps(
    metadata: CheckpointMetadata, local_state: LocalState, scalars: Sequence[Scalars | None]
) -> Iterator[Scalars | None]:
    """FusedAdam without ZeRO gets back the count beside each tensor, of which it uses the last one of a group alone."""
    last = {flat.group: flat.index for flat, values in zip(local_state.flats, scalars, strict=True) if values}
    for flat, values in zip(local_state.flats, scalars, strict=True):
        own = metadata.parameters[flat.members[0]].own_step if values and len(flat.members) == 1 else None
        keeps = own is not None and local_state.optimizer == _FUSED_ADAM and flat.index != last[flat.group]
        yield {**values, "step": own} if values and keeps and own is not None else values


def _refuse_other_scalars(
    metadata: CheckpointMetadata, local_state: LocalState, flat: FlatPartition, values: Mapping[str, float]
) -> None:
    if flat.scalars is None or set(values) == set(flat.scalars):
        return
    saved = {key for saved in metadata.parameters.values() for key, _ in saved.scalars}
    if saved != set(flat.scalars):
        members = [name for name in flat.members if name in metadata.parameters]
        raise _other_states(metadata, local_state, flat, members, [live.key for live in flat.states or ()])
    raise DamagedError(
        "the checkpoint holds states of these parameters, but not all of their scalar states",
        parameter=listed(flat.members),
        file=metadata.source.folder,
        expected=f"{listed(flat.scalars)} beside {listed(live.key for live in flat.states or ())}",
        found=listed(values),
        remedy="restore the missing files, or load with load_optimizer_states=False",
    )


def _state_outcomes(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    matching: Matching,
    stateful: frozenset[str],
    scalars: Sequence[Scalars | None],
) -> tuple[Outcome, ...]:
    """States that start fresh, by reason, and those of parameters that do not train any more."""
    fresh: dict[str, set[str]] = {}
    for flat, values in zip(local_state.flats, scalars, strict=True):
        shared = "" if not values else f"; zeros, at its flat tensor's {_shown(values)}"
        for name in set(flat.members) - stateful:
            if name in metadata.parameters:
                why = "the checkpoint holds no state of it (it got no gradient before the save)"
            else:
                why = "it was frozen at save time" if name in matching.restored else "not in the checkpoint"
            fresh.setdefault(why + shared, set()).add(name)
    frozen_now = {name for name, key in matching.wholes if key == FROZEN}
    outcomes = [Outcome(_ROLE, "fresh", tuple(sorted(names)), reason) for reason, names in sorted(fresh.items())]
    dropped = stateful & frozen_now
    if dropped:
        reason = "frozen now: only the weights are restored"
        outcomes.append(Outcome(_ROLE, "skipped", tuple(sorted(dropped)), reason))
    return tuple(outcomes)


def _left_by_the_user(metadata: CheckpointMetadata) -> tuple[Outcome, ...]:
    reason = '"state_schema" says so'
    return tuple(Outcome(key, "fresh", (), reason) for key in sorted(metadata.states.fresh))


def _unused_replicated(metadata: CheckpointMetadata, links: Mapping[int, Sequence[StateLink]]) -> tuple[Outcome, ...]:
    """Saved states of whole partitions that the live optimizer does not take."""
    saved = {state.key for saved in metadata.parameters.values() for state in saved.replicated}
    layouts = {link.live.key: link.live.layout for found in links.values() for link in found}
    outcomes = []
    for key in sorted(saved):
        if layouts.get(key) == SCRATCH:
            outcomes.append(Outcome(key, "fresh", (), "each step writes it before it reads it"))
        elif key not in layouts:
            outcomes.append(Outcome(key, "ignored", (), "the live optimizer keeps no such state"))
    return tuple(outcomes)


def _notes(
    metadata: CheckpointMetadata, local_state: LocalState, links: Mapping[int, Sequence[StateLink]], converted: bool
) -> tuple[str, ...]:
    notes = []
    if converted:
        notes.append(f"optimizer states converted from {saved_optimizer(metadata)} to {local_state.optimizer}")
    if any(flat.states is None for flat in local_state.flats if flat.index in links):
        kinds = {link.live.key: link.live.layout for found in links.values() for link in found}
        shown = ", ".join(f"{key} ({layout})" for key, layout in sorted(kinds.items()))
        notes.append(f"{local_state.optimizer} is not known: its states were taken as the checkpoint has them: {shown}")
    moved = (metadata.source.zero_stage, metadata.source.dp) != (local_state.zero_stage, local_state.dp)
    norms = any(link.live.key in (UPDATE_NORM, "variance") for found in links.values() for link in found)
    if norms and moved:
        notes.append(
            f"{local_state.optimizer} scales updates by the norm of each flat partition, and these are others now: "
            "states are restored, and the run goes on a little differently than it would have"
        )
    return tuple(notes)


def _shown(values: Scalars) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in values.items())

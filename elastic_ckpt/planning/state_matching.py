"""Matches the optimizer states of a checkpoint with those that the live optimizer keeps, or will keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from elastic_ckpt.core.local_state import FlatPartition, LocalState
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata, ReplicatedState
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.state_kinds import (
    ELEMENTWISE,
    NON_SHARD_KEYS,
    PER_PARAMETER,
    REPLICATED,
    SCRATCH,
    LiveState,
)
from elastic_ckpt.core.values import numbers
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    ITS_OPTIMIZER,
    MADE_ANEW,
    WITHOUT_STATES,
    DamagedError,
    MismatchError,
    Remedy,
    UnsupportedError,
    listed,
)
from elastic_ckpt.planning.matching import Matching
from elastic_ckpt.planning.param_groups import UPDATE_NORM, refuse_other_kind, renamed_states, saved_optimizer
from elastic_ckpt.planning.state_errors import RESTORE, refuse_unreadable_states
from elastic_ckpt.planning.ties import untied_parameters

_ROLE = "optimizer states"
_FUSED_ADAM = "deepspeed.ops.adam.fused_adam.FusedAdam"
_OWN_GROUPS = Remedy("put them in param groups of their own"), WITHOUT_STATES
Scalars = Mapping[str, Any]


@dataclass(frozen=True)
class StateLink:
    """A live state and its saved source: a metadata key (empty: it starts fresh), or a replicated state."""

    live: LiveState
    source: str
    replicated: ReplicatedState | None = None


@dataclass(frozen=True)
class StateMatching:
    """The states to restore."""

    #: Flat partition -> its states; none if the checkpoint has no state of its parameters.
    links: Mapping[int, tuple[StateLink, ...]] = field(default_factory=dict)
    #: Per flat partition, its scalar states; ``None`` if the checkpoint has none. Empty if not requested.
    scalars: tuple[Scalars | None, ...] = ()
    stateful: frozenset[str] = frozenset()  # parameters whose states are restored
    restored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # live state key -> who gets it
    outcomes: tuple[Outcome, ...] = ()
    converted: bool = False  # another optimizer of the same family saved the states
    notes: tuple[str, ...] = ()


def match_states(
    metadata: CheckpointMetadata, local_state: LocalState, matching: Matching, convert: bool = False
) -> StateMatching:
    """Determine which states to restore, and the scalar states (``step``) of every flat partition.

    ``convert``: whether states of another optimizer of the same family are accepted. Raises
    :class:`UnsupportedError` for a state of unknown layout, :class:`MismatchError` if the optimizers keep different
    states or one flat tensor would need two step counts, :class:`DamagedError` if states are incomplete.
    """
    refuse_unreadable_states(metadata)
    if not (keys := metadata.keys_by_name):
        reason = "the checkpoint holds no optimizer state"
        if not metadata.source.foreign:  # which may be of weights alone
            reason += " (saved before the first step, or of an optimizer that keeps none)"
        return StateMatching(scalars=(None,) * len(local_state.flats), outcomes=(Outcome(_ROLE, "fresh", (), reason),))
    return _Matcher(metadata, local_state, matching, keys, convert).matching()


@dataclass
class _Matcher:
    metadata: CheckpointMetadata
    local_state: LocalState
    parameters: Matching
    keys: Mapping[str, frozenset[str]]
    convert: bool
    converted: bool = False
    links: dict[int, tuple[StateLink, ...]] = field(default_factory=dict)
    scalars: list[Scalars | None] = field(default_factory=list)

    def matching(self) -> StateMatching:
        is_known = any(flat.states is not None for flat in self.local_state.flats)
        parameters = self.metadata.parameters
        stateful = frozenset(
            name  # what a known optimizer left out, as SGD without momentum, is no state
            for name in self.parameters.restored & self.keys.keys()
            if self.keys[name] or not is_known or any(value is not None for _, value in parameters[name].scalars)
        )
        restored: dict[str, set[str]] = {}
        for flat in self.local_state.flats:
            members = [name for name in flat.members if name in stateful]
            values = self._flat_scalars(members)
            self.scalars.append(values)
            if values is None:
                continue
            self.links[flat.index] = links = self._link(flat, members)
            self._refuse_other_scalars(flat, values)
            for link in links:
                if link.live.layout != SCRATCH and link.source:
                    restored.setdefault(link.live.key, set()).update(members)
        by_key = {key: tuple(sorted(names)) for key, names in sorted(restored.items())}
        layouts = {link.live.key: link.live.layout for links in self.links.values() for link in links}
        outcomes = tuple(self._outcomes(layouts))
        notes = tuple(self._notes(layouts))
        if self.local_state.optimizer == _FUSED_ADAM:
            # without ZeRO it reads the count beside each tensor, and uses only the last one of a group
            flats = list(zip(self.local_state.flats, self.scalars, strict=True))
            last = {flat.group: flat.index for flat, values in flats if values}
            for at, (flat, values) in enumerate(flats):
                if values and len(flat.members) == 1 and flat.index != last[flat.group]:
                    own = parameters[flat.members[0]].own_step
                    self.scalars[at] = values if own is None else {**values, "step": own}
        return StateMatching(self.links, tuple(self.scalars), stateful, by_key, outcomes, self.converted, notes)

    def _flat_scalars(self, members: Sequence[str]) -> Scalars | None:
        """Scalar states of one flat tensor; ``None`` if the checkpoint has no state of its members."""
        values = {name: self.metadata.parameters[name].scalars for name in members}
        each = {id(value): value for value in values.values()}  # those of one flat tensor share theirs
        by_text = {repr(value): value for value in each.values()}  # NaN is no number's equal
        if len(by_text) > 1:
            examples = [next(name for name in values if repr(values[name]) == text) for text in sorted(by_text)[:2]]
            problem = "parameters that now share one flat tensor were saved with different scalar states"
            expected = "one value for all, since the optimizer keeps one per flat tensor"
            found = " and ".join(f"{dict(values[name])} ({name})" for name in examples)
            raise self.metadata.error(MismatchError, problem, examples, expected, found, _OWN_GROUPS)
        return next(map(dict, by_text.values()), None)

    def _link(self, flat: FlatPartition, members: Sequence[str]) -> tuple[StateLink, ...]:
        metadata = self.metadata
        local_state = self.local_state
        # a member that lacks one of these is damaged, which shows when its tensor is looked up
        saved = frozenset().union(*(self.keys[name] for name in members))
        if flat.states is None:
            refuse_other_kind(metadata, local_state, flat, members, converted=False)
            return self._adopted(flat, members, saved)
        wanted = [live for live in flat.states if live.layout not in (REPLICATED, SCRATCH)]
        others = [live for live in flat.states if live.layout in (REPLICATED, SCRATCH)]
        # a known optimizer ignores only what bitsandbytes keeps beside its states
        beside = {state.key for name in members for state in metadata.parameters[name].replicated}
        strange = beside - {live.key for live in others} - set(NON_SHARD_KEYS)
        if strange:
            raise self._other_states(flat, members, saved | strange)
        names = {live.key: live.key for live in wanted if live.key not in metadata.states.fresh}
        is_converted = set(names) != saved
        if is_converted:
            renamed = renamed_states(metadata, local_state, members[0], saved, frozenset(names))
            if renamed is None:
                raise self._other_states(flat, members, saved)
            if not self.convert:
                problem = "the checkpoint was saved by another optimizer, whose states can be converted"
                both = f"states of the live optimizer {local_state.optimizer}", f"states of {saved_optimizer(metadata)}"
                remedy = Remedy("converts them", config={"convert_optimizer": True}), WITHOUT_STATES
                raise metadata.error(MismatchError, problem, members, *both, remedy)
            names = dict(renamed)
            self.converted = True
        refuse_other_kind(metadata, local_state, flat, members, is_converted)
        fresh = metadata.states.fresh
        shared = {
            live.key: self._replicated(members, live.key)
            for live in others
            if live.layout == REPLICATED and live.key not in fresh
        }
        links = [StateLink(live, names.get(live.key, "")) for live in wanted]
        for live in others:
            links.append(StateLink(live, "" if live.key in fresh else live.key, shared.get(live.key)))
        return tuple(links)

    def _adopted(self, flat: FlatPartition, members: Sequence[str], saved: Iterable[str]) -> tuple[StateLink, ...]:
        """States of an unknown optimizer, as the checkpoint has them: zeros in place of others could undo weights."""
        metadata = self.metadata
        local_state = self.local_state
        if (fresh := sorted(set(flat.members) - set(members))) or metadata.states.fresh:
            problem = f"{local_state.optimizer} is not known, nor what its states start with where none is saved"
            found = "none" if fresh else f'"fresh" in "states": {listed(metadata.states.fresh)}'
            expected = "a saved state for every parameter of a flat tensor"
            raise metadata.error(MismatchError, problem, fresh or members, expected, found, _OWN_GROUPS)
        links = []
        for key in sorted(saved):
            name = next(name for name in members if (name, key) in metadata.tensors)
            tensor = metadata.tensors[name, key]
            shape = metadata.parameters[name].shape
            if tensor.is_quantized:
                raise self._other_states(flat, members, saved)
            if tensor.has_own_shape and (local_state.zero_stage > 0 or len(flat.members) > 1):
                raise self._whole_state(key, members, tensor.shape)
            planes = 1 if tensor.has_own_shape or tensor.shape == shape else tensor.shape[0]
            layout = PER_PARAMETER if tensor.has_own_shape else ELEMENTWISE
            links.append(StateLink(LiveState(key, tensor.dtype, layout, planes, None, tensor.shape), key))
        replicated = (self._replicated(members, state.key) for state in metadata.parameters[members[0]].replicated)
        kept = ((LiveState(each.key, each.dtype, REPLICATED, shape=each.shape), each) for each in replicated)
        return (*links, *(StateLink(live, each.key, each) for live, each in kept))

    def _replicated(self, members: Sequence[str], key: str) -> ReplicatedState:
        """The saved copy of a replicated state, which must be the same for all members."""
        parameters = self.metadata.parameters
        found = [state for name in members for state in parameters[name].replicated if state.key == key]
        same = len({(state.crc32, state.shape, state.dtype) for state in found}) == 1
        if len(found) != len(members) or not same or any(state.differs for state in found):
            problem = f"optimizer state {key!r} should be one for all partitions, but different values were saved"
            values = len({state.crc32 for state in found})
            differing = f"{values} different values" if values > 1 else "differences between the ranks that saved it"
            remedy = [WITHOUT_STATES, AT_ITS_TOPOLOGY]
            if self.local_state.flats[0].states is not None:
                remedy.insert(0, Remedy("leaves it out", when=MADE_ANEW, config={"states": {key: "fresh"}}))
            expected = "the same bytes everywhere"
            raise self.metadata.error(UnsupportedError, problem, members, expected, differing, remedy)
        return found[0]

    def _whole_state(self, key: str, members: Sequence[str], shape: tuple[int, ...]) -> UnsupportedError:
        """A state of whole parameters that no flat partition can have."""
        shapes = {self.metadata.tensors[name, key].shape for name in members if (name, key) in self.metadata.tensors}
        problem = f"optimizer state {key!r} is saved as a tensor for each parameter, of another shape than it"
        expected = "one value for each element, or one tensor for all that share a flat partition"
        remedy = [WITHOUT_STATES, AT_ITS_TOPOLOGY]
        if len(shapes) == 1:
            remedy.insert(0, Remedy(when="if it is one table for all", config={"states": {key: "replicated"}}))
        found = f"a tensor of shape {shape}"
        return self.metadata.error(UnsupportedError, problem, members, expected, found, remedy)

    def _other_states(self, flat: FlatPartition, members: Sequence[str], saved: Iterable[str]) -> MismatchError:
        live = {state.key for state in flat.states or () if state.layout != SCRATCH}
        scalars = {key for name in members for key, _ in self.metadata.parameters[name].scalars}
        problem = "the checkpoint was saved by an optimizer that keeps other states"
        expected = listed(live.union(flat.scalars or ())) + f" (live optimizer {self.local_state.optimizer})"
        found = listed(scalars.union(saved)) + f" ({saved_optimizer(self.metadata)})"
        return self.metadata.error(MismatchError, problem, members, expected, found, ITS_OPTIMIZER)

    def _refuse_other_scalars(self, flat: FlatPartition, values: Scalars) -> None:
        if flat.scalars is None:
            return
        unused = {key for key, value in values.items() if value is None}
        for key in (values.keys() & flat.scalars) - unused:
            if not all(map(isfinite, numbers(values[key]) or (nan,))):
                problem = f"{key!r} of these parameters is not a finite number"
                found = str(values[key])[:100]
                raise self.metadata.error(DamagedError, problem, flat.members, "a count or a factor", found, RESTORE)
        if set(values) - unused == set(flat.scalars):
            return
        parameters = self.metadata.parameters
        states = [live.key for live in flat.states or ()]
        if {key for saved in parameters.values() for key, _ in saved.scalars} != set(flat.scalars):
            raise self._other_states(flat, [name for name in flat.members if name in parameters], states)
        problem = "the checkpoint holds states of these parameters, but not all of their scalar states"
        expected = listed(flat.scalars) + " beside " + listed(states)
        raise self.metadata.error(DamagedError, problem, flat.members, expected, listed(values), RESTORE)

    def _outcomes(self, layouts: Mapping[str, str]) -> Iterator[Outcome]:
        """States that start fresh, by reason, and saved ones that the live optimizer lacks."""
        metadata = self.metadata
        restored = self.parameters.restored
        fresh: dict[str, set[str]] = {}
        untied = untied_parameters(metadata, (name for flat in self.local_state.flats for name in flat.members))
        for flat, values in zip(self.local_state.flats, self.scalars, strict=True):
            shown = ", ".join(f"{key} {number:g}" for key, value in (values or {}).items() for number in numbers(value))
            shared = f"; zeros, at its flat tensor's {shown}" if values else ""
            for name in set(flat.members).difference(self.keys):
                if name in metadata.parameters:
                    why = "the checkpoint holds no state of it (it got no gradient before the save)"
                elif name in untied:
                    why = f"its weights are those of {untied[name]}, to which it was tied at the save, not now"
                else:
                    why = "it was frozen at save time" if name in restored else "not in the checkpoint"
                fresh.setdefault(why + shared, set()).add(name)
        for reason, names in sorted(fresh.items()):
            yield Outcome(_ROLE, "fresh", tuple(sorted(names)), reason)
        dropped = sorted(name for name, key in self.parameters.wholes if key == FROZEN and name in self.keys)
        if dropped:
            yield Outcome(_ROLE, "skipped", tuple(dropped), "frozen now: only the weights are restored")
        for key in sorted(metadata.states.fresh):
            yield Outcome(key, "fresh", (), '"states" says so')
        for key in sorted({state.key for saved in metadata.parameters.values() for state in saved.replicated}):
            if layouts.get(key) == SCRATCH:
                yield Outcome(key, "fresh", (), "each step writes it before it reads it")
            elif key not in layouts:
                yield Outcome(key, "ignored", (), "the live optimizer keeps no such state")

    def _notes(self, layouts: Mapping[str, str]) -> Iterator[str]:
        metadata = self.metadata
        local_state = self.local_state
        if self.converted:
            yield f"optimizer states converted from {saved_optimizer(metadata)} to {local_state.optimizer}"
        if any(flat.states is None for flat in local_state.flats if flat.index in self.links):
            shown = ", ".join(f"{key} ({layout})" for key, layout in sorted(layouts.items()))
            yield f"{local_state.optimizer} is not known: its states were taken as the checkpoint has them: {shown}"
        now = local_state.zero_stage, local_state.model.coordinates.partition_degree
        then = metadata.source.zero_stage, metadata.source.partition_degree
        if now != then and (UPDATE_NORM in layouts or "variance" in layouts):
            note = f"{local_state.optimizer} scales updates by the norm of each flat partition, and these differ"
            yield f"{note} now: states are restored, so that the run continues slightly differently"

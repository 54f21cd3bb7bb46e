"""Matches saved parameters, buffers, frozen weights and states with live ones, and accounts for the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite, nan
from typing import Any

from elastic_ckpt.core.local_state import FlatPartition, LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, ReplicatedState
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.state_kinds import ELEMENTWISE, NON_SHARD_KEYS, PER_PARAMETER, REPLICATED, SCRATCH, LiveState
from elastic_ckpt.core.values import numbers
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, ITS_OPTIMIZER, DamagedError, MismatchError, UnsupportedError, listed
from elastic_ckpt.planning.near_names import GENERIC_RENAME, live_shapes, propose_renames, saved_shapes
from elastic_ckpt.planning.param_groups import UPDATE_NORM, refuse_other_kind, renamed_states, saved_optimizer

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = (
    "initialized by this run, not loaded: saved without frozen parameters (exclude_frozen_parameters=True), which is "
    "right where the model gets the same values again, as from_pretrained gives them, and wrong for random ones"
)
_NOT_CONVERTED = "DeepSpeed's converter drops the buffers of pipeline layers: the model's own values stay"
_NO_PLACE = "the live model has no such entry"
_ROLE = "optimizer states"
_RESTORE = "restore the missing files, take another tag, or load with load_optimizer_states=False"
_FUSED_ADAM = "deepspeed.ops.adam.fused_adam.FusedAdam"
_OWN_GROUPS = "put them in param groups of their own, or load with load_optimizer_states=False"
Scalars = Mapping[str, Any]


@dataclass(frozen=True)
class Matching:
    """The parameters to restore, the buffers and frozen parameters (name, key), and what is not restored and why."""

    restored: frozenset[str]
    wholes: frozenset[tuple[str, str]]
    outcomes: tuple[Outcome, ...]

    @property
    def names(self) -> frozenset[str]:
        """All that is restored."""
        return self.restored.union(name for name, _ in self.wholes)


def match_parameters(metadata: CheckpointMetadata, local_state: LocalState, strict: bool) -> Matching:
    """Match live and saved parameters, buffers and frozen weights by FQN.

    A parameter that was frozen may train now, or the other way round: its weights are restored. Raises
    :class:`MismatchError` if ``strict`` and a name is on one side only, frozen parameters excluded from the save apart.
    """
    live = {name for flat in local_state.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in local_state.wholes}
    trained, frozen, buffers = metadata.parameters, set(metadata.names(FROZEN)), set(metadata.names(BUFFER))

    def is_saved(name: str, key: str) -> bool:
        return name in buffers if key == BUFFER else name in trained or name in frozen

    restored = frozenset(name for name in live if is_saved(name, MASTER))
    found = frozenset((name, key) for name, key in wholes if is_saved(name, key))
    missing = {MASTER: live - restored}
    lacking = [each for each in local_state.wholes if (each.name, each.key) not in found and 0 not in each.shape]
    missing |= {kind: {each.name for each in lacking if each.key == kind} for kind in (BUFFER, FROZEN)}
    unsaved = set() if metadata.source.buffers_recorded else missing.pop(BUFFER)
    excluded = set()
    # ZeRO-2 and 3 list frozen parameters, even if there are none, unless they are excluded. At lower stages a save
    # without them looks like a model without any; of tied ones it keeps the second name
    if not metadata.source.frozen_recorded and local_state.model.ties.keys() >= frozen:
        excluded = missing[FROZEN] & {w.name for w in local_state.wholes if w.key == FROZEN and not w.trains}
        missing[FROZEN] -= excluded
    here, elsewhere = live.union(name for name, _ in wholes), local_state.model.elsewhere
    unexpected = {n for n in chain(trained, frozen, buffers) if n not in elsewhere and n not in here}  # often thousands
    lost = set().union(*missing.values())
    names = unexpected & local_state.others
    if names and (strict or lost):  # which may be the lost ones, renamed by a hook
        problem = "the module's state dict has entries that are neither parameters nor buffers"
        remedy = "load_checkpoint(..., load_module_strict=False), if they hold nothing that training needs; or "
        if lost:
            remedy = f'"elastic_checkpoint": {{"rename": ...}}, if they are {listed(lost)} of the model; or '
        both = "parameters and buffers under their own names", "entries that a hook of the module adds or renames"
        raise metadata.error(UnsupportedError, problem, names, *both, remedy + AT_ITS_TOPOLOGY)
    if strict and (lost or unexpected):
        tied = listed(f"{name} = {metadata.aliases[name]}" for name in lost if name in metadata.aliases)
        hint = f"; tied at save time, not now: {tied}" if tied != "none" else ""
        remedy = "load_checkpoint(..., load_module_strict=False) restores what matches and reports the rest; renamed "
        remedy += f"ones: {_renames_of(metadata, local_state)}"
        problem = "model and checkpoint do not have the same parameters and buffers"
        expected = f"in the model but not in the checkpoint: {listed(lost)}"
        found_names = f"in the checkpoint but not in the model: {listed(unexpected)}{hint}"
        raise metadata.error(MismatchError, problem, lost or unexpected, expected, found_names, remedy)
    outcomes = [
        *((role, "fresh", names, _NOT_SAVED) for role, names in missing.items()),
        (FROZEN, "fresh", excluded, _EXCLUDED),
        (BUFFER, "fresh", unsaved, _NOT_CONVERTED),
        (MASTER, "ignored", unexpected & trained.keys(), _NO_PLACE),
        (FROZEN, "ignored", unexpected & frozen - trained.keys(), _NO_PLACE),
        (BUFFER, "ignored", unexpected & buffers, _NO_PLACE),
    ]
    told = (Outcome(role, what, tuple(sorted(names)), why) for role, what, names, why in outcomes if names)
    return Matching(restored, found, tuple(told))


def _renames_of(metadata: CheckpointMetadata, local_state: LocalState) -> str:
    """The rules that bring the saved names to the live ones, as far as they are found; else the form of a rule."""
    is_renamed = any(old != new and new not in local_state.model.ties for new, old in metadata.saved_names.items())
    if is_renamed:  # the rules would take the place of the user's own
        return GENERIC_RENAME
    renames = propose_renames(saved_shapes(metadata), live_shapes(local_state))
    return f"{renames.config} settles {len(renames.pairs)}" if renames.rules else GENERIC_RENAME


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
            reason += " (saved before the first step)"
        return StateMatching(scalars=(None,) * len(local_state.flats), outcomes=(Outcome(_ROLE, "fresh", (), reason),))
    return _Matcher(metadata, local_state, matching, keys, convert).matching()


def state_errors(metadata: CheckpointMetadata) -> Iterator[DamagedError | UnsupportedError]:
    """An error for each damaged state, and for each of unknown layout."""
    for key, description in metadata.states.damaged.items():
        problem = f"optimizer state {key!r} does not have the scales or the quantization map that its codes need"
        expected = "one scale for each block of 256 or 2048 elements, and one map of 256 ascending values in all files"
        yield metadata.error(DamagedError, problem, key, expected, description, _RESTORE)
    for key, description in metadata.states.opaque.items():
        problem = f"optimizer state {key!r} has a layout that cannot be resharded"
        expected = "one value per element of the partition, one per tensor, or a tensor that all ranks share"
        # of whole tensors, no declaration settles what another state is
        foreign = metadata.source.foreign
        remedy = f'"elastic_checkpoint": {{"states": {{"{key}": "{"fresh" if foreign else "replicated"}"}}}}'
        remedy += " leaves it out" if foreign else f' (or "elementwise", "fresh") says what it is; or {AT_ITS_TOPOLOGY}'
        remedy += "; load_optimizer_states=False leaves all states out"
        yield metadata.error(UnsupportedError, problem, key, expected, description, remedy)


def refuse_unreadable_states(metadata: CheckpointMetadata) -> None:
    """Refuse :func:`state_errors`, and groups with states of some members: if partitioned, all have them or none."""
    for error in state_errors(metadata):
        raise error
    stateful = metadata.keys_by_name
    if metadata.source.zero_stage == 0 or metadata.parameters.keys() <= stateful.keys():
        return
    with_state = {metadata.parameters[name].group for name in stateful if name in metadata.parameters}
    for name, saved in metadata.parameters.items():
        if saved.group in with_state and name not in stateful:
            problem = "the checkpoint holds no optimizer state of this parameter, but of others in its param group"
            expected = f"{listed(metadata.state_keys)} and step"
            raise metadata.error(DamagedError, problem, name, expected, "none", _RESTORE)


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
        is_known, parameters = any(flat.states is not None for flat in self.local_state.flats), self.metadata.parameters
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
        outcomes, notes = tuple(self._outcomes(layouts)), tuple(self._notes(layouts))
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
        metadata, local_state = self.metadata, self.local_state
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
                remedy = '"elastic_checkpoint": {"convert_optimizer": true}, or load_optimizer_states=False'
                raise metadata.error(MismatchError, problem, members, *both, remedy)
            names, self.converted = dict(renamed), True
        refuse_other_kind(metadata, local_state, flat, members, is_converted)
        shared = {live.key: self._replicated(members, live.key) for live in others if live.layout == REPLICATED}
        links = [StateLink(live, names.get(live.key, "")) for live in wanted]
        return (*links, *(StateLink(live, live.key, shared.get(live.key)) for live in others))

    def _adopted(self, flat: FlatPartition, members: Sequence[str], saved: Iterable[str]) -> tuple[StateLink, ...]:
        """States of an unknown optimizer, as the checkpoint has them: zeros in place of others could undo weights."""
        metadata, local_state = self.metadata, self.local_state
        if (fresh := sorted(set(flat.members) - set(members))) or metadata.states.fresh:
            problem = f"{local_state.optimizer} is not known, nor what its states start with where none is saved"
            found = "none" if fresh else f'"fresh" in "states": {listed(metadata.states.fresh)}'
            expected = "a saved state for every parameter of a flat tensor"
            raise metadata.error(MismatchError, problem, fresh or members, expected, found, _OWN_GROUPS)
        links = []
        for key in sorted(saved):
            name = next(name for name in members if (name, key) in metadata.tensors)
            tensor, shape = metadata.tensors[name, key], metadata.parameters[name].shape
            if tensor.is_quantized or (tensor.has_own_shape and (local_state.zero_stage > 0 or len(flat.members) > 1)):
                raise self._other_states(flat, members, saved)
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
            differing = f"{len({state.crc32 for state in found})} different values, or differences between ranks"
            remedy = f'if it is not a replicated state: "elastic_checkpoint": {{"states": {{"{key}": "elementwise"}}}} '
            remedy += '(or "fresh"); or load at the topology it was saved with'
            raise self.metadata.error(MismatchError, problem, members, "the same bytes everywhere", differing, remedy)
        return found[0]

    def _other_states(self, flat: FlatPartition, members: Sequence[str], saved: Iterable[str]) -> MismatchError:
        live = {state.key for state in flat.states or () if state.layout != SCRATCH}
        scalars = {key for name in members for key, _ in self.metadata.parameters[name].scalars}
        problem = "the checkpoint was saved by an optimizer that keeps other states"
        expected = f"{listed(live.union(flat.scalars or ()))} (live optimizer {self.local_state.optimizer})"
        found = f"{listed(scalars.union(saved))} ({saved_optimizer(self.metadata)})"
        return self.metadata.error(MismatchError, problem, members, expected, found, ITS_OPTIMIZER)

    def _refuse_other_scalars(self, flat: FlatPartition, values: Scalars) -> None:
        if flat.scalars is None:
            return
        unused = {key for key, value in values.items() if value is None}
        for key in (values.keys() & flat.scalars) - unused:
            if not all(map(isfinite, numbers(values[key]) or (nan,))):
                problem, found = f"{key!r} of these parameters is not a finite number", str(values[key])[:100]
                raise self.metadata.error(DamagedError, problem, flat.members, "a count or a factor", found, _RESTORE)
        if set(values) - unused == set(flat.scalars):
            return
        parameters, states = self.metadata.parameters, [live.key for live in flat.states or ()]
        if {key for saved in parameters.values() for key, _ in saved.scalars} != set(flat.scalars):
            raise self._other_states(flat, [name for name in flat.members if name in parameters], states)
        problem = "the checkpoint holds states of these parameters, but not all of their scalar states"
        expected = f"{listed(flat.scalars)} beside {listed(states)}"
        raise self.metadata.error(DamagedError, problem, flat.members, expected, listed(values), _RESTORE)

    def _outcomes(self, layouts: Mapping[str, str]) -> Iterator[Outcome]:
        """States that start fresh, by reason, and saved ones that the live optimizer lacks."""
        metadata, restored = self.metadata, self.parameters.restored
        fresh: dict[str, set[str]] = {}
        for flat, values in zip(self.local_state.flats, self.scalars, strict=True):
            shown = ", ".join(f"{key} {number:g}" for key, value in (values or {}).items() for number in numbers(value))
            shared = f"; zeros, at its flat tensor's {shown}" if values else ""
            for name in set(flat.members).difference(self.keys):
                if name in metadata.parameters:
                    why = "the checkpoint holds no state of it (it got no gradient before the save)"
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
        metadata, local_state = self.metadata, self.local_state
        if self.converted:
            yield f"optimizer states converted from {saved_optimizer(metadata)} to {local_state.optimizer}"
        if any(flat.states is None for flat in local_state.flats if flat.index in self.links):
            shown = ", ".join(f"{key} ({layout})" for key, layout in sorted(layouts.items()))
            yield f"{local_state.optimizer} is not known: its states were taken as the checkpoint has them: {shown}"
        now = local_state.zero_stage, local_state.model.coordinates.partition_degree
        then = metadata.source.zero_stage, metadata.source.partition_degree
        if now != then and (UPDATE_NORM in layouts or "variance" in layouts):
            note = f"{local_state.optimizer} scales updates by the norm of each flat partition, and these are others"
            yield f"{note} now: states are restored, so that the run continues slightly differently"

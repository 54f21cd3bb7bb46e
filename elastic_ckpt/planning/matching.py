"""Matches saved parameters, buffers and frozen weights with live ones, and accounts for the rest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from elastic_ckpt.core.extra_states import EXTRA_STATE, SavedExtraState
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.quantized_weights import described_weights
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    NOT_STRICT,
    MismatchError,
    Remedy,
    UnsupportedError,
    listed,
)
from elastic_ckpt.planning.extra_states import match_extra_states
from elastic_ckpt.planning.near_names import (
    GENERIC_RENAME,
    Renames,
    fits_any,
    live_shapes,
    propose_renames,
    saved_shapes,
)
from elastic_ckpt.planning.quantization import compare_quantization, without_their_weights

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = (
    "initialized by this run, not loaded: saved without frozen parameters (exclude_frozen_parameters=True), which is "
    "right if the model gets the same values again, as from_pretrained gives them, and wrong if they are random"
)
_NOT_CONVERTED = "DeepSpeed's converter drops those of pipeline layers: the model's own values stay"
_LEFT_OUT = "they describe quantized weights that were left out of the save: the model's own stay, with its own weights"
_NO_PLACE = "the live model has no such entry"


@dataclass(frozen=True)
class Matching:
    """The parameters to restore, the buffers and frozen parameters (name, key), and what is not restored and why."""

    restored: frozenset[str]
    wholes: frozenset[tuple[str, str]]
    outcomes: tuple[Outcome, ...]
    extra_states: Mapping[str, SavedExtraState] = field(default_factory=dict)  # to restore

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
    trained = metadata.parameters
    frozen = set(metadata.names(FROZEN))
    buffers = set(metadata.names(BUFFER))

    def is_saved(name: str, key: str) -> bool:
        return name in buffers if key == BUFFER else name in trained or name in frozen

    restored = frozenset(name for name in live if is_saved(name, MASTER))
    found = frozenset((name, key) for name, key in wholes if is_saved(name, key))
    found, left_out = _with_their_weights(metadata, local_state, found)
    of_live = {entry.name for entry in local_state.quantization}
    missing = {MASTER: live - restored}
    lost_wholes = (each for each in local_state.wholes if (each.name, each.key) not in found and 0 not in each.shape)
    lacking = [each for each in lost_wholes if each.name not in of_live]
    missing |= {kind: {each.name for each in lacking if each.key == kind} for kind in (BUFFER, FROZEN)}
    extra = match_extra_states(metadata, local_state.model)
    missing[EXTRA_STATE] = set(extra.missing)
    unsaved: dict[str, set[str]] = {}
    if not metadata.source.buffers_recorded:
        unsaved = {kind: missing.pop(kind) for kind in (BUFFER, EXTRA_STATE)}
    excluded = set()
    of_quantized = _described(metadata, local_state)
    # ZeRO-2 and 3 list frozen parameters, even if there are none, unless they are excluded. At lower stages a save
    # without them looks like a model without any; of tied ones it keeps the second name
    listed_frozen = frozen - metadata.aliases.keys() - of_quantized.keys() - of_live - local_state.own_entries
    if not metadata.source.frozen_recorded and local_state.model.ties.keys() >= listed_frozen:
        excluded = missing[FROZEN] & {w.name for w in local_state.wholes if w.key == FROZEN and not w.trains}
        missing[FROZEN] -= excluded
    here = live.union(of_live, (name for name, _ in wholes))
    elsewhere = local_state.model.elsewhere
    unexpected = {n for n in chain(trained, frozen, buffers) if n not in elsewhere and n not in here}  # often thousands
    lost = set().union(*missing.values())
    left_out |= of_quantized.keys() & unexpected  # with their weights
    restored_frozen = {name for name, key in found if key == FROZEN}
    left_out |= without_their_weights(metadata, local_state, unexpected - left_out, restored_frozen, excluded)
    unexpected -= left_out
    unexpected |= extra.unexpected
    of_hooks = unexpected & local_state.others
    if of_hooks and (strict or lost):  # which may be the lost ones, renamed by a hook
        raise _made_by_hooks(metadata, of_hooks, lost)
    if strict and (lost or unexpected):
        trains = live.union(whole.name for whole in local_state.wholes if whole.key == FROZEN and whole.trains)
        matches = bool(trains & (restored | restored_frozen))
        remedies = _ways_of(metadata, local_state, lost, unexpected, trains, matches)
        problem = "model and checkpoint do not have the same parameters and buffers"
        expected = "in the model but not in the checkpoint: " + listed(lost)
        found_names = "in the checkpoint but not in the model: " + listed(unexpected)
        raise metadata.error(MismatchError, problem, lost or unexpected, expected, found_names, remedies)
    outcomes = [
        *((role, "fresh", names, _NOT_SAVED) for role, names in missing.items()),
        (FROZEN, "fresh", excluded, _EXCLUDED),
        *((role, "fresh", names, _NOT_CONVERTED) for role, names in unsaved.items()),
        (MASTER, "ignored", unexpected & trained.keys(), _NO_PLACE),
        (FROZEN, "ignored", unexpected & frozen - trained.keys(), _NO_PLACE),
        (BUFFER, "ignored", unexpected & buffers, _NO_PLACE),
        (FROZEN, "ignored", left_out, _LEFT_OUT),
        (EXTRA_STATE, "restored", extra.names, ""),
        (EXTRA_STATE, "ignored", extra.unexpected, _NO_PLACE),
    ]
    told = (Outcome(role, what, tuple(sorted(names)), why) for role, what, names, why in outcomes if names)
    return Matching(restored, found, tuple(told), extra.restored)


def _made_by_hooks(metadata: CheckpointMetadata, names: Collection[str], lost: Collection[str]) -> UnsupportedError:
    """The error for saved entries that are made by hooks of the live module, which lacks ``lost`` ones."""
    problem = "the module's state dict has entries that are neither parameters nor buffers"
    remedy = Remedy(when="if they hold nothing that training needs", arguments={"load_module_strict": False})
    if lost:
        remedy = Remedy(f'"elastic_checkpoint": {{"rename": ...}}, if they are {listed(lost)} of the model')
    both = "parameters and buffers under their own names", "entries that a hook of the module adds or renames"
    return metadata.error(UnsupportedError, problem, names, *both, (remedy, AT_ITS_TOPOLOGY))


def _with_their_weights(
    metadata: CheckpointMetadata, local_state: LocalState, found: frozenset[tuple[str, str]]
) -> tuple[frozenset[tuple[str, str]], set[str]]:
    """What is found but for entries that describe quantized weights which are not; and those of them that are saved.

    Raises what :func:`compare_quantization` does.
    """
    entries = {entry.name for entry in local_state.quantization if (entry.weight, FROZEN) not in found}
    found = frozenset(place for place in found if place[0] not in entries)
    compare_quantization(metadata, local_state, {name for name, key in found if key == FROZEN})
    return found, entries & {*metadata.names(FROZEN), *metadata.names(BUFFER)}


def _described(metadata: CheckpointMetadata, local_state: LocalState) -> dict[str, str]:
    """Entry -> frozen weight that it describes, of weights that the checkpoint lacks.

    Raises :class:`UnsupportedError` for one that it has: without these entries, its values are of no use.
    """
    frozen = {whole.name for whole in local_state.wholes if whole.key == FROZEN}
    known = {entry.name for entry in local_state.quantization}
    entries = local_state.others.intersection(metadata.names(FROZEN)) - known
    described = described_weights(entries, frozen)
    saved = {entry for entry, weight in described.items() if (weight, FROZEN) in metadata.tensors}
    if saved:
        problem = (
            "quantized weights were saved, and what describes them, without which they have other values, is neither "
        )
        problem += "parameter nor buffer"
        expected = "frozen quantized weights that are left out of the save, as their model makes them again"
        remedy = [Remedy("save with exclude_frozen_parameters=True: such checkpoints load at every topology")]
        if local_state.zero_stage == 3:  # nor does DeepSpeed's own loader restore them there
            raise metadata.error(MismatchError, problem, saved, expected, listed(saved), remedy)
        raise metadata.error(UnsupportedError, problem, saved, expected, listed(saved), (*remedy, AT_ITS_TOPOLOGY))
    return described


def _ways_of(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    lost: frozenset[str] | set[str],
    unexpected: frozenset[str] | set[str],
    trains: frozenset[str] | set[str],
    matches: bool,
) -> tuple[Remedy, ...]:
    """Ways out where names are on one side only.

    Args:
        lost: live names that the checkpoint lacks, of parameters and buffers.
        unexpected: saved names that the live model lacks.
        trains: live names that train.
        matches: whether any of them is in the checkpoint. If none is, a load that is not strict is refused, too
            (:mod:`elastic_ckpt.load.nothing_matched`), unless another pipeline stage has some.
    """
    is_renamed = any(old != new and new not in local_state.model.ties for new, old in metadata.saved_names.items())
    # the rules would take the place of the user's own
    renames = Renames() if is_renamed else propose_renames(saved_shapes(metadata), live_shapes(local_state))
    if matches or not trains or local_state.model.coordinates.pp > 1:
        if not _may_be_renamed(metadata, local_state, lost, unexpected):
            return (NOT_STRICT,)
        return NOT_STRICT, _renames_of(renames, lost)
    placed = local_state.model.names & {*metadata.names(FROZEN), *metadata.parameters}
    if any(new in trains for _, new in renames.pairs):
        return (_renames_of(renames, lost),)
    if renames.pairs or placed:
        return (from_these_weights(renames, {"load_module_strict": False}),)
    return of_another_model(_may_be_renamed(metadata, local_state, lost, unexpected))


def of_another_model(may_be_renamed: bool) -> tuple[Remedy, ...]:
    """The ways out where nothing of a checkpoint is in the live model, and no rename is found."""
    renamed = Remedy(GENERIC_RENAME, when="if the names differ")
    return Remedy("give the folder of this model"), *([renamed] if may_be_renamed else [])


def _may_be_renamed(
    metadata: CheckpointMetadata, local_state: LocalState, lost: Collection[str], unexpected: Collection[str]
) -> bool:
    """Whether what only the checkpoint has may be something that it lacks, by the shapes."""
    saved = saved_shapes(metadata)
    saved |= {name: metadata.tensors[name, BUFFER].shape for name in metadata.names(BUFFER)}
    live = live_shapes(local_state)
    live |= {whole.name: whole.shape for whole in local_state.wholes if whole.key == BUFFER}
    return fits_any({name: saved.get(name) for name in unexpected}, {name: live.get(name) for name in lost})


def from_these_weights(renames: Renames, arguments: Mapping[str, Any]) -> Remedy:
    """The way to begin a run from weights that do not train any more, as those below new adapters, without states."""
    text = "since they do not train here: the run starts from these weights"
    config: dict[str, Any] = {}
    if renames.rules:
        text = f"restores {len(renames.pairs)} of them, {text}"
        config = {"rename": [list(rule) for rule in renames.rules]}
    return Remedy(text, config=config, arguments={"load_module_only": True, **arguments})


def _renames_of(renames: Renames, lost: frozenset[str] | set[str]) -> Remedy:
    """The rules that bring the saved names to the live ones, as far as they are found; else the form of a rule."""
    if not renames.rules:
        return Remedy(GENERIC_RENAME, when="if they were renamed")
    rules = [list(rule) for rule in renames.rules]
    rest = lost - {live for _, live in renames.pairs}  # of buffers, which have no rules, too
    arguments = {"load_module_strict": False} if rest else {}
    text = f"matches {len(renames.pairs)}{' and reports the rest' if rest else ''}"
    return Remedy(text, config={"rename": rules}, arguments=arguments, when="if they were renamed")

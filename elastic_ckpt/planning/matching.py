"""Matches saved parameters, buffers and frozen weights with live ones, and accounts for the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    NOT_STRICT,
    MismatchError,
    Remedy,
    UnsupportedError,
    listed,
)
from elastic_ckpt.planning.near_names import GENERIC_RENAME, live_shapes, propose_renames, saved_shapes

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = (
    "initialized by this run, not loaded: saved without frozen parameters (exclude_frozen_parameters=True), which is "
    "right where the model gets the same values again, as from_pretrained gives them, and wrong for random ones"
)
_NOT_CONVERTED = "DeepSpeed's converter drops the buffers of pipeline layers: the model's own values stay"
_NO_PLACE = "the live model has no such entry"


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
        remedy = Remedy(when="if they hold nothing that training needs", arguments={"load_module_strict": False})
        if lost:
            remedy = Remedy(f'"elastic_checkpoint": {{"rename": ...}}, if they are {listed(lost)} of the model')
        both = "parameters and buffers under their own names", "entries that a hook of the module adds or renames"
        raise metadata.error(UnsupportedError, problem, names, *both, (remedy, AT_ITS_TOPOLOGY))
    if strict and (lost or unexpected):
        tied = listed(f"{name} = {metadata.aliases[name]}" for name in lost if name in metadata.aliases)
        hint = f"; tied at save time, not now: {tied}" if tied != "none" else ""
        renamed = _renames_of(metadata, local_state, lost)
        problem = "model and checkpoint do not have the same parameters and buffers"
        expected = f"in the model but not in the checkpoint: {listed(lost)}"
        found_names = f"in the checkpoint but not in the model: {listed(unexpected)}{hint}"
        raise metadata.error(MismatchError, problem, lost or unexpected, expected, found_names, (NOT_STRICT, renamed))
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


def _renames_of(metadata: CheckpointMetadata, local_state: LocalState, lost: frozenset[str] | set[str]) -> Remedy:
    """The rules that bring the saved names to the live ones, as far as they are found; else the form of a rule."""
    is_renamed = any(old != new and new not in local_state.model.ties for new, old in metadata.saved_names.items())
    if is_renamed:  # the rules would take the place of the user's own
        return Remedy(GENERIC_RENAME, when="if they were renamed")
    renames = propose_renames(saved_shapes(metadata), live_shapes(local_state))
    if not renames.rules:
        return Remedy(GENERIC_RENAME, when="if they were renamed")
    rules = [list(rule) for rule in renames.rules]
    rest = lost - {live for _, live in renames.pairs}  # of buffers, which have no rules, too
    arguments = {"load_module_strict": False} if rest else {}
    text = f"settles {len(renames.pairs)}{' and reports the rest' if rest else ''}"
    return Remedy(text, config={"rename": rules}, arguments=arguments, when="if they were renamed")

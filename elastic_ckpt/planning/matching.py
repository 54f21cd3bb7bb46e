"""Matches saved parameters, buffers and frozen weights with live ones, and accounts for the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.errors import MismatchError, listed

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = "saved without frozen parameters (exclude_frozen_parameters=True): the model's own values stay"
_NOT_CONVERTED = "DeepSpeed's converter drops the buffers of pipeline layers: the model's own values stay"
_NO_PLACE = "the live model has no such entry"


@dataclass(frozen=True)
class Matching:
    """The parameters to restore, the buffers and frozen parameters (name, key), and what is not restored and why."""

    restored: frozenset[str]
    wholes: frozenset[tuple[str, str]]
    outcomes: tuple[Outcome, ...]


def match_parameters(metadata: CheckpointMetadata, local_state: LocalState, strict: bool) -> Matching:
    """Match live and saved parameters, buffers and frozen weights by FQN.

    A parameter that was frozen may train now, or the other way round: its weights are restored.

    Raises:
        MismatchError: a name is on one side only and ``strict`` is set, frozen parameters excluded from the save apart.
    """
    live = {name for flat in local_state.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in local_state.wholes}
    weights = metadata.parameters.keys() | set(metadata.names(FROZEN))
    buffers = set(metadata.names(BUFFER))
    found = {(name, key) for name, key in wholes if name in (buffers if key == BUFFER else weights)}
    missing = {MASTER: live - weights}
    missing |= {kind: {name for name, key in wholes - found if key == kind} for kind in (BUFFER, FROZEN)}
    unsaved = set() if metadata.source.buffers_recorded else missing.pop(BUFFER)
    excluded = set()
    # ZeRO-2 and 3 list frozen parameters, even if there are none, unless they are excluded. At lower stages a save
    # without them looks like a model without any; of tied ones it keeps the second name
    if not metadata.source.frozen_recorded and local_state.model.ties.keys() >= set(metadata.names(FROZEN)):
        frozen = {whole.name for whole in local_state.wholes if whole.key == FROZEN and not whole.trains}
        excluded = missing[FROZEN] & frozen
        missing[FROZEN] -= excluded
    unexpected = (weights | buffers) - live - {name for name, _ in wholes} - local_state.model.elsewhere
    if strict and (any(missing.values()) or unexpected):
        raise _names_differ(metadata, set().union(*missing.values()), unexpected)
    outcomes = [
        *((role, "fresh", names, _NOT_SAVED) for role, names in missing.items()),
        (FROZEN, "fresh", excluded, _EXCLUDED),
        (BUFFER, "fresh", unsaved, _NOT_CONVERTED),
        (MASTER, "ignored", unexpected & metadata.parameters.keys(), _NO_PLACE),
        (FROZEN, "ignored", unexpected & (weights - metadata.parameters.keys()), _NO_PLACE),
        (BUFFER, "ignored", unexpected & buffers, _NO_PLACE),
    ]
    return Matching(
        restored=frozenset(live & weights),
        wholes=frozenset(found),
        outcomes=tuple(Outcome(role, what, tuple(sorted(names)), why) for role, what, names, why in outcomes if names),
    )


def _names_differ(metadata: CheckpointMetadata, missing: set[str], unexpected: set[str]) -> MismatchError:
    tied = {name: metadata.aliases[name] for name in missing if name in metadata.aliases}
    hint = f"; tied at save time, not now: {listed(f'{a} = {b}' for a, b in tied.items())}" if tied else ""
    return MismatchError(
        "model and checkpoint do not have the same parameters and buffers",
        parameter=listed(missing or unexpected),
        file=metadata.source.folder,
        expected=f"in the model but not in the checkpoint: {listed(missing)}",
        found=f"in the checkpoint but not in the model: {listed(unexpected)}{hint}",
        remedy=(
            "load_checkpoint(..., load_module_strict=False) restores what matches and reports the rest; renamed "
            'ones: "elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
        ),
    )


def weights_key(metadata: CheckpointMetadata, name: str) -> str:
    """The metadata key of a parameter's weights, which may have been frozen at save time."""
    return MASTER if name in metadata.parameters else FROZEN

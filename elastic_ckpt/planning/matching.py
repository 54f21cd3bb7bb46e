"""Which saved parameter, buffer and frozen weight belongs to which live one, and what becomes of the rest. Pure."""

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
    """Names on both sides.

    Attributes:
        restored: trainable parameters whose weights are restored.
        wholes: buffers and frozen parameters that are restored, as (name, key).
        outcomes: what is not restored, and why.
    """

    restored: frozenset[str]
    wholes: frozenset[tuple[str, str]]
    outcomes: tuple[Outcome, ...]


def match_parameters(metadata: CheckpointMetadata, local_state: LocalState, strict: bool) -> Matching:
    """Match names of live and saved parameters, buffers and frozen weights.

    A parameter may have been frozen then and train now, or the other way round: its weights are restored.

    Raises:
        MismatchError: a name is on one side only and ``strict`` is set. Frozen parameters that were left out of
            the save on purpose are no such case.
    """
    live = {name for flat in local_state.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in local_state.wholes}
    weights = set(metadata.parameters) | set(metadata.names(FROZEN))
    buffers = set(metadata.names(BUFFER))
    found = {(name, key) for name, key in wholes if name in (buffers if key == BUFFER else weights)}
    missing = {"fp32": live - weights}
    missing |= {kind: {name for name, key in wholes - found if key == kind} for kind in (BUFFER, FROZEN)}
    unsaved = set() if metadata.source.buffers_recorded else missing.pop(BUFFER)
    excluded = missing[FROZEN] & _frozen_that_were_left_out(metadata, local_state)
    missing[FROZEN] -= excluded
    live_names = live | {name for name, _ in wholes}
    unexpected = (weights | buffers) - live_names - local_state.elsewhere
    if strict and (any(missing.values()) or unexpected):
        raise _names_differ(metadata, set().union(*missing.values()), unexpected)
    outcomes = [_outcome(role, "fresh", names, _NOT_SAVED) for role, names in missing.items()]
    outcomes.append(_outcome(FROZEN, "fresh", excluded, _EXCLUDED))
    outcomes.append(_outcome(BUFFER, "fresh", unsaved, _NOT_CONVERTED))
    outcomes.append(_outcome("fp32", "ignored", unexpected & set(metadata.parameters), _NO_PLACE))
    outcomes.append(_outcome(FROZEN, "ignored", unexpected & (weights - set(metadata.parameters)), _NO_PLACE))
    outcomes.append(_outcome(BUFFER, "ignored", unexpected & buffers, _NO_PLACE))
    return Matching(
        restored=frozenset(live & weights),
        wholes=frozenset(found),
        outcomes=tuple(outcome for outcome in outcomes if outcome.names),
    )


def _frozen_that_were_left_out(metadata: CheckpointMetadata, local_state: LocalState) -> set[str]:
    """Live frozen parameters, if the save left them out on purpose, as far as it tells.

    ZeRO-2 and 3 list frozen parameters, none of them too, unless they are left out. Below, a save without them looks as
    if the model had none; of tied ones it keeps the second name.
    """
    if metadata.source.frozen_recorded or not set(metadata.names(FROZEN)) <= set(local_state.ties):
        return set()
    return {whole.name for whole in local_state.wholes if whole.key == FROZEN and not whole.trains}


def _outcome(role: str, what: str, names: set[str], reason: str) -> Outcome:
    return Outcome(role, what, tuple(sorted(names)), reason)


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
    """The metadata key under which a parameter's weights lie: it may have been frozen at save time."""
    return MASTER if name in metadata.parameters else FROZEN

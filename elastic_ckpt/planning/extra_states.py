"""Matches what modules keep beside parameters and buffers (``get_extra_state``) with the modules that take it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ckpt.core.extra_states import SavedExtraState, kept_in
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import MismatchError, Remedy, listed

_FIRST = Remedy("takes the first rank's", config={"replicated_params": "first"})
_AT_ITS_TOPOLOGY = Remedy("gives each rank its own: load at the topology it was saved with", at_saved_topology=True)


@dataclass(frozen=True)
class ExtraStateMatching:
    """What is restored, by live name, and the names that are on one side only; modules that keep nothing apart."""

    restored: Mapping[str, SavedExtraState]
    missing: frozenset[str]
    unexpected: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Of the values that are restored."""
        return frozenset(name for name, saved in self.restored.items() if not saved.is_none)


def match_extra_states(metadata: CheckpointMetadata, model: ModelLayout) -> ExtraStateMatching:
    """Match saved and live names, as ``load_state_dict`` of torch does."""
    saved = metadata.extra_states
    live = model.extra_states
    kept = set(kept_in(saved))
    return ExtraStateMatching(
        restored={name: state for name, state in saved.items() if name in live},
        missing=frozenset(name for name, keeps in live.items() if keeps and name not in saved),
        unexpected=frozenset(kept - live.keys() - model.extra_states_elsewhere),
    )


def one_value_each(
    metadata: CheckpointMetadata, restored: Mapping[str, SavedExtraState], takes_first: bool
) -> tuple[str, ...]:
    """Notes on values of which ranks that are no live ones saved several; :class:`MismatchError` if none is to count.

    ``takes_first``: whether the first rank's is.
    """
    differing = sorted(name for name, saved in restored.items() if saved.other is not None)
    if not differing:
        return ()
    if takes_first:
        return (f"extra states of modules that differed between ranks are the first rank's: {listed(differing)}",)
    problem = "ranks saved different extra states (get_extra_state) of a module, and the topology differs"
    first = restored[differing[0]]
    expected = f"one value for all ranks, as in {first.path}"
    found = f"another in {first.other}"
    raise metadata.error(MismatchError, problem, differing, expected, found, (_AT_ITS_TOPOLOGY, _FIRST))

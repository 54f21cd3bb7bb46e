"""Assigns saved param groups' hyperparameters to live ones: by membership, not by position. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.local_state import LiveGroup, LocalState
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import MismatchError, listed

#: Members, display names, and implementation choices, which do not affect training: the live run's are kept.
_LIVE_KEYS = frozenset({"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"})
_DECOUPLED = "decoupled_weight_decay"


@dataclass(frozen=True)
class GroupMatching:
    """Per live group, the saved groups that its values come from, and the values; empty if the live ones stay."""

    sources: tuple[tuple[int, ...], ...]
    hyperparameters: tuple[Mapping[str, Any], ...]


def match_groups(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    keep_live: bool,
    with_states: bool = True,
    converted: bool = False,
) -> GroupMatching:
    """Find hyperparameters for every live group.

    Args:
        metadata, local_state: the checkpoint and the live engine.
        keep_live: ``"param_groups": "keep_live"``: every live group keeps its own.
        with_states: whether optimizer states are restored too, so that both optimizers must be of one kind.
        converted: whether another optimizer saved the checkpoint, so that only common hyperparameters are restored.

    Raises:
        MismatchError: members of one live group come from saved groups with different hyperparameters, or weight
            decay is of another kind.
    """
    sources: list[tuple[int, ...]] = []
    hyperparameters: list[Mapping[str, Any]] = []
    for number, group in enumerate(local_state.groups):
        found = sorted({metadata.parameters[name].group for name in group.names if name in metadata.parameters})
        if not group.names and len(metadata.groups) == len(local_state.groups):
            has_members = any(saved.group == number for saved in metadata.parameters.values())
            found = [] if has_members else [number]  # all its members are frozen, saved and live
        if with_states:
            _refuse_other_weight_decay(number, group, [metadata.groups[source] for source in found])
        if keep_live or not all(metadata.groups[source] for source in found):
            found = []  # by the user's choice, or because there are none (BLOOM's universal checkpoint)
        values = [transferable(metadata.groups[source]) for source in found]
        if any(value != values[0] for value in values):
            raise _mixed(number, group, dict(zip(found, values, strict=True)))
        taken = values[0] if values else {}
        if converted:
            known = {*group.hyperparameters, "initial_lr"}
            taken = {key: value for key, value in taken.items() if key in known}
        sources.append(tuple(found))
        hyperparameters.append(taken)
    return GroupMatching(tuple(sources), tuple(hyperparameters))


def _mixed(number: int, group: LiveGroup, saved: Mapping[int, Mapping[str, Any]]) -> MismatchError:
    keys = sorted(set().union(*saved.values()))
    first = next(iter(saved.values()))
    differ = [key for key in keys if any(values.get(key) != first.get(key) for values in saved.values())]
    return MismatchError(
        f"param group {number} now mixes parameters whose saved groups had different hyperparameters",
        parameter=listed(group.names),
        expected="one set of hyperparameters for the group",
        found="; ".join(
            f"saved group {source}: { ({key: values.get(key) for key in differ}) }" for source, values in saved.items()
        ),
        remedy=(
            "build the param groups as they were when the checkpoint was saved, or keep those of the live run: "
            '"elastic_checkpoint": {"param_groups": "keep_live"}'
        ),
    )


def _refuse_other_weight_decay(number: int, group: LiveGroup, saved: list[Mapping[str, Any]]) -> None:
    """Adam and AdamW keep the same states; one flag decides what their weight decay means."""
    live = group.hyperparameters.get(_DECOUPLED)
    kinds = {True: "decoupled (AdamW)", False: "L2 (Adam)"}
    for values in saved:
        if live is not None and values.get(_DECOUPLED, live) != live:
            raise MismatchError(
                f"weight decay of param group {number} is of another kind",
                parameter=listed(group.names),
                expected=f"{kinds[bool(live)]} in the live optimizer",
                found=f"{kinds[bool(values[_DECOUPLED])]} in the checkpoint",
                remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
            )


def transferable(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a saved group that a live group takes."""
    return {
        key: value
        for key, value in hyperparameters.items()
        if key not in _LIVE_KEYS and key != _DECOUPLED and not key.startswith("_ds_")
    }

"""Which saved parameter, state and group belongs to which live one. Pure, a part of planning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic_ckpt.catalog import FROZEN, MASTER, Catalog
from elastic_ckpt.destinations import Destinations, FlatPartition, LiveGroup
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError

#: Lists of members, and choices of implementation rather than of training: the live run's own are kept.
_IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "foreign", "fused", "capturable", "differentiable"})
_DECOUPLED = "decoupled_weight_decay"
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Matching:
    """Names of trainable parameters that are restored; names that stay fresh; saved names without a home."""

    restored: frozenset[str]
    fresh: frozenset[str]
    ignored: frozenset[str]


def adopt_live_names(catalog: Catalog, destinations: Destinations) -> Catalog:
    """Give a tied parameter that was saved under another of its names the name that the live engine uses.

    Which name of a tied parameter counts depends on the order in which modules are registered.
    """
    renamed = {}
    for name, others in destinations.ties.items():
        saved = [other for other in others if other in catalog.parameters]
        if name not in catalog.parameters and len(saved) == 1:
            renamed[saved[0]] = name
    if not renamed:
        return catalog
    return replace(
        catalog,
        parameters={renamed.get(name, name): saved for name, saved in catalog.parameters.items()},
        tensors={
            (renamed.get(name, name), key): replace(tensor, name=renamed.get(name, name))
            for (name, key), tensor in catalog.tensors.items()
        },
        notes=(*catalog.notes, *(f"tied: {old} in the checkpoint is {new} here" for old, new in renamed.items())),
    )


def match_parameters(catalog: Catalog, destinations: Destinations, strict: bool) -> Matching:
    """Match names of live and saved parameters, buffers and frozen weights.

    Raises:
        MismatchError: a name is on one side only and ``strict`` is set.
        UnsupportedError: a parameter was trainable on one side and frozen on the other.
    """
    live = {name for flat in destinations.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in destinations.wholes}
    live_names = live | {name for name, _ in wholes}
    _refuse_changed_roles(catalog, live, {name for name, key in wholes if key == FROZEN})
    missing = {name for name in live if name not in catalog.parameters}
    missing |= {name for name, key in wholes if (name, key) not in catalog.tensors}
    saved = set(catalog.parameters) | {name for name, key in catalog.tensors if key != MASTER}
    unexpected = saved - live_names
    if strict and (missing or unexpected):
        raise _names_differ(catalog, missing, unexpected)
    return Matching(frozenset(live - missing), frozenset(missing), frozenset(unexpected))


def _refuse_changed_roles(catalog: Catalog, live: set[str], live_frozen: set[str]) -> None:
    saved_frozen = set(catalog.names(FROZEN))
    for names, was, now in (
        (live & saved_frozen, "frozen", "trainable"),
        (live_frozen & set(catalog.parameters), "trainable", "frozen"),
    ):
        if names:
            raise UnsupportedError(
                f"a parameter that was {was} at save time is {now} now",
                parameter=_shorten(names),
                expected=f"{was}, as in the checkpoint",
                found=f"{now} in the live model",
                remedy="set requires_grad as it was when the checkpoint was saved",
            )


def _names_differ(catalog: Catalog, missing: set[str], unexpected: set[str]) -> MismatchError:
    tied = {name: catalog.aliases[name] for name in missing if name in catalog.aliases}
    hint = f"; tied at save time, not now: {_shorten(f'{a} = {b}' for a, b in tied.items())}" if tied else ""
    return MismatchError(
        "model and checkpoint do not have the same parameters and buffers",
        parameter=_shorten(missing or unexpected),
        file=catalog.source.folder,
        expected=f"in the model but not in the checkpoint: {_shorten(missing)}",
        found=f"in the checkpoint but not in the model: {_shorten(unexpected)}{hint}",
        remedy="load_checkpoint(..., load_module_strict=False) restores what matches and reports the rest",
    )


def match_states(
    catalog: Catalog, destinations: Destinations, matching: Matching
) -> tuple[tuple[str, ...], list[Mapping[str, float] | None]]:
    """Find out which states to restore, and the scalar states (``step``) of every flat partition.

    Returns:
        The elementwise keys, and per flat partition its scalars; ``None`` where the checkpoint holds no state
        for any of its parameters.

    Raises:
        UnsupportedError: the checkpoint holds a state of unknown layout.
        MismatchError: the optimizers keep different states, or one flat tensor would need two step counts.
    """
    if catalog.opaque_states:
        key, description = next(iter(catalog.opaque_states.items()))
        raise UnsupportedError(
            f"optimizer state {key!r} has a layout that cannot be cut for another topology yet",
            parameter=key,
            file=catalog.source.folder,
            expected="one value per element of the partition, or one per tensor",
            found=description,
            remedy="load at the topology it was saved with, or with load_optimizer_states=False",
        )
    stateful = {name for name, key in catalog.tensors if key in catalog.state_keys}
    stateful |= {name for name, saved in catalog.parameters.items() if saved.scalars}
    if not stateful:
        return (), [None] * len(destinations.flats)
    saved_scalars = {key for saved in catalog.parameters.values() for key, _ in saved.scalars}
    saved = (set(catalog.state_keys), saved_scalars)
    live = (set(destinations.state_keys), set(destinations.scalar_keys))
    if saved != live:
        raise MismatchError(
            "the checkpoint was saved by an optimizer that keeps other states",
            file=catalog.source.folder,
            expected=f"{_shorten(live[0] | live[1])} (live optimizer {destinations.optimizer})",
            found=_shorten(saved[0] | saved[1]),
            remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
        )
    scalars = [_flat_scalars(catalog, flat, matching, stateful) for flat in destinations.flats]
    for flat, values in zip(destinations.flats, scalars, strict=True):
        if values is not None and set(values) != live[1]:
            raise DamagedError(
                "the checkpoint holds states of these parameters, but not all of their scalar states",
                parameter=_shorten(flat.members),
                file=catalog.source.folder,
                expected=f"{_shorten(live[1])} beside {_shorten(live[0])}",
                found=_shorten(values),
                remedy="restore the missing files, or load with load_optimizer_states=False",
            )
    return tuple(sorted(saved[0])), scalars


def _flat_scalars(
    catalog: Catalog, flat: FlatPartition, matching: Matching, stateful: set[str]
) -> Mapping[str, float] | None:
    """Scalar states of one flat tensor; ``None`` where the checkpoint holds no state of its members at all."""
    members = [name for name in flat.members if name in matching.restored]
    values = {name: catalog.parameters[name].scalars if name in stateful else None for name in members}
    distinct = sorted(set(values.values()), key=repr)
    if len(distinct) > 1:
        examples = [next(name for name in members if values[name] == value) for value in distinct[:2]]
        raise MismatchError(
            "parameters that now share one flat tensor were saved with different scalar states",
            parameter=", ".join(examples),
            expected="one value for all, since the optimizer keeps one per flat tensor",
            found=" and ".join("no state" if value is None else str(dict(value)) for value in distinct[:2]),
            remedy="put them in param groups of their own, or load with load_optimizer_states=False",
        )
    return None if not distinct or distinct[0] is None else dict(distinct[0])


def _saved_groups(catalog: Catalog, group: LiveGroup, matching: Matching) -> list[int]:
    return sorted({catalog.parameters[name].group for name in group.names if name in matching.restored})


def refuse_rebuilt_groups(catalog: Catalog, destinations: Destinations, matching: Matching) -> None:
    """An lr scheduler keeps its base rates by position: with other groups it would give each the wrong one.

    Raises:
        MismatchError: the live groups are not the saved ones, in the saved order.
    """
    sources = [_saved_groups(catalog, group, matching) for group in destinations.groups]
    moved = any(source not in ([], [number]) for number, source in enumerate(sources))
    if moved or len(sources) != len(catalog.groups):
        raise MismatchError(
            "param groups were rebuilt since the save, and the lr scheduler keeps its state by group position",
            expected=f"{len(catalog.groups)} groups in the saved order",
            found=f"live groups made of saved groups {sources}",
            remedy="build the groups as they were saved, or load with load_lr_scheduler_states=False",
        )


def match_groups(catalog: Catalog, destinations: Destinations, matching: Matching) -> tuple[Mapping[str, Any], ...]:
    """Hyperparameters for every live group, from the saved group that its members were in.

    Raises:
        MismatchError: members of one live group come from saved groups with different hyperparameters.
    """
    chosen: list[Mapping[str, Any]] = []
    for number, group in enumerate(destinations.groups):
        sources = _saved_groups(catalog, group, matching)
        values = [_transferable(catalog.groups[source]) for source in sources]
        if any(value != values[0] for value in values[1:]):
            differ = sorted(
                key for key in set().union(*values) if any(v.get(key) != values[0].get(key) for v in values)
            )
            raise MismatchError(
                f"param group {number} now mixes parameters whose saved groups had different hyperparameters",
                parameter=_shorten(group.names),
                expected="one set of hyperparameters for the group",
                found="; ".join(
                    f"saved group {source}: { ({key: value.get(key) for key in differ}) }"
                    for source, value in zip(sources, values, strict=True)
                ),
                remedy="build the param groups as they were when the checkpoint was saved",
            )
        _refuse_other_weight_decay(number, group, [catalog.groups[source] for source in sources])
        chosen.append(values[0] if values else {})
    return tuple(chosen)


def _refuse_other_weight_decay(number: int, group: LiveGroup, saved: list[Mapping[str, Any]]) -> None:
    """Adam and AdamW keep the same states and differ in one flag, which decides what weight decay means."""
    live = group.hyperparameters.get(_DECOUPLED)
    for values in saved:
        if live is not None and values.get(_DECOUPLED, live) != live:
            kinds = {True: "decoupled (AdamW)", False: "L2 (Adam)"}
            raise MismatchError(
                f"weight decay of param group {number} is of another kind",
                parameter=_shorten(group.names),
                expected=f"{kinds[bool(live)]} in the live optimizer",
                found=f"{kinds[bool(values[_DECOUPLED])]} in the checkpoint",
                remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
            )


def _transferable(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in hyperparameters.items()
        if key not in _IMPLEMENTATION_KEYS and key != _DECOUPLED and not key.startswith("_ds_")
    }


def _shorten(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return (", ".join(ordered[:_NAMES_SHOWN]) or "none") + more

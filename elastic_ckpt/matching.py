"""Which saved parameter and state belongs to which live one, and what becomes of the rest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog
from elastic_ckpt.destinations import Destinations, FlatPartition
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError, listed
from elastic_ckpt.plan import Outcome

_NOT_SAVED = "not in the checkpoint: the model's own values stay"
_EXCLUDED = "saved without frozen parameters (exclude_frozen_parameters=True): the model's own values stay"
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


def match_parameters(catalog: Catalog, destinations: Destinations, strict: bool) -> Matching:
    """Match names of live and saved parameters, buffers and frozen weights.

    A parameter may have been frozen then and train now, or the other way round: its weights are restored.

    Raises:
        MismatchError: a name is on one side only and ``strict`` is set. Frozen parameters that were left out of
            the save on purpose are no such case.
    """
    live = {name for flat in destinations.flats for name in flat.members}
    wholes = {(whole.name, whole.key) for whole in destinations.wholes}
    weights = set(catalog.parameters) | set(catalog.names(FROZEN))
    buffers = set(catalog.names(BUFFER))
    found = {(name, key) for name, key in wholes if name in (buffers if key == BUFFER else weights)}
    missing = {"fp32": live - weights}
    missing |= {kind: {name for name, key in wholes - found if key == kind} for kind in (BUFFER, FROZEN)}
    excluded = missing.pop(FROZEN) if _frozen_were_left_out(catalog, destinations) else set()
    live_names = live | {name for name, _ in wholes}
    unexpected = (weights | buffers) - live_names
    if strict and (any(missing.values()) or unexpected):
        raise _names_differ(catalog, set().union(*missing.values()), unexpected)
    outcomes = [_outcome(role, "fresh", names, _NOT_SAVED) for role, names in missing.items()]
    outcomes.append(_outcome(FROZEN, "fresh", excluded, _EXCLUDED))
    outcomes.append(_outcome("fp32", "ignored", unexpected & set(catalog.parameters), _NO_PLACE))
    outcomes.append(_outcome(FROZEN, "ignored", unexpected & (weights - set(catalog.parameters)), _NO_PLACE))
    outcomes.append(_outcome(BUFFER, "ignored", unexpected & buffers, _NO_PLACE))
    return Matching(
        restored=frozenset(live & weights),
        wholes=frozenset(found),
        outcomes=tuple(outcome for outcome in outcomes if outcome.names),
    )


def _frozen_were_left_out(catalog: Catalog, destinations: Destinations) -> bool:
    """Whether the save left out frozen parameters on purpose, as far as it tells.

    ZeRO-2 and 3 list frozen parameters, none of them too, unless they are left out. Below, a save without them looks as
    if the model had none; of tied ones it keeps the second name.
    """
    return not catalog.frozen_recorded and set(catalog.names(FROZEN)) <= set(destinations.ties)


def _outcome(role: str, what: str, names: set[str], reason: str) -> Outcome:
    return Outcome(role, what, tuple(sorted(names)), reason)


def _names_differ(catalog: Catalog, missing: set[str], unexpected: set[str]) -> MismatchError:
    tied = {name: catalog.aliases[name] for name in missing if name in catalog.aliases}
    hint = f"; tied at save time, not now: {listed(f'{a} = {b}' for a, b in tied.items())}" if tied else ""
    return MismatchError(
        "model and checkpoint do not have the same parameters and buffers",
        parameter=listed(missing or unexpected),
        file=catalog.source.folder,
        expected=f"in the model but not in the checkpoint: {listed(missing)}",
        found=f"in the checkpoint but not in the model: {listed(unexpected)}{hint}",
        remedy=(
            "load_checkpoint(..., load_module_strict=False) restores what matches and reports the rest; renamed "
            'ones: "elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
        ),
    )


@dataclass(frozen=True)
class StateMatching:
    """What is known of optimizer states.

    Attributes:
        keys: the elementwise states to restore.
        scalars: per flat partition, its scalar states; ``None`` where the checkpoint holds no state for any of
            its parameters.
        stateful: parameters whose states are restored.
        outcomes: states that start fresh, and states without a place.
    """

    keys: tuple[str, ...]
    scalars: tuple[Mapping[str, float] | None, ...]
    stateful: frozenset[str]
    outcomes: tuple[Outcome, ...]


def match_states(catalog: Catalog, destinations: Destinations, matching: Matching) -> StateMatching:
    """Find out which states to restore, and the scalar states (``step``) of every flat partition.

    Raises:
        UnsupportedError: the checkpoint holds a state of unknown layout.
        MismatchError: the optimizers keep different states, or one flat tensor would need two step counts.
        DamagedError: states that belong together are only partly there.
    """
    _refuse_opaque(catalog)
    stateful = {name for name, key in catalog.tensors if key in catalog.state_keys}
    stateful |= {name for name, saved in catalog.parameters.items() if saved.scalars}
    if not stateful:
        reason = "the checkpoint holds no optimizer state (saved before the first step)"
        return StateMatching(
            (), (None,) * len(destinations.flats), frozenset(), (Outcome("optimizer states", "fresh", (), reason),)
        )
    _refuse_partial(catalog, stateful)
    keys = _common_keys(catalog, destinations)
    scalars = [_flat_scalars(catalog, flat, stateful & matching.restored) for flat in destinations.flats]
    for flat, values in zip(destinations.flats, scalars, strict=True):
        if values is not None and set(values) != set(destinations.scalar_keys):
            raise DamagedError(
                "the checkpoint holds states of these parameters, but not all of their scalar states",
                parameter=listed(flat.members),
                file=catalog.source.folder,
                expected=f"{listed(destinations.scalar_keys)} beside {listed(destinations.state_keys)}",
                found=listed(values),
                remedy="restore the missing files, or load with load_optimizer_states=False",
            )
    outcomes = _state_outcomes(catalog, destinations, matching, stateful, scalars)
    return StateMatching(keys, tuple(scalars), frozenset(stateful & matching.restored), outcomes)


def _refuse_opaque(catalog: Catalog) -> None:
    for key, description in catalog.opaque_states.items():
        raise UnsupportedError(
            f"optimizer state {key!r} has a layout that cannot be cut for another topology yet",
            parameter=key,
            file=catalog.source.folder,
            expected="one value per element of the partition, or one per tensor",
            found=description,
            remedy="load at the topology it was saved with, or with load_optimizer_states=False",
        )


def _refuse_partial(catalog: Catalog, stateful: set[str]) -> None:
    """A partitioned optimizer keeps states for all members of a group or for none: anything else is a loss."""
    if catalog.source.zero_stage == 0:
        return
    with_state = {catalog.parameters[name].group for name in stateful if name in catalog.parameters}
    for name, saved in catalog.parameters.items():
        if saved.group in with_state and name not in stateful:
            raise DamagedError(
                "the checkpoint holds no optimizer state of this parameter, but of others in its param group",
                parameter=name,
                file=catalog.source.folder,
                expected=f"{listed(catalog.state_keys)} and step",
                found="none",
                remedy="restore the missing files, or load with load_optimizer_states=False",
            )


def _common_keys(catalog: Catalog, destinations: Destinations) -> tuple[str, ...]:
    saved_scalars = {key for saved in catalog.parameters.values() for key, _ in saved.scalars}
    saved = (set(catalog.state_keys), saved_scalars)
    live = (set(destinations.state_keys), set(destinations.scalar_keys))
    if saved != live:
        raise MismatchError(
            "the checkpoint was saved by an optimizer that keeps other states",
            file=catalog.source.folder,
            expected=f"{listed(live[0] | live[1])} (live optimizer {destinations.optimizer})",
            found=listed(saved[0] | saved[1]),
            remedy="resume with the optimizer that saved it, or with load_optimizer_states=False",
        )
    return tuple(sorted(saved[0]))


def _flat_scalars(catalog: Catalog, flat: FlatPartition, stateful: set[str]) -> Mapping[str, float] | None:
    """Scalar states of one flat tensor; ``None`` where the checkpoint holds no state of its members at all."""
    values = {name: catalog.parameters[name].scalars for name in flat.members if name in stateful}
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


def _state_outcomes(
    catalog: Catalog,
    destinations: Destinations,
    matching: Matching,
    stateful: set[str],
    scalars: list[Mapping[str, float] | None],
) -> tuple[Outcome, ...]:
    """States that start fresh, by reason, and those of parameters that do not train any more."""
    role = "optimizer states"
    fresh: dict[str, set[str]] = {}
    for flat, values in zip(destinations.flats, scalars, strict=True):
        shared = "" if not values else f"; zeros, at its flat tensor's {_shown(values)}"
        for name in set(flat.members) - stateful:
            if name in catalog.parameters:
                why = "the checkpoint holds no state of it (it got no gradient before the save)"
            else:
                why = "it was frozen at save time" if name in matching.restored else "not in the checkpoint"
            fresh.setdefault(why + shared, set()).add(name)
    frozen_now = {name for name, key in matching.wholes if key == FROZEN}
    outcomes = [_outcome(role, "fresh", names, reason) for reason, names in sorted(fresh.items())]
    dropped = stateful & frozen_now
    if dropped:
        outcomes.append(_outcome(role, "skipped", dropped, "frozen now: only the weights are restored"))
    return tuple(outcomes)


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in values.items())


def weights_key(catalog: Catalog, name: str) -> str:
    """The catalog key under which a parameter's weights lie: it may have been frozen at save time."""
    return MASTER if name in catalog.parameters else FROZEN

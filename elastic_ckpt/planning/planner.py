"""CheckpointMetadata x LocalState -> LoadPlan. Pure: no files, collectives or devices.

Proves that every destination element is written exactly once, or raises an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan, Outcome
from elastic_ckpt.planning.live_names import adopt_live_kinds, adopt_live_names
from elastic_ckpt.planning.matching import Matching, StateMatching, match_parameters, match_states
from elastic_ckpt.planning.param_groups import NO_GROUPS, Groups, match_groups, with_own_values
from elastic_ckpt.planning.plan_builder import PlanBuilder
from elastic_ckpt.planning.replicas import compare_replicas, of_first_stage, with_own_copies
from elastic_ckpt.sharding.resolve import ReshardPlan, resolve
from elastic_ckpt.sharding.rules import ShardingRules


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to restore: the configured options, and whether names have to agree, and which states are wanted."""

    config: ElasticConfig = field(default_factory=ElasticConfig.model_construct)
    rules: ShardingRules = field(default_factory=ShardingRules)
    strict: bool = True
    optimizer_states: bool = True
    scheduler: bool = False

    @classmethod
    def of(cls, config: ElasticConfig, **more: bool) -> LoadOptions:
        """The options of a configuration, and ``more`` that depend on a live engine."""
        return cls(config, ShardingRules.of(config), **more)


@dataclass(frozen=True)
class Matched:
    """What a rank restores, the same for all data-parallel ranks of one coordinate."""

    saved: CheckpointMetadata  # after the user's renames
    metadata: CheckpointMetadata  # and under the live names of tied parameters
    parameters: Matching
    resharding: ReshardPlan
    states: StateMatching
    groups: Groups
    values: tuple[Outcome, ...] = ()  # what of the ranks' own values is not restored


def match(metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions) -> Matched:
    """Match checkpoint and live engine. Raises :class:`MismatchError` or :class:`DamagedError` if they do not fit."""
    config, model = options.config, local_state.model
    saved = with_own_copies(rename_saved(metadata, config.rename), model)
    metadata = adopt_live_kinds(adopt_live_names(saved, model), local_state.wholes)
    parameters = match_parameters(metadata, local_state, options.strict)
    resharding = resolve(metadata, model, parameters.names, options.rules, config.replicated_params)
    states, groups = StateMatching(), NO_GROUPS
    values: tuple[Outcome, ...] = ()
    if options.optimizer_states:
        metadata, values = with_own_values(metadata, local_state, config)
        states = match_states(metadata, local_state, parameters, config.convert_optimizer)
    if options.optimizer_states or options.scheduler:
        keep_live = config.param_groups == "keep_live"
        groups = match_groups(metadata, local_state, keep_live, options.optimizer_states, states.converted)
    return Matched(saved, metadata, parameters, resharding, states, groups, values)


def plan_load(
    metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions, known: Matched | None = None
) -> LoadPlan:
    """Plan the load of one rank; ``known`` is the result of :func:`match`, if already computed.

    The items, with those of the other data-parallel ranks for replicated targets, write exactly once each element that
    the checkpoint has for this rank: of master weights, states, buffers and frozen weights. Raises
    :class:`MismatchError` if both sides do not fit, :class:`DamagedError` if chunks leave a hole or overlap.
    """
    found, config = known or match(metadata, local_state, options), options.config
    metadata, resharding, states = found.metadata, found.resharding, found.states
    sources, hyperparameters = found.groups
    builder = PlanBuilder(metadata, local_state, resharding.transfers, may_change=config.on_change == "warn")
    return LoadPlan(
        reads=builder.build(found.parameters, states),
        replica_checks=compare_replicas(
            metadata, local_state.model, resharding, found.parameters.names, options.optimizer_states, found.saved
        ),
        may_differ=of_first_stage(metadata, options.rules, local_state.model).union(resharding.averaged),
        blocks=builder.blocks,
        restores_states=options.optimizer_states,
        scalars=states.scalars or (None,) * len(local_state.flats),
        hyperparameters=hyperparameters,
        saved_groups=len(metadata.groups),
        group_sources=sources,
        outcomes=_restored(found.parameters, states, sources if options.optimizer_states else ())
        + found.parameters.outcomes
        + states.outcomes
        + found.values,
        notes=(*metadata.notes, *resharding.notes, *states.notes, *builder.notes()),
    )


def _restored(matching: Matching, states: StateMatching, sources: Sequence[Sequence[int]]) -> tuple[Outcome, ...]:
    outcomes = [Outcome(MASTER, "restored", tuple(sorted(matching.restored)))]
    outcomes += [Outcome(key, "restored", names) for key, names in states.restored.items()]
    for kind in (BUFFER, FROZEN):
        outcomes.append(Outcome(kind, "restored", tuple(sorted(name for name, key in matching.wholes if key == kind))))
    for what, reason in (("restored", ""), ("fresh", "hyperparameters of the live group stay")):
        numbers = [str(n) for n, source in enumerate(sources) if (not source) == (what == "fresh")]
        outcomes.append(Outcome("param groups", what, tuple(numbers), reason))
    return tuple(outcome for outcome in outcomes if outcome.names)

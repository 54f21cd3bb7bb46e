"""CheckpointMetadata x LocalState -> LoadPlan. Pure: no files, collectives or devices.

Proves that every destination element is written exactly once, or raises an error that names the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import RenameRules, adopt_live_names, rename_saved
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan, Outcome
from elastic_ckpt.planning.matching import GroupMatching, Matching, match_groups, match_parameters
from elastic_ckpt.planning.plan_builder import PlanBuilder
from elastic_ckpt.planning.replicas import compare_replicas
from elastic_ckpt.planning.state_matching import NOTHING_MATCHED, StateMatching, match_states
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.sharding.resolve import STRICT, Resharding, resolve


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to restore.

    Attributes:
        strict: ``load_module_strict``.
        optimizer_states: ``load_optimizer_states``, and not ``load_module_only``.
        scheduler: whether the lr scheduler's state is restored too.
        keep_live_groups: whether live param groups keep their hyperparameters.
        rename: (pattern, replacement) for saved names.
        convert_optimizer: whether states of another optimizer of the same family are accepted.
        realign: whether 8-bit blocks may be requantized.
        rounding: whether fp32 masters and states may be rounded for a live engine that keeps them in bf16.
        rules: the user's tensor-parallel rules.
        replicated: how differing copies of replicated parameters are resolved: ``strict``, ``first`` or ``mean``.
    """

    strict: bool = True
    optimizer_states: bool = True
    scheduler: bool = False
    keep_live_groups: bool = False
    rename: RenameRules = ()
    convert_optimizer: bool = False
    realign: bool = True
    rounding: bool = True
    rules: RuleBook = field(default_factory=RuleBook)
    replicated: str = STRICT

    @classmethod
    def of(cls, config: ElasticConfig, **more: Any) -> LoadOptions:
        """The options of a configuration, and ``more`` that depend on a live engine."""
        return cls(
            rename=config.rename,
            convert_optimizer=config.convert_optimizer,
            realign=config.eight_bit_realign == "requantize",
            rounding=config.on_precision_loss == "warn",
            rules=RuleBook.of(config),
            replicated=config.replicated_params,
            **more,
        )


def plan_load(
    metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions, known: Resharding | None = None
) -> LoadPlan:
    """Plan the load of one rank.

    Args:
        metadata, local_state, options: the checkpoint, the live engine, and what to restore.
        known: the result of :func:`resharding_of`, if already computed.

    Returns:
        The plan. Its items, with those of the other data-parallel ranks for replicated slots, write exactly once each
        element that the checkpoint has for this rank: of master weights, states, buffers and frozen weights.

    Raises:
        MismatchError: names, shapes, dtypes, states or groups do not fit.
        DamagedError: chunks of a tensor leave a hole or overlap.
    """
    saved = rename_saved(metadata, options.rename)
    metadata, matching, restored = _matched(saved, local_state, options)
    resharding = known or resolve(metadata, local_state.model, restored, options.rules, options.replicated)
    states, groups = NOTHING_MATCHED, GroupMatching((), ())
    if options.optimizer_states:
        states = match_states(metadata, local_state, matching, options.convert_optimizer)
    if options.optimizer_states or options.scheduler:
        groups = match_groups(
            metadata, local_state, options.keep_live_groups, options.optimizer_states, states.converted
        )
    builder = PlanBuilder(metadata, local_state, resharding.transfers, options.realign, options.rounding)
    builder.add_all(matching, states)
    return LoadPlan(
        reads=builder.reads(),
        replica_checks=compare_replicas(
            metadata, local_state.model, resharding, restored, options.optimizer_states, saved
        ),
        averaged=frozenset(resharding.averaged),
        blocks=builder.blocks,
        restores_states=options.optimizer_states,
        scalars=states.scalars or (None,) * len(local_state.flats),
        scalar_forms=metadata.states.scalar_forms,
        hyperparameters=groups.hyperparameters,
        saved_groups=len(metadata.groups),
        group_sources=groups.sources,
        outcomes=_restored(matching, states, groups if options.optimizer_states else None)
        + matching.outcomes
        + states.outcomes,
        notes=(*metadata.notes, *resharding.notes, *states.notes, *builder.notes()),
    )


def resharding_of(metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions) -> Resharding:
    """How tensor-parallel shards are resharded, the same for all data-parallel ranks of this coordinate."""
    metadata, _, restored = _matched(rename_saved(metadata, options.rename), local_state, options)
    return resolve(metadata, local_state.model, restored, options.rules, options.replicated)


def _matched(
    saved: CheckpointMetadata, local_state: LocalState, options: LoadOptions
) -> tuple[CheckpointMetadata, Matching, frozenset[str]]:
    metadata = adopt_live_names(saved, local_state.model)
    matching = match_parameters(metadata, local_state, options.strict)
    return metadata, matching, matching.restored | {name for name, _ in matching.wholes}


def _restored(matching: Matching, states: StateMatching, groups: GroupMatching | None) -> tuple[Outcome, ...]:
    outcomes = [Outcome(MASTER, "restored", tuple(sorted(matching.restored)))]
    outcomes += [Outcome(key, "restored", names) for key, names in states.restored.items()]
    for kind in (BUFFER, FROZEN):
        outcomes.append(Outcome(kind, "restored", tuple(sorted(name for name, key in matching.wholes if key == kind))))
    sources = groups.sources if groups else ()
    for what, reason in (("restored", ""), ("fresh", "hyperparameters of the live group stay")):
        numbers = [str(n) for n, source in enumerate(sources) if (not source) == (what == "fresh")]
        outcomes.append(Outcome("param groups", what, tuple(numbers), reason))
    return tuple(outcome for outcome in outcomes if outcome.names)

"""CheckpointMetadata x LocalState -> LoadPlan. Pure: no files, collectives or devices.

Proves that every destination element is written exactly once, or raises an error that names the parameter.

A plan also lists replicas in the checkpoint that should be equal. Tensor-parallel ranks hold norms and some biases
whole, and pipeline stages hold tied weights twice. Each rank trains its own copy, and in long runs they drift apart; a
load at another degree can keep only one. Of a tied module, stages synchronize the tied weights alone: what else it has,
each stage has its own copy of, which only the first trains.

All comparisons are laid on one axis, by cost, and the axis is divided into one equal span per rank; a rank compares
what begins in its span. Large tensors are thereby split, small ones stay whole. Tied weights are divided over all ranks
of the job, since every rank knows of them; what the tensor-parallel ranks of a pipeline stage saved whole is known to,
and divided over, the ranks of the live stage that holds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import LocalState, ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.read_plan import NO_SCHEDULER, LoadPlan, Outcome, ReplicaCheck, RestoredShare, SchedulerPlan
from elastic_ckpt.core.strided import ShardSources, copied
from elastic_ckpt.errors import shortened
from elastic_ckpt.planning.added_rows import grown_parameters, keep_added_rows
from elastic_ckpt.planning.extra_states import one_value_each
from elastic_ckpt.planning.live_names import adopt_wrappers
from elastic_ckpt.planning.matching import Matching, match_parameters
from elastic_ckpt.planning.param_groups import (
    NO_GROUPS,
    Groups,
    groups_of_members,
    keys_of_new_scheduler,
    match_groups,
    rates_of_members,
    saved_values,
    with_own_values,
)
from elastic_ckpt.planning.plan_builder import PlanBuilder
from elastic_ckpt.planning.read_items import read_items, refuse_shared_bytes, rows_in_order
from elastic_ckpt.planning.replaced_values import describe_replaced
from elastic_ckpt.planning.state_errors import refuse_missing_files
from elastic_ckpt.planning.state_matching import StateMatching, match_states
from elastic_ckpt.planning.ties import adopt_live_kinds, adopt_live_names, refuse_untied, with_untied
from elastic_ckpt.sharding.resolve import FIRST, MEAN, ReshardPlan, resolve
from elastic_ckpt.sharding.rules import ShardingRules

#: Granularity of the division, in elements: 1 MiB of fp32.
GRAIN_NUMEL = 1 << 18
#: Fixed cost of reading one more copy, expressed in bytes.
_READ_NBYTES = 1 << 18
_ADDED = (
    "an lr scheduler outside of the engine is new since the save: it begins with the live lr, which param groups keep"
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to restore: the configured options, and whether names have to agree, and which states are wanted."""

    config: ElasticConfig = field(default_factory=ElasticConfig.model_construct)
    rules: ShardingRules = field(default_factory=ShardingRules)
    strict: bool = True
    optimizer_states: bool = True
    goes_on: bool = True  # the run of the checkpoint, whose schedules are restored: not with weights alone
    scheduler: SchedulerPlan = NO_SCHEDULER

    @classmethod
    def of(cls, config: ElasticConfig, **more: Any) -> LoadOptions:
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
    notes: tuple[str, ...] = ()


def match(metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions) -> Matched:
    """Match checkpoint and live engine. Raises :class:`MismatchError` or :class:`DamagedError` if they do not fit."""
    refuse_shared_bytes(metadata)
    config = options.config
    model = local_state.model
    if any(path.endswith(f"/{MASTER}.pt") for path in metadata.states.missing):
        refuse_missing_files(metadata)
    saved = with_own_copies(adopt_wrappers(rename_saved(metadata, config.rename), local_state), model)
    keeps_one = config.replicated_params == FIRST
    named = adopt_live_names(saved, model, options.optimizer_states, keeps_one)
    metadata = with_untied(adopt_live_kinds(named, local_state.wholes), model)
    parameters = match_parameters(metadata, local_state, options.strict)
    if options.strict and options.optimizer_states:
        refuse_untied(metadata, local_state)
    notes = one_value_each(metadata, parameters.extra_states, keeps_one)
    grown = grown_parameters(metadata, model, parameters.names, config.added_rows, options.rules)
    others = parameters.names.difference(each.name for each in grown)
    resharding = resolve(metadata, model, others, options.rules, config.replicated_params)
    keep_added_rows(resharding, grown)
    states = StateMatching()
    groups = NO_GROUPS
    values: tuple[Outcome, ...] = ()
    added = frozenset[str]()
    if options.optimizer_states:
        metadata, values = with_own_values(metadata, local_state, config, options.scheduler)
        states = match_states(metadata, local_state, parameters, config.convert_optimizer)
    if options.optimizer_states or options.scheduler.is_restored:
        keep_live = config.param_groups == "keep_live"
        if options.scheduler.others_begin_anew and not keep_live:
            added = keys_of_new_scheduler(metadata, local_state)
        groups = match_groups(
            metadata,
            local_state,
            keep_live,
            with_states=options.optimizer_states,
            converted=states.converted,
            kept_live=added | options.scheduler.kept_live,
            scheduled=options.scheduler.sets,
        )
    notes += (_ADDED,) if added else ()
    return Matched(saved, metadata, parameters, resharding, states, groups, values, notes)


def plan_load(
    metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions, known: Matched | None = None
) -> LoadPlan:
    """Plan the load of one rank; ``known`` is the result of :func:`match`, if already computed.

    The items, with those of the other data-parallel ranks for replicated targets, write exactly once each element that
    the checkpoint has for this rank: of master weights, states, buffers and frozen weights. Raises
    :class:`MismatchError` if both sides do not fit, :class:`DamagedError` if chunks leave a hole or overlap.
    """
    found = known or match(metadata, local_state, options)
    config = options.config
    metadata = found.metadata
    resharding = found.resharding
    states = found.states
    model = local_state.model
    names = found.parameters.names
    (sources, hyperparameters) = found.groups
    may_change = config.on_change == "warn"
    added = frozenset(resharding.added)
    builder = PlanBuilder(metadata, local_state, resharding.transfers, may_change, added)
    taken = hyperparameters if options.optimizer_states else ()
    replaced = describe_replaced(local_state, taken, options.scheduler)
    return LoadPlan(
        reads=builder.build(found.parameters, states),
        replica_checks=compare_replicas(metadata, model, resharding, names, options.optimizer_states, found.saved),
        may_differ=of_first_stage(metadata, options.rules, model).union(resharding.averaged),
        blocks=builder.blocks,
        restores_states=options.optimizer_states,
        scalars=states.scalars or (None,) * len(local_state.flats),
        hyperparameters=hyperparameters,
        saved_groups=len(metadata.groups),
        group_sources=sources,
        keeps_live=config.param_groups == "keep_live",
        member_groups=groups_of_members(metadata, local_state) if options.goes_on else (),
        start_values=_start_values(metadata, local_state, sources, options),
        saved_rates=rates_of_members(metadata, local_state) if options.goes_on else (),
        outcomes=_outcomes(found, sources if options.optimizer_states else (), _of_live_groups(local_state, options)),
        notes=(
            *found.notes,
            *metadata.notes,
            *resharding.notes,
            *states.notes,
            *builder.notes(),
            *([replaced] if replaced else ()),
        ),
        extra_states=found.parameters.extra_states,
        share=restored_share(metadata, local_state, found.parameters),
        replaces_live_values=bool(replaced),
    )


def _start_values(
    metadata: CheckpointMetadata, local_state: LocalState, sources: Sequence[Sequence[int]], options: LoadOptions
) -> tuple[Mapping[str, Any], ...]:
    """Per live group, the saved values of what the engine's schedule begins anew with."""
    if not options.optimizer_states:
        return ()
    return saved_values(metadata, local_state, sources, options.scheduler.kept_live)


def restored_share(metadata: CheckpointMetadata, local_state: LocalState, matching: Matching) -> RestoredShare:
    """How much is restored of the weights that this rank holds."""
    trained = [(part.range.numel, part.name in matching.restored) for part in local_state.fragments]
    frozen: list[tuple[int, bool]] = []
    placed_numel = 0
    for whole in local_state.wholes:
        if whole.key != FROZEN:
            continue
        is_restored = (whole.name, whole.key) in matching.wholes
        (trained if whole.trains else frozen).append((whole.range.numel, is_restored))
        if is_restored and (whole.name in metadata.parameters or not metadata.parameters):
            placed_numel += whole.range.numel
    return RestoredShare(
        trained_numel=sum(numel for numel, _ in trained),
        restored_numel=sum(numel for numel, is_restored in trained if is_restored),
        frozen_numel=sum(numel for numel, _ in frozen),
        frozen_restored_numel=sum(numel for numel, is_restored in frozen if is_restored),
        placed_numel=placed_numel,
    )


def _of_live_groups(local_state: LocalState, options: LoadOptions) -> str:
    """What becomes of param groups whose hyperparameters are not restored, in words."""
    stay = "hyperparameters of the live group stay"
    if options.scheduler.is_restored:
        return f"{stay}, but for what the restored lr scheduler sets"
    if options.scheduler.begins_anew:
        return f"{stay}, and the lr until the engine's lr scheduler, which restarts, sets it"
    if any("initial_lr" in group.hyperparameters for group in local_state.groups):  # torch's schedules set it
        stay += f", and the lr, too, {_of_others(options.scheduler)}; "
        stay += '"states": {"betas": "fresh"} in place of "keep_live" keeps single ones, and the lr is the saved one'
    return stay


def _of_others(scheduler: SchedulerPlan) -> str:
    """What becomes of a kept lr under schedules outside of the engine, in words."""
    if scheduler.goes_on:
        kinds = " and ".join(scheduler.goes_on)
        return f"from which {kinds} outside of the engine continues, restored or not, and not from the saved run's"
    if scheduler.sets_rates:
        return f"until {' and '.join(scheduler.sets_rates)} outside of the engine sets it after the first step"
    return "until a schedule outside of the engine sets it, unless that continues from it, as CosineAnnealingLR does"


def _outcomes(found: Matched, sources: Sequence[Sequence[int]], stay: str) -> tuple[Outcome, ...]:
    matching = found.parameters
    outcomes = [Outcome(MASTER, "restored", tuple(sorted(matching.restored)))]
    outcomes += [Outcome(key, "restored", names) for key, names in found.states.restored.items()]
    for kind in (BUFFER, FROZEN):
        outcomes.append(Outcome(kind, "restored", tuple(sorted(name for name, key in matching.wholes if key == kind))))
    for what, reason in (("restored", ""), ("fresh", stay)):
        numbers = [str(n) for n, source in enumerate(sources) if (not source) == (what == "fresh")]
        outcomes.append(Outcome("param groups", what, tuple(numbers), reason))
    restored = (outcome for outcome in outcomes if outcome.names)
    return (*restored, *matching.outcomes, *found.states.outcomes, *found.values)


def with_own_copies(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """The metadata in which each pipeline stage has its own copies of what stages do not synchronize.

    That is where the live model has such a parameter on the stages that saved it; elsewhere the first stage's copy is
    the parameter, as for DeepSpeed's converter. All ranks agree on which.
    """
    own = {name for name, stages in model.unsynchronized.items() if stages[1:] and metadata.stages.get(name) == stages}
    if not own or metadata.source.pp != model.coordinates.pp:
        return metadata
    tensors = dict(metadata.tensors)
    for name, key in [place for place in metadata.replicas if place[0] in own]:
        at = model.unsynchronized[name].index(model.coordinates.pp_rank) if name in model.layouts else 0
        tensors[name, key] = replace((tensors[name, key], *metadata.replicas[name, key])[at], name=name)
    note = f"every pipeline stage keeps its own copy, of which only the first is trained: {shortened(sorted(own))}"
    replicas = {place: copies for place, copies in metadata.replicas.items() if place[0] not in own}
    return replace(metadata, tensors=tensors, replicas=replicas, notes=(*metadata.notes, note))


def of_first_stage(metadata: CheckpointMetadata, book: ShardingRules, model: ModelLayout) -> frozenset[str]:
    """Tied parameters that only the first pipeline stage trains.

    The checkpoint declares so of tied modules whole, which counts for what the live stages do not synchronize; of known
    code bases (``book``) it is known.
    """
    if not metadata.replicas:
        return frozenset()
    preset = book.preset_for(metadata.run)
    found = set()
    for saved, name in {metadata.saved_names.get(name, name): name for name, _ in metadata.replicas}.items():
        is_declared = name in model.unsynchronized and metadata.declared.is_of_one_stage(saved)
        is_known = preset is not None and any(re.fullmatch(pattern, saved) for pattern in preset.one_stage)
        if is_known or is_declared:
            found.add(name)
    return frozenset(found)


def compare_replicas(
    metadata: CheckpointMetadata,
    model: ModelLayout,
    resharding: ReshardPlan,
    restored: Iterable[str],
    with_states: bool,
    of_job: CheckpointMetadata | None = None,
) -> tuple[ReplicaCheck, ...]:
    """This rank's share of the comparisons. Together the ranks of the job compare each element of each replica once.

    ``of_job``: the metadata common to all ranks, before this rank's tied names were changed; ``None`` if unchanged.
    """
    names = frozenset(restored)
    at = model.coordinates
    ranks = at.tp * at.partition_degree
    rank = at.tp_rank * at.partition_degree + at.partition_rank
    stateful = names.union(model.names) if with_states else frozenset(model.unsynchronized)
    if at.pp == 1:
        wanted = [*_of_tied(metadata, names, stateful), *_of_stage(metadata, resharding, names, with_states)]
        return tuple(_assigned(wanted, rank, ranks))
    of_all = [one for one in _of_tied(of_job or metadata, model.names, stateful) if one[0].key != BUFFER]
    known = {(check.name, check.key) for check, _ in of_all}
    alone = [one for one in _of_tied(metadata, names, stateful) if (one[0].name, one[0].key) not in known]
    alone += _of_stage(metadata, resharding, names, with_states)
    return (*_assigned(of_all, at.pp_rank * ranks + rank, at.pp * ranks), *_assigned(alone, rank, ranks))


#: A comparison whose replicas are not yet located in files: tensor and sources of each.
_Wanted = tuple[ReplicaCheck, Sequence[tuple[TensorMetadata, ShardSources]]]


def _assigned(wanted: Sequence[_Wanted], rank: int, ranks: int) -> Iterator[ReplicaCheck]:
    """What begins in span ``rank`` of as many equal ones as there are ranks, in whole grains."""
    costs = [sum(check.numel * ITEMSIZE[t.dtype] + _READ_NBYTES for t, _ in copies) for check, copies in wanted]
    first, last = (sum(costs) * border // ranks for border in (rank, rank + 1))
    base = 0
    for (check, copies), cost in zip(wanted, costs, strict=True):
        numel = check.numel
        if numel and base < last and base + cost > first:
            grains = -(-numel // GRAIN_NUMEL)
            # grain g begins at base + g * GRAIN_NUMEL * cost / numel
            start, stop = (
                min(max(-(-(border - base) * numel // (cost * GRAIN_NUMEL)), 0), grains) for border in (first, last)
            )
            if start < stop:
                start = start * GRAIN_NUMEL
                stop = min(stop * GRAIN_NUMEL, numel)
                found = (read_items(*copy, FlatRange(start, stop), to_target=-start) for copy in copies)
                yield replace(check, numel=stop - start, replicas=tuple(map(rows_in_order, found)), start=start)
        base += cost


def _wanted_tensors(
    metadata: CheckpointMetadata, tensors: Iterable[tuple[str, str]], names: frozenset[str], stateful: frozenset[str]
) -> Iterator[TensorMetadata]:
    """In the same order on each rank; ``stateful``: names of which optimizer states are compared too."""
    state_keys = frozenset(metadata.state_keys)
    for name, key in sorted(tensors):
        if name in names and (name in stateful or key not in state_keys):
            tensor = metadata.tensors[name, key]
            if not tensor.has_own_shape:
                yield tensor


def _of_tied(metadata: CheckpointMetadata, names: frozenset[str], stateful: frozenset[str]) -> Iterator[_Wanted]:
    """Tied weights that were saved on several pipeline stages or under several names: the first with each other one."""
    for tensor in _wanted_tensors(metadata, metadata.replicas.keys() & metadata.tensors.keys(), names, stateful):
        shards = range(len(tensor.shard_shapes))
        saved_name = metadata.saved_names.get(tensor.name, tensor.name)
        pairs = [(replica, shard) for replica in metadata.replicas[tensor.name, tensor.key] for shard in shards]
        for number, (replica, shard) in enumerate(pairs, 1):
            both = [(each, copied(shard, math.prod(each.shard_shapes[shard]))) for each in (tensor, replica)]
            numel = math.prod(tensor.shard_shapes[shard])
            both_names = (saved_name, replica.name) if replica.name != saved_name else ()
            yield ReplicaCheck(tensor.name, tensor.key, numel, (), number=number, names=both_names), both


def _of_stage(
    metadata: CheckpointMetadata, resharding: ReshardPlan, names: frozenset[str], with_states: bool
) -> Iterator[_Wanted]:
    """What several tensor-parallel ranks of one pipeline stage saved."""
    concerned = resharding.replicas | resharding.overlaps.keys()
    if not concerned:
        return
    tensors = (place for place in metadata.tensors if place[0] in concerned)
    for tensor in _wanted_tensors(metadata, tensors, names, names if with_states else frozenset()):
        name = tensor.name
        key = tensor.key
        if name in resharding.replicas:
            transfer = resharding.transfers.get((name, ""))
            taken = MEAN if transfer is not None and transfer.scale is not None else FIRST
            every = [(tensor, copied(shard, math.prod(shape))) for shard, shape in enumerate(tensor.shard_shapes)]
            is_guess = name in resharding.guessed and (key == BUFFER or len(tensor.shard_shapes[0]) > 1)
            yield ReplicaCheck(name, key, math.prod(tensor.shard_shapes[0]), (), taken, is_guess), every
        # numbers are negative, unlike those of tied replicas
        for number, pair in enumerate(resharding.overlaps.get(name, ()), 1):
            check = ReplicaCheck(name, key, pair[0][1].numel, (), number=-number)
            yield check, [(tensor, ShardSources((copy,))) for copy in pair]

"""CheckpointMetadata x LocalState -> Plan. Pure: no files, no collectives, no DeepSpeed, no devices.

Proves on the way that every destination element is written exactly once, or raises an error that names the
parameter which is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.fqn import RenameRules, adopt_live_names, rename_saved
from elastic_ckpt.core.local_state import Fragment, LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import Outcome, ReadItem, ReadPlan
from elastic_ckpt.errors import listed
from elastic_ckpt.planning.groups import GroupMatching, match_groups
from elastic_ckpt.planning.matching import Matching, match_parameters
from elastic_ckpt.planning.plan_builder import PlanBuilder
from elastic_ckpt.planning.replicas import compare_replicas
from elastic_ckpt.planning.shares import Sharing
from elastic_ckpt.planning.state_matching import NOTHING_MATCHED, StateMatching, match_states
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.sharding.resolve import STRICT, Resharding, resolve

#: What tensors that no optimizer owns are called.
_KINDS = {BUFFER: "buffers", FROZEN: "frozen parameters"}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to restore.

    Attributes:
        strict: ``load_module_strict``.
        optimizer_states: ``load_optimizer_states``, and not ``load_module_only``.
        scheduler: whether the state of an lr scheduler will be restored too.
        keep_live_groups: hyperparameters of the live param groups stay.
        rename: (pattern, replacement) for saved names.
        convert_optimizer: whether the states of another optimizer of the same family will do.
        realign: whether 8-bit blocks may be cut anew.
        rounding: whether fp32 masters and states may be rounded for a live engine that keeps them in bf16.
        rules: the user's word on how tensor-parallel ranks hold parameters.
        replicated: what is done about parameters that every tensor-parallel rank saved whole: ``strict``, ``first``
            or ``mean``.
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
) -> ReadPlan:
    """Plan the load of one rank.

    Args:
        metadata: what the checkpoint holds.
        local_state: what this rank's engine holds.
        options: what to restore.
        known: what :func:`resharding_of` says, where it has been asked.

    Returns:
        The plan; its copies and recodes, and those of the other data-parallel ranks for replicated slots, write each
        element of each master weight, state, buffer and frozen weight that the checkpoint holds for this rank exactly
        once.

    Raises:
        MismatchError: names, shapes, dtypes, states or groups do not fit.
        DamagedError: the checkpoint's chunks leave a hole in, or overlap on, a tensor.
    """
    renamed = rename_saved(metadata, options.rename)
    metadata = adopt_live_names(renamed, local_state.model)
    matching = match_parameters(metadata, local_state, options.strict)
    restored = matching.restored | {name for name, _ in matching.wholes}
    resharding = known or resolve(metadata, local_state.model, restored, options.rules, options.replicated)
    states = NOTHING_MATCHED
    groups = GroupMatching((), ())
    if options.optimizer_states:
        states = match_states(metadata, local_state, matching, options.convert_optimizer)
    if options.optimizer_states or options.scheduler:
        groups = match_groups(
            metadata, local_state, options.keep_live_groups, options.optimizer_states, states.converted
        )
    by_flat: dict[int, list[Fragment]] = {flat.index: [] for flat in local_state.flats}
    for fragment in local_state.fragments:
        by_flat[fragment.flat].append(fragment)
    at = local_state.model.coordinates
    builder = PlanBuilder(
        metadata,
        Sharing(at.dp, at.dp_rank),
        options.realign,
        resharding.transfers,
        at.tp_rank,
        options.rounding,
    )
    for flat in local_state.flats:
        fragments = by_flat[flat.index]
        builder.add_masters(flat, [part for part in fragments if part.name in matching.restored])
        held = [part for part in fragments if part.name in states.stateful]
        for link in states.links.get(flat.index, ()):
            builder.add_state(flat, link, fragments, held)
    converted: dict[str, list[str]] = {}
    for whole in local_state.wholes:
        if (whole.name, whole.key) in matching.wholes:
            dtype = builder.add_whole(whole)
            if dtype != whole.dtype:
                change = f"{_KINDS[whole.key]} converted from {dtype} to {whole.dtype}"
                converted.setdefault(change, []).append(whole.name)
    notes = [*metadata.notes, *resharding.notes, *states.notes]
    notes += [f"{change}: {listed(names)}" for change, names in converted.items()]
    notes += [
        f"{'masters' if key == MASTER else key} rounded from {saved} to {dtype}, in which the live engine keeps them"
        for key, saved, dtype in builder.rounded
    ]
    return ReadPlan(
        files=metadata.files,
        slots=tuple(builder.slots),
        copies=tuple(merge_neighbours(builder.copies)),
        shares=tuple(builder.sharing.shares),
        recodes=tuple(builder.recodes),
        comparisons=compare_replicas(
            metadata, local_state.model, resharding, restored, options.optimizer_states, renamed
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
        notes=tuple(notes),
    )


def resharding_of(metadata: CheckpointMetadata, local_state: LocalState, options: LoadOptions) -> Resharding:
    """How tensor-parallel shards are cut anew: the same for all data-parallel ranks beside this one."""
    metadata = adopt_live_names(rename_saved(metadata, options.rename), local_state.model)
    matching = match_parameters(metadata, local_state, options.strict)
    restored = matching.restored | {name for name, _ in matching.wholes}
    return resolve(metadata, local_state.model, restored, options.rules, options.replicated)


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


def merge_neighbours(copies: Iterable[ReadItem]) -> Iterator[ReadItem]:
    """Sort copies by file and offset, and join those that touch both in the file and in the slot."""
    last: ReadItem | None = None
    for copy in sorted(copies, key=lambda c: (c.file, c.byte_offset, c.slot, c.slot_offset)):
        if last is not None and _touches(last, copy):
            last = ReadItem(
                last.file, last.byte_offset, last.slot, last.slot_offset, last.numel + copy.numel, last.dtype
            )
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _touches(left: ReadItem, right: ReadItem) -> bool:
    return (
        left.rows == right.rows == 1
        and left.file == right.file
        and left.slot == right.slot
        and left.dtype == right.dtype
        and left.slot_offset + left.numel == right.slot_offset
        and left.byte_offset + left.numel * ITEMSIZE[left.dtype] == right.byte_offset
    )

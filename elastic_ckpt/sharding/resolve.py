"""CheckpointMetadata x ModelLayout -> the sources of each live tensor-parallel shard. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_ckpt.core.local_state import LiveShards, ModelLayout
from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata, is_floating
from elastic_ckpt.core.shard_specs import AVERAGED, BY_SHAPES, COLUMN, REPLICATED, REPLICATED_KINDS, SUMMED, VOCABULARY
from elastic_ckpt.core.strided import Overlap, ShardSources, TPLayout, blended, copied, duplicates, fused, reshard
from elastic_ckpt.errors import ElasticCkptError, shortened
from elastic_ckpt.sharding.rules import ShardingRules, refuse_other_code, tensor_of
from elastic_ckpt.sharding.specs import Sharding, Shardings, collected

STRICT = "strict"
FIRST = "first"
MEAN = "mean"


@dataclass
class ReshardPlan:
    """How one rank's shards are resharded."""

    #: (name, state key) -> sources of this rank's shard; an empty key covers master and states.
    transfers: dict[tuple[str, str], ShardSources] = field(default_factory=dict)
    replicas: set[str] = field(default_factory=set)  # names that every rank saved whole: copies should be equal
    averaged: set[str] = field(default_factory=set)  # those whose copies may differ
    overlaps: dict[str, tuple[Overlap, ...]] = field(default_factory=dict)  # name -> elements that several ranks saved
    guessed: set[str] = field(default_factory=set)  # names whose layout follows from their shapes alone
    added: set[str] = field(default_factory=set)  # names that have rows which the user says are new
    origins: Counter[str] = field(default_factory=Counter)  # who says how many parameters are sharded
    noted: dict[str, list[str]] = field(default_factory=dict)  # what the report says -> names of which it says so

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        shown = ", ".join(f"{origin} ({count})" for origin, count in sorted(self.origins.items()))
        notes = [f"tensor-parallel layout of parameters according to: {shown}"] if shown else []
        return (*notes, *(f"{note}: {shortened(names)}" for note, names in self.noted.items()))

    def note(self, note: str, name: str) -> None:
        self.noted.setdefault(note, []).append(name)


def resolve(
    metadata: CheckpointMetadata,
    model: ModelLayout,
    names: Iterable[str],
    rules: ShardingRules,
    policy: str,
    errors: dict[str, ElasticCkptError] | None = None,
) -> ReshardPlan:
    """Resolve the layout of each parameter and buffer in ``names`` on both sides, where the two degrees differ.

    At equal degrees every live shard is a saved one, whatever its layout, but for a vocabulary whose padding differs,
    if a rule of the user's says so. ``policy``: ``strict`` and ``first`` take the first rank's copy of a replicated
    parameter, ``mean`` the mean of all.

    Raises :class:`MismatchError` if a layout is unknown, or a rule contradicts the shapes; ``errors`` collects these by
    name instead.
    """
    names = sorted(names)
    plan = ReshardPlan()
    at = model.coordinates
    refuse_other_code(metadata, model, names, rules)
    shardings: Shardings | None = None
    for name in names:
        tensor = tensor_of(metadata, name)
        live = model.layouts.get(name)
        if tensor is None or (live is None and len(tensor.shard_shapes) == at.tp):
            continue
        live = live or LiveShards(())
        shapes = tensor.shard_shapes
        is_resharded = len(shapes) != len(live.shapes)
        if not is_resharded and shapes != live.shapes:
            rule = rules.of_user(name, metadata.saved_names.get(name, name), metadata.run)
            is_resharded = metadata.source.is_universal or (rule is not None and rule.kind == VOCABULARY)
        if is_resharded:
            with collected(errors, name):
                shardings = shardings or Shardings(metadata, rules, model.run)  # of the few loads that need it
                with shardings.of(tensor, live) as sharding:
                    _add(plan, sharding, at.tp_rank, policy)
    return plan


def _add(plan: ReshardPlan, sharding: Sharding, tp_rank: int, policy: str) -> None:
    """Resolve one parameter or buffer. Raises :class:`CannotSplit` for what contradicts its spec."""
    chosen = sharding.chosen
    name = sharding.name
    if (objection := sharding.objection()) is not None:
        raise sharding.contradiction(objection)
    source, target, is_recorded = sharding.layouts()
    if source is None or target is None or (chosen is not None and chosen.is_ambiguous and not is_recorded):
        raise sharding.undecided()
    is_concatenated = source.is_replicated or any(len(ranges) > 1 for ranges in source.ranges)
    if sharding.metadata.source.is_universal and source.degree > 1 and is_concatenated:
        note = "DeepSpeed's converter concatenated shards that are copies, or fused of several parameters; they were "
        plan.note(f"{note}divided again", name)
    spec = None if is_recorded else chosen
    plan.origins["recorded layouts" if spec is None else spec.origin] += 1
    if spec is not None and spec.origin == BY_SHAPES:
        plan.guessed.add(name)
        if len(sharding.shapes[0]) > 1:
            plan.note("only their shapes show how these are sharded", name)
    kind = COLUMN if chosen is None else chosen.kind
    if is_recorded and not (source.is_replicated and kind in (AVERAGED, SUMMED)):
        is_copy = source.is_replicated and source.degree > 1
        kind = REPLICATED if is_copy else VOCABULARY if kind == VOCABULARY else COLUMN
    if kind not in REPLICATED_KINDS:
        plan.transfers[name, ""] = _of_sharded(plan, sharding, kind, (source, target, is_recorded), tp_rank)
        if overlaps := duplicates(source):
            plan.overlaps[name] = overlaps
        return
    is_cut = not source.is_replicated or (kind == SUMMED and not target.is_replicated)
    if is_cut or source.shape != target.shape:
        raise sharding.contradiction("every rank holds the whole", is_recorded)
    if kind == AVERAGED:
        plan.averaged.add(name)
    plan.transfers[name, ""] = _of_replicated(plan, sharding, kind, (source, target), tp_rank, policy)


def _of_replicated(
    plan: ReshardPlan, sharding: Sharding, kind: str, layouts: tuple[TPLayout, TPLayout], tp_rank: int, policy: str
) -> ShardSources:
    source, target = layouts
    name = sharding.name
    numel = math.prod(target.shape)
    shards = source.degree
    if kind == SUMMED:
        # the value is the sum of the ranks' shares; gradient and moments of a share are those of the sum
        plan.transfers[name, MASTER] = plan.transfers[name, FROZEN] = blended(shards, numel, 1 / target.degree)
        note = "sums of shares of the ranks, each of which moves by the learning rate: from here on the sums move "
        plan.note(f"{note}{target.degree}/{shards} times as far; scale their rate to continue as before", name)
    elif shards > 1:
        plan.replicas.add(name)
    if not target.is_replicated:  # by recorded layouts: replicated when saved, now sharded
        return reshard(fused(target.shape, target.dim, [[target.shape[target.dim]]]), target, tp_rank)
    takes_mean = kind == AVERAGED or (kind == REPLICATED and policy == MEAN)
    is_mean = shards > 1 and takes_mean and is_floating(sharding.tensor.dtype)
    return blended(shards, numel, 1 / shards) if is_mean else copied(0, numel)


def _of_sharded(
    plan: ReshardPlan, sharding: Sharding, kind: str, layouts: tuple[TPLayout, TPLayout, bool], tp_rank: int
) -> ShardSources:
    source, target, is_recorded = layouts
    if (source.shape, source.dim) != (target.shape, target.dim):
        if kind != VOCABULARY or source.shape[1:] != target.shape[1:] or source.dim or target.dim:
            shapes = f"{source.shape} in the checkpoint and {target.shape} in the live model"
            raise sharding.contradiction(f"the whole parameter would be {shapes}", is_recorded and kind != VOCABULARY)
        # a vocabulary of another size, whose difference has to be padding
        said = None if sharding.chosen is None else sharding.chosen.vocabulary
        real = said or sharding.metadata.declared.vocabulary
        if target.shape[0] < source.shape[0] and (real is None or real > target.shape[0]):
            raise sharding.vocabulary_too_small(source.shape[0], target.shape[0], real)
    transfer = reshard(source, target, tp_rank if target.degree > 1 else 0)
    if transfer.missing:
        if kind != VOCABULARY:
            raise sharding.contradiction("no saved shard has all of it", is_recorded)
        plan.note("rows of vocabulary padding that the checkpoint lacks keep the live values", sharding.name)
    return transfer

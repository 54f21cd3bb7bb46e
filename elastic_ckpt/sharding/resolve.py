"""CheckpointMetadata x ModelLayout -> the sources of each live tensor-parallel shard. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastic_ckpt.core.local_state import LiveLayout, ModelLayout
from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata, is_floating
from elastic_ckpt.core.strided import Overlap, ShardSources, TPLayout, blended, copied, duplicates, fused, reshard
from elastic_ckpt.core.tp_rules import AVERAGED, COLUMN, REPLICATED, SUMMED, VOCABULARY, WHOLE_KINDS, CannotSplit, Rule
from elastic_ckpt.errors import ElasticCkptError, shortened
from elastic_ckpt.sharding.rules import RuleSource, Sharded, ShardingRules, refuse_other_code, tensor_of
from elastic_ckpt.sharding.specs import (
    Decider,
    Decision,
    collected,
    contradiction,
    undecided,
    vocabulary_too_small,
)

STRICT = "strict"
FIRST = "first"
MEAN = "mean"


@dataclass(frozen=True)
class ReshardPlan:
    """How one rank's shards are resharded.

    Attributes:
        transfers: (name, state key) -> sources of this rank's shard; an empty key covers master and states.
        replicas, averaged: names that every rank saved whole, so that copies should be equal; those that may differ.
        overlaps: name -> elements of a sharded parameter that several ranks saved.
        guessed: names whose layout follows from their shapes alone.
        notes: sentences for the report.
    """

    transfers: dict[tuple[str, str], ShardSources] = field(default_factory=dict)
    replicas: set[str] = field(default_factory=set)
    averaged: set[str] = field(default_factory=set)
    overlaps: dict[str, tuple[Overlap, ...]] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()


def resolve(
    metadata: CheckpointMetadata,
    model: ModelLayout,
    names: Iterable[str],
    book: ShardingRules,
    policy: str,
    errors: dict[str, ElasticCkptError] | None = None,
) -> ReshardPlan:
    """Resolve the layout of each parameter and buffer in ``names`` on both sides, where the two degrees differ.

    At equal degrees every live shard is a saved one, whatever its layout. ``policy``: ``strict`` and ``first`` take the
    first rank's copy of a replicated parameter, ``mean`` the mean of all.

    Raises :class:`MismatchError` if a layout is unknown, or a rule contradicts the shapes; ``errors`` collects these by
    name instead.
    """
    resolver = _Resolver(metadata, model, book, policy, errors)
    names = sorted(names)
    refuse_other_code(metadata, model, names, book)
    for name in names:
        resolver.add(name)
    return replace(resolver.found, notes=tuple(resolver.notes()))


class _Resolver:
    def __init__(
        self,
        metadata: CheckpointMetadata,
        model: ModelLayout,
        book: ShardingRules,
        policy: str,
        errors: dict[str, ElasticCkptError] | None,
    ) -> None:
        self._metadata = metadata
        self._live = model
        self._book = book
        self._policy = policy
        self._errors = errors
        self.found = ReshardPlan()
        self._origins: Counter[str] = Counter()
        self._guessed_matrices: list[str] = []
        self._padded: list[str] = []
        self._divided: list[str] = []
        self._summed = 0
        self._is_universal = metadata.source.format == "universal"

    @cached_property
    def _decider(self) -> Decider:  # which looks at every tensor, for the few loads that need it
        return Decider(self._metadata, self._book, self._live.run)

    def notes(self) -> Iterator[str]:
        if self._origins:
            origins = ", ".join(f"{origin} ({count})" for origin, count in sorted(self._origins.items()))
            yield f"tensor-parallel layout of parameters according to: {origins}"
        if self._summed:
            times = f"{self._live.coordinates.tp}/{self._metadata.source.tp}"
            yield (
                f"{self._summed} parameters are sums of shares of the ranks, each of which moves by the learning "
                f"rate: from here on the sums move {times} times as far; scale their rate to go on as before"
            )
        if self._divided:
            yield (
                "DeepSpeed's converter concatenated shards that are copies, or fused of several parameters; they were "
                f"divided again: {shortened(self._divided)}"
            )
        if self._padded:
            shown = ", ".join(self._padded[:4])
            yield f"rows of vocabulary padding that the checkpoint lacks keep the live values: {shown}"
        if self._guessed_matrices:
            yield f"only their shapes tell how these are sharded: {shortened(self._guessed_matrices)}"

    def add(self, name: str) -> None:
        """Resolve one parameter or buffer."""
        tensor, layout = tensor_of(self._metadata, name), self._live.layouts.get(name)
        if tensor is None or (layout is None and len(tensor.shard_shapes) == self._live.coordinates.tp):
            return
        layout = layout or LiveLayout(())
        shapes = tensor.shard_shapes
        if len(shapes) == len(layout.shapes) and (not self._is_universal or shapes == layout.shapes):
            return
        with collected(self._errors, name):
            self._resolve(self._decider.sharded(tensor, layout))

    def _resolve(self, sharded: Sharded) -> None:
        chosen: RuleSource | None = None
        try:
            decision = self._decider.decide(sharded)
            chosen = decision.chosen
            self._cross_check(decision)
            source, target, is_recorded = decision.layouts()
        except CannotSplit as error:
            raise contradiction(sharded, chosen, str(error)) from error
        is_open = chosen is not None and chosen.is_ambiguous and not is_recorded
        if source is None or target is None or is_open:
            raise undecided(sharded, chosen, self._decider.structure.qkv_widths(sharded.name))
        if self._is_universal and (source.is_whole or any(len(ranges) > 1 for ranges in source.ranges)):
            self._divided += [sharded.name] if source.degree > 1 else []
        by_rule = None if is_recorded else chosen
        self._origins["recorded layouts" if by_rule is None else by_rule.origin] += 1
        if by_rule is not None and by_rule.is_guess:
            self.found.guessed.add(sharded.name)
            self._guessed_matrices += [sharded.name] if len(sharded.shapes[0]) > 1 else []
        kind = COLUMN if chosen is None else chosen.rule.kind
        if is_recorded and not (source.is_whole and kind in (AVERAGED, SUMMED)):
            kind = REPLICATED if source.is_whole and source.degree > 1 else VOCABULARY if kind == VOCABULARY else COLUMN
        if kind in WHOLE_KINDS:
            if source.shape != target.shape or not source.is_whole or (kind == SUMMED and not target.is_whole):
                raise contradiction(sharded, by_rule, "every rank holds the whole")
            self._add_whole(sharded, kind, source, target)
            return
        if (source.shape, source.dim) != (target.shape, target.dim):
            if kind != VOCABULARY:
                shapes = f"{source.shape} in the checkpoint and {target.shape} in the live model"
                raise contradiction(sharded, by_rule, f"the whole parameter would be {shapes}")
            self._check_padding(sharded, chosen, source, target)
        transfer = reshard(source, target, self._live.coordinates.tp_rank if target.degree > 1 else 0)
        if transfer.missing:
            if kind != VOCABULARY:
                raise contradiction(sharded, by_rule, "no saved shard has all of it")
            self._padded.append(sharded.name)
        self.found.transfers[sharded.name, ""] = transfer
        overlaps = duplicates(source)
        if overlaps:
            self.found.overlaps[sharded.name] = overlaps

    def _check_padding(self, sharded: Sharded, chosen: RuleSource | None, source: TPLayout, target: TPLayout) -> None:
        """Refuse a vocabulary of another size whose difference may be more than padding."""
        if source.shape[1:] != target.shape[1:] or source.dim or target.dim:
            shapes = f"{source.shape} in the checkpoint and {target.shape} in the live model"
            raise contradiction(sharded, chosen, f"the whole parameter would be {shapes}")
        real = (chosen.rule.vocabulary if chosen is not None else None) or self._metadata.declared.vocabulary
        if target.shape[0] < source.shape[0] and (real is None or real > target.shape[0]):
            raise vocabulary_too_small(sharded, source.shape[0], target.shape[0], real)

    def _cross_check(self, decision: Decision) -> None:
        """Refuse rules that contradict each other (unless the user's) or the shapes of other parameters."""
        sharded, chosen = decision.sharded, decision.chosen
        certain = [source for source in decision.sources if not source.is_guess]
        for other in certain[1:]:
            if not certain[0].is_users and _differ(certain[0].rule, other.rule):
                raise contradiction(sharded, certain[0], f"but {other.rule.kind}, according to {other.origin}")
        objection = None if chosen is None else self._decider.structure.objection(sharded.name, chosen)
        if objection is not None:
            raise contradiction(sharded, chosen, objection)

    def _add_whole(self, sharded: Sharded, kind: str, source: TPLayout, target: TPLayout) -> None:
        name, numel, shards = sharded.name, math.prod(target.shape), source.degree
        if kind == SUMMED:
            # the value is the sum of the ranks' shares; gradient and moments of a share are those of the whole
            self._summed += 1
            share = blended(shards, numel, 1 / target.degree)
            self.found.transfers[name, MASTER] = self.found.transfers[name, FROZEN] = share
        elif shards > 1:
            self.found.replicas.add(name)
        if kind == AVERAGED:
            self.found.averaged.add(name)
        takes_mean = kind == AVERAGED or (kind == REPLICATED and self._policy == MEAN)
        if not target.is_whole:  # by recorded layouts: replicated when saved, now sharded
            whole = fused(target.shape, target.dim, [[target.shape[target.dim]]])
            self.found.transfers[name, ""] = reshard(whole, target, self._live.coordinates.tp_rank)
        elif shards > 1 and takes_mean and is_floating(sharded.tensor.dtype):
            self.found.transfers[name, ""] = blended(shards, numel, 1 / shards)
        else:
            self.found.transfers[name, ""] = copied(0, numel)


def _differ(one: Rule, other: Rule) -> bool:
    """Whether two rules contradict each other, as far as both are specific."""
    if "whole_only" in (one.kind, other.kind):
        return False
    whole = [rule.kind in WHOLE_KINDS for rule in (one, other)]
    if any(whole):
        return not all(whole)
    parts = [rule.sub_parameters for rule in (one, other)]
    return one.cut_dim != other.cut_dim or (None not in parts and parts[0] != parts[1])

"""CheckpointMetadata x ModelLayout -> the sources of each live tensor-parallel shard. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_ckpt.core.local_state import LiveShards, ModelLayout
from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata, is_floating
from elastic_ckpt.core.shard_specs import AVERAGED, COLUMN, REPLICATED, REPLICATED_KINDS, SUMMED, VOCABULARY
from elastic_ckpt.core.strided import Overlap, ShardSources, TPLayout, blended, copied, duplicates, fused, reshard
from elastic_ckpt.errors import ElasticCkptError, shortened
from elastic_ckpt.sharding.rules import ShardingRules, refuse_other_code, tensor_of
from elastic_ckpt.sharding.specs import Sharding, Shardings, collected

STRICT = "strict"
FIRST = "first"
MEAN = "mean"

_DIVIDED = (
    "DeepSpeed's converter concatenated shards that are copies, or fused of several parameters; they were divided again"
)
_GUESSED = "only their shapes show how these are sharded"


@dataclass
class ReshardPlan:
    """How one rank's shards are resharded."""

    #: (name, state key) -> sources of this rank's shard; an empty key covers master and states.
    transfers: dict[tuple[str, str], ShardSources] = field(default_factory=dict)
    replicas: set[str] = field(default_factory=set)  # names that every rank saved whole: copies should be equal
    averaged: set[str] = field(default_factory=set)  # those whose copies may differ
    #: Name -> elements of a sharded parameter that several ranks saved.
    overlaps: dict[str, tuple[Overlap, ...]] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)  # names whose layout follows from their shapes alone
    notes: tuple[str, ...] = ()  # sentences for the report


def resolve(
    metadata: CheckpointMetadata,
    model: ModelLayout,
    names: Iterable[str],
    rules: ShardingRules,
    policy: str,
    errors: dict[str, ElasticCkptError] | None = None,
) -> ReshardPlan:
    """Resolve the layout of each parameter and buffer in ``names`` on both sides, where the two degrees differ.

    At equal degrees every live shard is a saved one, whatever its layout. ``policy``: ``strict`` and ``first`` take the
    first rank's copy of a replicated parameter, ``mean`` the mean of all.

    Raises :class:`MismatchError` if a layout is unknown, or a rule contradicts the shapes; ``errors`` collects these by
    name instead.
    """
    names = sorted(names)
    refuse_other_code(metadata, model, names, rules)
    resolver = _Resolver(metadata, model, policy)
    shardings: Shardings | None = None
    for name in names:
        tensor, live = tensor_of(metadata, name), model.layouts.get(name)
        if tensor is None or (live is None and len(tensor.shard_shapes) == model.coordinates.tp):
            continue
        live = live or LiveShards(())
        shapes = tensor.shard_shapes
        if len(shapes) != len(live.shapes) or (metadata.source.is_universal and shapes != live.shapes):
            with collected(errors, name):
                shardings = shardings or Shardings(metadata, rules, model.run)  # of the few loads that need it
                with shardings.of(tensor, live) as sharding:
                    resolver.add(sharding)
    return resolver.done()


class _Resolver:
    def __init__(self, metadata: CheckpointMetadata, model: ModelLayout, policy: str) -> None:
        self._metadata = metadata
        self._at = model.coordinates
        self._policy = policy
        self._plan = ReshardPlan()
        self._origins: Counter[str] = Counter()
        self._noted: dict[str, list[str]] = {}
        self._summed = 0

    def done(self) -> ReshardPlan:
        """The plan of all that was added."""
        shown = ", ".join(f"{origin} ({count})" for origin, count in sorted(self._origins.items()))
        notes = [f"tensor-parallel layout of parameters according to: {shown}"] if shown else []
        if self._summed:
            notes.append(
                f"{self._summed} parameters are sums of shares of the ranks, each of which moves by the learning rate: "
                f"from here on the sums move {self._at.tp}/{self._metadata.source.tp} times as far; scale their rate "
                "to go on as before"
            )
        notes += [f"{note}: {shortened(names)}" for note, names in self._noted.items()]
        self._plan.notes = tuple(notes)
        return self._plan

    def add(self, sharding: Sharding) -> None:
        """Resolve one parameter or buffer. Raises :class:`CannotSplit` for what contradicts its spec."""
        chosen, plan, name = sharding.chosen, self._plan, sharding.name
        if (objection := sharding.objection()) is not None:
            raise sharding.contradiction(objection)
        source, target, is_recorded = sharding.layouts()
        if source is None or target is None or (chosen is not None and chosen.is_ambiguous and not is_recorded):
            raise sharding.undecided()
        is_concatenated = source.is_replicated or any(len(ranges) > 1 for ranges in source.ranges)
        if self._metadata.source.is_universal and source.degree > 1 and is_concatenated:
            self._note(_DIVIDED, name)
        spec = None if is_recorded else chosen
        self._origins["recorded layouts" if spec is None else spec.origin] += 1
        if spec is not None and spec.is_guess:
            plan.guessed.add(name)
            if len(sharding.shapes[0]) > 1:
                self._note(_GUESSED, name)
        kind = COLUMN if chosen is None else chosen.kind
        if is_recorded and not (source.is_replicated and kind in (AVERAGED, SUMMED)):
            is_copy = source.is_replicated and source.degree > 1
            kind = REPLICATED if is_copy else VOCABULARY if kind == VOCABULARY else COLUMN
        if kind not in REPLICATED_KINDS:
            self._add_sharded(sharding, kind, source, target, is_recorded)
            return
        is_cut = not source.is_replicated or (kind == SUMMED and not target.is_replicated)
        if is_cut or source.shape != target.shape:
            raise sharding.contradiction("every rank holds the whole", is_recorded)
        self._add_replicated(sharding, kind, source, target)

    def _add_sharded(self, sharding: Sharding, kind: str, source: TPLayout, target: TPLayout, recorded: bool) -> None:
        if (source.shape, source.dim) != (target.shape, target.dim):
            if kind != VOCABULARY or source.shape[1:] != target.shape[1:] or source.dim or target.dim:
                shapes = f"{source.shape} in the checkpoint and {target.shape} in the live model"
                raise sharding.contradiction(f"the whole parameter would be {shapes}", recorded and kind != VOCABULARY)
            # a vocabulary of another size, whose difference has to be padding
            said = None if sharding.chosen is None else sharding.chosen.vocabulary
            real = said or self._metadata.declared.vocabulary
            if target.shape[0] < source.shape[0] and (real is None or real > target.shape[0]):
                raise sharding.vocabulary_too_small(source.shape[0], target.shape[0], real)
        transfer = reshard(source, target, self._at.tp_rank if target.degree > 1 else 0)
        if transfer.missing:
            if kind != VOCABULARY:
                raise sharding.contradiction("no saved shard has all of it", recorded)
            self._note("rows of vocabulary padding that the checkpoint lacks keep the live values", sharding.name)
        self._plan.transfers[sharding.name, ""] = transfer
        if overlaps := duplicates(source):
            self._plan.overlaps[sharding.name] = overlaps

    def _add_replicated(self, sharding: Sharding, kind: str, source: TPLayout, target: TPLayout) -> None:
        name, numel, shards, plan = sharding.name, math.prod(target.shape), source.degree, self._plan
        if kind == SUMMED:
            # the value is the sum of the ranks' shares; gradient and moments of a share are those of the sum
            self._summed += 1
            plan.transfers[name, MASTER] = plan.transfers[name, FROZEN] = blended(shards, numel, 1 / target.degree)
        elif shards > 1:
            plan.replicas.add(name)
        if kind == AVERAGED:
            plan.averaged.add(name)
        takes_mean = kind == AVERAGED or (kind == REPLICATED and self._policy == MEAN)
        if not target.is_replicated:  # by recorded layouts: replicated when saved, now sharded
            unsharded = fused(target.shape, target.dim, [[target.shape[target.dim]]])
            plan.transfers[name, ""] = reshard(unsharded, target, self._at.tp_rank)
        elif shards > 1 and takes_mean and is_floating(sharding.tensor.dtype):
            plan.transfers[name, ""] = blended(shards, numel, 1 / shards)
        else:
            plan.transfers[name, ""] = copied(0, numel)

    def _note(self, note: str, name: str) -> None:
        self._noted.setdefault(note, []).append(name)

"""Catalog x Destinations -> where each tensor-parallel shard comes from. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_ckpt.bands import Shape, Split, Transfer, blended, copied, fused, replicated, reshard
from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog, LogicalTensor
from elastic_ckpt.destinations import Destinations, LiveLayout
from elastic_ckpt.rules.book import RuleBook, Saying, is_ambiguous, is_fused
from elastic_ckpt.rules.kinds import AVERAGED, REPLICATED, SUMMED, VOCABULARY, WHOLE_KINDS, CannotSplit, Facts, split_by
from elastic_ckpt.rules.refusals import contradiction, undecided, vocabulary_too_small

STRICT = "strict"
FIRST = "first"
MEAN = "mean"


@dataclass(frozen=True)
class Resharding:
    """What a change of the tensor-parallel degree comes to.

    Attributes:
        transfers: (name, key of the state) -> where this rank's shard comes from; the key is empty where it is the same
            for master and states.
        replicas: names of which every saved rank held the whole, and which therefore should be equal.
        averaged: those of them of which a rule says that they may differ.
        notes: sentences for the report.
    """

    transfers: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    replicas: frozenset[str] = frozenset()
    averaged: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def resolve(
    catalog: Catalog, destinations: Destinations, names: Iterable[str], book: RuleBook, policy: str
) -> Resharding:
    """Find out how each parameter and buffer is cut on both sides, where the two degrees differ.

    Where they do not, every live shard is a saved one, and nobody has to know how it was cut.

    Args:
        catalog: what the checkpoint holds.
        destinations: what the live engine holds.
        names: of the parameters and buffers to restore.
        book: the user's rules and preset.
        policy: what is done about replicated parameters: ``strict`` and ``first`` take the first rank's, ``mean`` takes
            the mean of all.

    Raises:
        MismatchError: nobody says how a parameter is cut, or what is said and the shapes contradict each other.
    """
    if catalog.source.tp == destinations.tp:
        return Resharding()
    resolver = _Resolver(catalog, destinations, book, policy)
    for name in sorted(names):
        resolver.add(name)
    return resolver.resharding()


class _Resolver:
    def __init__(self, catalog: Catalog, destinations: Destinations, book: RuleBook, policy: str) -> None:
        self._catalog = catalog
        self._rank = destinations.tp_rank
        self._layouts = destinations.layouts
        self._book = book
        self._policy = policy
        self._facts = Facts(catalog.run, catalog.declared.vocabulary)
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._replicas: set[str] = set()
        self._averaged: set[str] = set()
        self._origins: Counter[str] = Counter()
        self._padded: list[str] = []

    def resharding(self) -> Resharding:
        """All that was found out."""
        origins = ", ".join(f"{origin} ({count})" for origin, count in sorted(self._origins.items()))
        notes = [f"tensor-parallel layout of parameters according to: {origins}"] if origins else []
        if self._padded:
            shown = ", ".join(self._padded[:4])
            notes.append(f"rows of vocabulary padding that the checkpoint lacks keep the live values: {shown}")
        return Resharding(self._transfers, frozenset(self._replicas), frozenset(self._averaged), tuple(notes))

    def add(self, name: str) -> None:
        """One parameter or buffer."""
        tensor, layout = self._tensor(name), self._layouts.get(name)
        if tensor is None or layout is None:
            return
        saved = tensor.shard_shapes
        is_one_of_several = self._is_fused(name)
        sayings = self._book.said(name, saved, layout, self._catalog.declared, self._catalog.run, is_one_of_several)
        chosen = sayings[0] if sayings else None
        folder = self._catalog.source.folder
        if chosen is not None and is_ambiguous(chosen):
            why = f"{chosen.origin}: {chosen.rule.ambiguous}"
            raise undecided(name, folder, saved, layout.shapes, why, is_one_of_several)
        try:
            source, target = self._splits(name, saved, layout, chosen)
        except CannotSplit as error:
            raise contradiction(name, folder, saved, layout.shapes, chosen, str(error)) from error
        if source is None or target is None:
            raise undecided(name, folder, saved, layout.shapes, "nothing says so", is_one_of_several)
        self._origins["recorded maps" if chosen is None else chosen.origin] += 1
        self._choose(name, chosen, source, target)

    def _choose(self, name: str, chosen: Saying | None, source: Split, target: Split) -> None:
        kind = REPLICATED if chosen is None else chosen.rule.kind
        if kind in WHOLE_KINDS or (_holds_whole(source) and source.degree > 1):
            if source.shape != target.shape:
                self._refuse(name, source, target, chosen, "every rank holds the whole")
            self._add_whole(name, kind, source, target)
            return
        self._check_sizes(name, source, target, chosen)
        transfer = reshard(source, target, self._rank)
        if transfer.missing:
            self._padded.append(name)
        self._transfers[name, ""] = transfer

    def _tensor(self, name: str) -> LogicalTensor | None:
        found = (self._catalog.tensors.get((name, key)) for key in (MASTER, FROZEN, BUFFER))
        return next((tensor for tensor in found if tensor is not None), None)

    def _splits(
        self, name: str, saved: Sequence[Shape], layout: LiveLayout, chosen: Saying | None
    ) -> tuple[Split | None, Split | None]:
        """How both sides hold it; recorded layouts go before rules, and the user's rules before these."""
        by_user = chosen is not None and chosen.is_users
        recorded = self._catalog.declared.split(name) if len(saved) > 1 and not by_user else None
        if recorded is not None and tuple(map(recorded.shard_shape, range(recorded.degree))) != tuple(saved):
            raise CannotSplit(f"the checkpoint records a layout of {recorded.degree} ranks for {recorded.shape}")
        live = None if by_user else layout.split
        dims = [split.dim for split in (recorded, live) if split is not None]
        dim = dims[0] if dims else 0 if chosen is None else chosen.rule.cut_dim
        return recorded or self._one_side(saved, dim, chosen), live or self._one_side(layout.shapes, dim, chosen)

    def _one_side(self, shapes: Sequence[Shape], dim: int, chosen: Saying | None) -> Split | None:
        if len(shapes) == 1 and (chosen is None or chosen.rule.kind not in WHOLE_KINDS):
            shape = shapes[0]
            return fused(shape, dim, [[shape[dim]]]) if len(shape) > dim else replicated(shape, 1)
        return None if chosen is None else split_by(chosen.rule, shapes, self._facts)

    def _add_whole(self, name: str, kind: str, source: Split, target: Split) -> None:
        """Every saved rank held all of it."""
        numel, shards = math.prod(target.shape), source.degree
        if kind == SUMMED:
            # each rank adds its share of the value; the gradient of a share is that of the whole, and so are moments
            share = blended(shards, numel, 1 / target.degree)
            self._transfers[name, MASTER] = self._transfers[name, FROZEN] = share
        elif shards > 1:
            self._replicas.add(name)
        if kind == AVERAGED:
            self._averaged.add(name)
        if not _holds_whole(target):  # by recorded maps: whole on one side, cut on the other
            whole = fused(target.shape, target.dim, [[target.shape[target.dim]]])
            self._transfers[name, ""] = reshard(whole, target, self._rank)
        elif shards > 1 and (kind == AVERAGED or (kind == REPLICATED and self._policy == MEAN)):
            self._transfers[name, ""] = blended(shards, numel, 1 / shards)
        else:
            self._transfers[name, ""] = copied(0, numel)

    def _is_fused(self, name: str) -> bool:
        """Whether its name says that it is made of several; of a plain ``h_to_4h`` its counterpart tells otherwise."""
        if not is_fused(name) or "h_to_4h" not in name:
            return is_fused(name)
        stem = name.rpartition(".")[0].replace("h_to_4h", "4h_to_h")
        up, down = self._tensor(name), self._tensor(f"{stem}.weight")
        if up is None or down is None:
            return True
        rows = sum(shape[0] for shape in up.shard_shapes)
        return rows != sum(shape[1] for shape in down.shard_shapes if len(shape) > 1)

    def _check_sizes(self, name: str, source: Split, target: Split, chosen: Saying | None) -> None:
        if (source.shape, source.dim) == (target.shape, target.dim):
            return
        if chosen is None or chosen.rule.kind != VOCABULARY or source.shape[1:] != target.shape[1:] or source.dim:
            whole = (
                f"the whole parameter would be {source.shape} in the checkpoint and {target.shape} in the live model"
            )
            self._refuse(name, source, target, chosen, whole)
            return
        real = chosen.rule.vocabulary or self._facts.vocabulary
        if target.shape[0] < source.shape[0] and (real is None or real > target.shape[0]):
            raise vocabulary_too_small(name, self._catalog.source.folder, source.shape[0], target.shape[0], real)

    def _refuse(self, name: str, source: Split, target: Split, chosen: Saying | None, why: str) -> None:
        saved = [source.shard_shape(rank) for rank in range(source.degree)]
        live = [target.shard_shape(rank) for rank in range(target.degree)]
        raise contradiction(name, self._catalog.source.folder, saved, live, chosen, why)


def _holds_whole(split: Split) -> bool:
    size = split.shape[split.dim]
    return all(held == ((0, size),) for held in split.held)

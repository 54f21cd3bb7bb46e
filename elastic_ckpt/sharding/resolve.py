"""CheckpointMetadata x LocalState -> where each tensor-parallel shard comes from. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from elastic_ckpt.core.dtypes import is_floating
from elastic_ckpt.core.local_state import LiveLayout, LocalState
from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.strided import (
    Overlap,
    Shape,
    ShardSources,
    TPLayout,
    blended,
    copied,
    duplicates,
    fused,
    replicated,
    reshard,
)
from elastic_ckpt.core.tp_rules import (
    AVERAGED,
    COLUMN,
    REPLICATED,
    SUMMED,
    VOCABULARY,
    WHOLE_KINDS,
    CannotSplit,
    Facts,
    split_by,
)
from elastic_ckpt.sharding.book import Asked, RuleBook, Saying, choose, is_ambiguous, is_fused
from elastic_ckpt.sharding.cross_checks import Structure, disagreement, tensor_of
from elastic_ckpt.sharding.refusals import contradiction, undecided, vocabulary_too_small, wrongly_merged

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
        overlaps: name -> elements that several saved ranks held, of a parameter that is cut otherwise.
        guessed: names of which nothing but their shapes says how they are held.
        notes: sentences for the report.
    """

    transfers: dict[tuple[str, str], ShardSources] = field(default_factory=dict)
    replicas: frozenset[str] = frozenset()
    averaged: frozenset[str] = frozenset()
    overlaps: Mapping[str, tuple[Overlap, ...]] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def resolve(
    metadata: CheckpointMetadata, local_state: LocalState, names: Iterable[str], book: RuleBook, policy: str
) -> Resharding:
    """Find out how each parameter and buffer is cut on both sides, where the two degrees differ.

    Where they do not, every live shard is a saved one, and nobody has to know how it was cut.

    Args:
        metadata: what the checkpoint holds.
        local_state: what the live engine holds.
        names: of the parameters and buffers to restore.
        book: the user's rules and preset.
        policy: what is done about replicated parameters: ``strict`` and ``first`` take the first rank's, ``mean`` takes
            the mean of all.

    Raises:
        MismatchError: nobody says how a parameter is cut, or what is said and the shapes contradict each other.
    """
    resolver = _Resolver(metadata, local_state, book, policy)
    for name in sorted(names):
        resolver.add(name)
    return resolver.resharding()


@dataclass(frozen=True)
class _Held:
    """How both sides hold a parameter, and whether the checkpoint or the live parameter has recorded it in full."""

    source: TPLayout
    target: TPLayout
    is_recorded: bool


class _Resolver:
    def __init__(self, metadata: CheckpointMetadata, local_state: LocalState, book: RuleBook, policy: str) -> None:
        self._catalog = metadata
        self._rank = local_state.tp_rank
        self._degree = local_state.tp
        self._layouts = local_state.layouts
        self._is_universal = metadata.source.format == "universal"
        self._book = book
        self._policy = policy
        self._structure = Structure(metadata)
        self._guessed: list[str] = []
        self._facts = Facts(metadata.run, metadata.declared.vocabulary)
        self._transfers: dict[tuple[str, str], ShardSources] = {}
        self._replicas: set[str] = set()
        self._averaged: set[str] = set()
        self._overlaps: dict[str, tuple[Overlap, ...]] = {}
        self._origins: Counter[str] = Counter()
        self._padded: list[str] = []
        self._summed: list[str] = []

    def resharding(self) -> Resharding:
        """All that was found out."""
        origins = ", ".join(f"{origin} ({count})" for origin, count in sorted(self._origins.items()))
        notes = [f"tensor-parallel layout of parameters according to: {origins}"] if origins else []
        if self._summed:
            times = f"{self._degree}/{self._catalog.source.tp}"
            notes.append(
                f"{len(self._summed)} parameters are sums of shares of the ranks, each of which moves by the learning "
                f"rate: from here on the sums move {times} times as far; scale their rate to go on as before"
            )
        if self._padded:
            shown = ", ".join(self._padded[:4])
            notes.append(f"rows of vocabulary padding that the checkpoint lacks keep the live values: {shown}")
        matrices = [name for name in self._guessed if self._is_matrix(name)]
        if matrices:
            more = f" and {len(matrices) - 8} more" if len(matrices) > 8 else ""
            notes.append(f"only their shapes tell how these are held: {', '.join(matrices[:8])}{more}")
        return Resharding(
            self._transfers,
            frozenset(self._replicas),
            frozenset(self._averaged),
            self._overlaps,
            frozenset(self._guessed),
            tuple(notes),
        )

    def _is_matrix(self, name: str) -> bool:
        tensor = tensor_of(self._catalog, name)
        return tensor is not None and len(tensor.shard_shapes[0]) > 1

    def add(self, name: str) -> None:
        """One parameter or buffer."""
        tensor, layout = tensor_of(self._catalog, name), self._layouts.get(name)
        if tensor is None or (layout is None and len(tensor.shard_shapes) == self._degree):
            return
        layout = layout or LiveLayout(())
        shapes = tensor.shard_shapes
        was_merged = self._catalog.merged_from > 1 and len(shapes) == 1
        as_saved = len(shapes) == len(layout.shapes) and (not self._is_universal or shapes == layout.shapes)
        if as_saved and not was_merged:
            return
        saved_name = self._catalog.saved_names.get(name, name)
        fused_one = self._is_fused(name) or self._is_fused(saved_name)
        asked = Asked(name, saved_name, shapes, fused_one, len(set(layout.values)) > 1)
        if was_merged:
            self._refuse_wrong_merge(asked, layout)
        if as_saved:
            return
        self._resolve(asked, layout, tensor.dtype)

    def _resolve(self, asked: Asked, layout: LiveLayout, dtype: str) -> None:
        folder, chosen = self._catalog.source.folder, None
        try:
            sayings = self._book.said(asked, layout, self._catalog.declared, self._catalog.run)
            chosen = choose(sayings)
            self._cross_check(asked, layout.shapes, sayings, chosen)
            held = self._splits(asked, layout, chosen)
        except CannotSplit as error:
            raise contradiction(asked.name, folder, asked.shapes, layout.shapes, chosen, str(error)) from error
        ambiguous = chosen is not None and is_ambiguous(chosen)
        if held is None or (ambiguous and not held.is_recorded):
            why = f"{chosen.origin}: {chosen.rule.ambiguous}" if chosen is not None and ambiguous else "nothing says so"
            raise undecided(
                asked.name,
                folder,
                asked.shapes,
                layout.shapes,
                why,
                asked.is_fused,
                self._structure.qkv_widths(asked.name),
            )
        self._origins["recorded layouts" if held.is_recorded or chosen is None else chosen.origin] += 1
        if chosen is not None and chosen.is_guess and not held.is_recorded:
            self._guessed.append(asked.name)
        self._choose(asked, chosen, held, is_floating(dtype))

    def _choose(self, asked: Asked, chosen: Saying | None, held: _Held, is_float: bool) -> None:
        source, target = held.source, held.target
        is_whole = _holds_whole(source)
        kind = chosen.rule.kind if chosen is not None else COLUMN
        if held.is_recorded and not (is_whole and kind in (AVERAGED, SUMMED)):
            kind = REPLICATED if is_whole and source.degree > 1 else VOCABULARY if kind == VOCABULARY else COLUMN
        if kind in WHOLE_KINDS:
            if source.shape != target.shape or not is_whole or (kind == SUMMED and not _holds_whole(target)):
                self._refuse(asked, held, chosen, "every rank holds the whole")
            self._add_whole(asked.name, kind, source, target, is_float)
            return
        self._check_sizes(asked, kind, held, chosen)
        transfer = reshard(source, target, self._rank)
        if transfer.missing and kind != VOCABULARY:
            self._refuse(asked, held, chosen, "no saved shard has all of it")
        if transfer.missing:
            self._padded.append(asked.name)
        self._transfers[asked.name, ""] = transfer
        overlaps = duplicates(source)
        if overlaps:
            self._overlaps[asked.name] = overlaps

    def _cross_check(
        self, asked: Asked, live: Sequence[Shape], sayings: Sequence[Saying], chosen: Saying | None
    ) -> None:
        folder = self._catalog.source.folder
        two = disagreement(sayings)
        if two is not None:
            other = f"but {two[1].rule.kind}, according to {two[1].origin}"
            raise contradiction(asked.name, folder, asked.shapes, live, two[0], other)
        if chosen is not None:
            against = self._structure.objection(asked.name, chosen.rule, chosen.is_users)
            if against is not None:
                raise contradiction(asked.name, folder, asked.shapes, live, chosen, against)

    def _refuse_wrong_merge(self, asked: Asked, layout: LiveLayout) -> None:
        """DeepSpeed's converter puts shards of fused parameters side by side unless it is told of their parts."""
        declared, folder = self._catalog.declared, self._catalog.source.folder
        try:
            rule = declared.rule(asked.saved_name)
            sayings = self._book.said(asked, layout, declared, self._catalog.run)
        except CannotSplit as error:
            if asked.is_fused:
                raise contradiction(asked.name, folder, asked.shapes, layout.shapes, None, str(error)) from error
            return
        chosen = choose(sayings)
        if asked.is_fused:
            self._cross_check(asked, layout.shapes, sayings, chosen)
        if declared.is_recorded(asked.saved_name) or (rule is not None and rule.sub_parameters is not None):
            return
        in_parts = chosen is not None and (chosen.rule.sub_parameters is not None or bool(chosen.rule.slices))
        origin = chosen.origin if chosen is not None and in_parts else ""
        if not in_parts and layout.split is not None and not (chosen is not None and chosen.is_users):
            in_parts = any(len(held) > 1 for held in layout.split.held)
            origin = "the live parameter (a recorded layout)"
        if in_parts:
            raise wrongly_merged(asked.name, folder, self._catalog.merged_from, origin)
        if asked.is_fused and (chosen is None or is_ambiguous(chosen)):
            why = f"{chosen.origin}: {chosen.rule.ambiguous}" if chosen is not None else "nothing says so"
            raise undecided(
                asked.name, folder, asked.shapes, layout.shapes, why, True, self._structure.qkv_widths(asked.name)
            )

    def _splits(self, asked: Asked, layout: LiveLayout, chosen: Saying | None) -> _Held | None:
        """How both sides hold it; recorded layouts go before rules, and the user's rules before these."""
        by_user = chosen is not None and chosen.is_users
        ask = len(asked.shapes) > 1 and not by_user
        recorded = self._catalog.declared.split(asked.saved_name, asked.shapes) if ask else None
        live = None if by_user else layout.split
        dims = [split.dim for split in (recorded, live) if split is not None and not _holds_whole(split)]
        dim = dims[0] if dims else 0 if chosen is None else chosen.rule.cut_dim
        source = recorded or self._one_side(asked.shapes, dim, chosen)
        target = live or self._one_side(layout.shapes, dim, chosen)
        if source is None or target is None:
            return None
        return _Held(source, target, recorded is not None or (live is not None and len(asked.shapes) == 1))

    def _one_side(self, shapes: Sequence[Shape], dim: int, chosen: Saying | None) -> TPLayout | None:
        in_order = chosen is None or (chosen.rule.kind not in WHOLE_KINDS and 1 not in chosen.rule.slices)
        if len(shapes) == 1 and in_order:
            shape = shapes[0]
            return fused(shape, dim, [[shape[dim]]]) if len(shape) > dim else replicated(shape, 1)
        if chosen is None or is_ambiguous(chosen) or not shapes:
            return None
        return split_by(chosen.rule, shapes, self._facts)

    def _add_whole(self, name: str, kind: str, source: TPLayout, target: TPLayout, is_float: bool) -> None:
        """Every saved rank held all of it."""
        numel, shards = math.prod(target.shape), source.degree
        if kind == SUMMED:
            # each rank adds its share of the value; the gradient of a share is that of the whole, and so are moments
            self._summed.append(name)
            share = blended(shards, numel, 1 / target.degree)
            self._transfers[name, MASTER] = self._transfers[name, FROZEN] = share
        elif shards > 1:
            self._replicas.add(name)
        if kind == AVERAGED:
            self._averaged.add(name)
        if not _holds_whole(target):  # by recorded layouts: whole on one side, cut on the other
            whole = fused(target.shape, target.dim, [[target.shape[target.dim]]])
            self._transfers[name, ""] = reshard(whole, target, self._rank)
        elif shards > 1 and is_float and (kind == AVERAGED or (kind == REPLICATED and self._policy == MEAN)):
            self._transfers[name, ""] = blended(shards, numel, 1 / shards)
        else:
            self._transfers[name, ""] = copied(0, numel)

    def _is_fused(self, name: str) -> bool:
        """Whether its name says that it is made of several; of a plain ``h_to_4h`` its counterpart tells otherwise."""
        by_name = is_fused(name) and self._structure.gate_factor(name) != 1
        return by_name or self._structure.is_made_of_several(name)

    def _check_sizes(self, asked: Asked, kind: str, held: _Held, chosen: Saying | None) -> None:
        source, target = held.source, held.target
        if (source.shape, source.dim) == (target.shape, target.dim):
            return
        if kind != VOCABULARY or source.shape[1:] != target.shape[1:] or source.dim or target.dim:
            whole = (
                f"the whole parameter would be {source.shape} in the checkpoint and {target.shape} in the live model"
            )
            self._refuse(asked, held, chosen, whole)
        real = (chosen.rule.vocabulary if chosen is not None else None) or self._facts.vocabulary
        if target.shape[0] < source.shape[0] and (real is None or real > target.shape[0]):
            raise vocabulary_too_small(asked.name, self._catalog.source.folder, source.shape[0], target.shape[0], real)

    def _refuse(self, asked: Asked, held: _Held, chosen: Saying | None, why: str) -> NoReturn:
        live = [held.target.shard_shape(rank) for rank in range(held.target.degree)]
        said = None if held.is_recorded else chosen
        raise contradiction(asked.name, self._catalog.source.folder, asked.shapes, live, said, why)


def _holds_whole(split: TPLayout) -> bool:
    size = split.shape[split.dim]
    return all(held == ((0, size),) for held in split.held)

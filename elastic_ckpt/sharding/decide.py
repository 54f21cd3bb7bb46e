"""Decides how tensor-parallel ranks shard each parameter, for live engines, offline tools and inspection. Pure.

The user's rules go before layouts that are recorded in full, and these before other rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.tp_rules import COLUMN, WHOLE_KINDS, Rule, split_by
from elastic_ckpt.sharding.book import RuleBook, RuleSource, Sharded, choose
from elastic_ckpt.sharding.cross_checks import Structure

#: A checkpoint that declares patterns shards parameters that match none along dimension 0.
BY_DEFAULT = "the checkpoint's universal_checkpoint_info, by its default"
_NO_MODEL = LiveLayout(())


@dataclass(frozen=True)
class Decision:
    """All rules about one parameter, by precedence, and the chosen one, if any."""

    sharded: Sharded
    sources: Sequence[RuleSource]
    chosen: RuleSource | None

    def layouts(self) -> tuple[TPLayout | None, TPLayout | None, bool]:
        """The saved and the live layout (``None`` if unknown), and whether they are recorded in full.

        Raises :class:`CannotSplit` if the recorded layout or the rule contradicts the shapes.
        """
        sharded, by_user = self.sharded, self.chosen is not None and self.chosen.is_users
        declared = sharded.metadata.declared
        is_alone = len(sharded.shapes) == 1
        recorded = None if is_alone or by_user else declared.split(sharded.saved_name, sharded.shapes)
        live = None if by_user else sharded.live.split
        cut = [layout.dim for layout in (recorded, live) if layout is not None and not layout.is_whole]
        dim = cut[0] if cut else 0 if self.chosen is None else self.chosen.rule.cut_dim
        source = recorded or self._by_rule(sharded.shapes, dim)
        target = live or self._by_rule(sharded.live.shapes, dim)
        return source, target, recorded is not None or (live is not None and is_alone)

    def _by_rule(self, shapes: Sequence[Shape], dim: int) -> TPLayout | None:
        rule = None if self.chosen is None else self.chosen.rule
        if len(shapes) == 1 and (rule is None or (rule.kind not in WHOLE_KINDS and 1 not in rule.slices)):
            shape = shapes[0]
            return fused(shape, dim, [[shape[dim]]]) if len(shape) > dim else replicated(shape, 1)
        if self.chosen is None or self.chosen.is_ambiguous or not shapes:
            return None
        return split_by(self.chosen.rule, shapes, self.sharded.metadata.run)


class Decider:
    """Decides about the parameters of one checkpoint."""

    def __init__(self, metadata: CheckpointMetadata, book: RuleBook) -> None:
        self.metadata = metadata
        self.structure = Structure(metadata)
        self._book = book

    def sharded(self, tensor: TensorMetadata, live: LiveLayout = _NO_MODEL) -> Sharded:
        """A saved parameter or buffer with its live layout, if there is a live model."""
        saved_name = self.metadata.saved_names.get(tensor.name, tensor.name)
        return Sharded(self.metadata, tensor, live, self.structure.is_fused(tensor.name, saved_name))

    def decide(self, sharded: Sharded) -> Decision:
        """The decision for a live model. Raises :class:`CannotSplit` if the declaration cannot be understood."""
        sources = self._book.sources(sharded)
        return Decision(sharded, sources, choose(sources))

    def decide_offline(self, tensor: TensorMetadata) -> Decision:
        """As :meth:`decide`, without a live model: chooses neither a guess nor an ambiguous rule."""
        decision = self.decide(self.sharded(tensor))
        sharded, chosen = decision.sharded, decision.chosen
        if chosen is not None and not chosen.is_guess and not chosen.is_ambiguous:
            return decision
        is_plain = len(sharded.shapes) > 1 and not sharded.is_fused
        if self.metadata.declared.rules and is_plain and (sharded.name, BUFFER) not in self.metadata.tensors:
            # parameters that match no pattern are sharded along dimension 0: ``merge_tp_slices``, ds_to_universal.py
            return replace(decision, chosen=RuleSource(Rule(pattern=".*", kind=COLUMN), BY_DEFAULT))
        return replace(decision, chosen=None)

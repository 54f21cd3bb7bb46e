"""Decides how tensor-parallel ranks shard each parameter, for live engines, offline tools and inspection. Pure.

The user's rules go before layouts that are recorded in full, and these before other rules. Without a live model, a rule
for the saved shards gives the whole parameter, and its shards on any number of ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.tp_rules import COLUMN, VOCABULARY, WHOLE_KINDS, CannotSplit, Rule, relative_widths, split_by
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError
from elastic_ckpt.sharding.cross_checks import Structure
from elastic_ckpt.sharding.rules import RuleSource, Sharded, ShardingRules, choose, presets_for, tensor_of

#: A checkpoint that declares patterns shards parameters that match none along dimension 0.
BY_DEFAULT = "the checkpoint's universal_checkpoint_info, by its default"
_NO_MODEL = LiveLayout(())
_NO_RUN: Mapping[str, Any] = {}


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
    """Decides about the parameters of one checkpoint, for a live run with these arguments, if any."""

    def __init__(
        self, metadata: CheckpointMetadata, book: ShardingRules, live_run: Mapping[str, Any] = _NO_RUN
    ) -> None:
        self._book = book.for_run(metadata.run)
        self._live = self._book.completed(metadata, live_run)
        self.metadata = replace(metadata, run={**metadata.run, **self._live})

    @cached_property
    def structure(self) -> Structure:  # which looks at every tensor, for parameters whose layout changes
        """Relations between the shapes of the checkpoint's matrices."""
        return Structure(self.metadata)

    def sharded(self, tensor: TensorMetadata, live: LiveLayout = _NO_MODEL) -> Sharded:
        """A saved parameter or buffer with its live layout, if there is a live model."""
        saved_name = self.metadata.saved_names.get(tensor.name, tensor.name)
        is_fused, by_shapes = self.structure.is_fused(tensor.name, saved_name), self.structure.proven(tensor.name)
        return Sharded(self.metadata, tensor, live, is_fused, by_shapes, frozenset(self._live))

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


@contextmanager
def collected(errors: dict[str, ElasticCkptError] | None, name: str) -> Iterator[None]:
    """If ``errors`` is given, an :class:`ElasticCkptError` is put there under a parameter's name instead of raised."""
    try:
        yield
    except ElasticCkptError as error:
        if errors is None:
            raise
        errors[name] = error


def virtual_layouts(
    metadata: CheckpointMetadata,
    names: Iterable[str],
    tp: int,
    book: ShardingRules,
    errors: dict[str, ElasticCkptError] | None = None,
) -> dict[str, LiveLayout]:
    """The layout of each parameter, frozen weight and buffer over ``tp`` ranks.

    A vector or buffer without a rule is taken for replicated: a guess, which a load (and a conversion) verifies by
    comparing the saved copies.

    Raises, or collects in ``errors`` by name: :class:`DamagedError` if a name has no tensor, :class:`MismatchError` if
    a matrix has no rule, a rule does not fit, or a dimension is not divisible.
    """
    decider = Decider(metadata, book)
    layouts: dict[str, LiveLayout] = {}
    for name in names:
        with collected(errors, name):
            layouts[name] = _layout(decider, name, tp)
    return layouts


def known_rules(metadata: CheckpointMetadata, names: Iterable[str], book: ShardingRules) -> dict[str, Rule | None]:
    """The tensor-parallel rule of each parameter; ``None`` without a rule, or where a recorded map replaces it.

    Widths of sub-parameters are numbers, even where the rule takes them from the run. Raises :class:`MismatchError` if
    a rule does not fit the shapes.
    """
    decider = Decider(metadata, book)
    return {name: _known_rule(decider, name) for name in names}


def _known_rule(decider: Decider, name: str) -> Rule | None:
    metadata, tensor = decider.metadata, tensor_of(decider.metadata, name)
    if tensor is None or metadata.declared.is_recorded(metadata.saved_names.get(name, name)):
        return None
    chosen: RuleSource | None = None
    try:
        chosen = decider.decide_offline(tensor).chosen
        if chosen is None:
            return None
        parts = relative_widths(chosen.rule, metadata.run)
    except CannotSplit as error:
        raise contradiction(decider.sharded(tensor), chosen, str(error)) from error
    return chosen.rule if parts is None else chosen.rule.model_copy(update={"sub_parameters": parts})


def _layout(decider: Decider, name: str, tp: int) -> LiveLayout:
    tensor = tensor_of(decider.metadata, name)
    if tensor is None:
        raise DamagedError(
            "the checkpoint lists this parameter, but has no weights of it",
            parameter=name,
            file=decider.metadata.source.folder,
            expected="its fp32 master weights, or frozen weights",
            found="none",
            remedy="files are missing: restore the folder from its original, or take another tag",
        )
    if len(tensor.shard_shapes) == tp:
        return LiveLayout(tensor.shard_shapes)
    chosen: RuleSource | None = None
    try:
        decision = decider.decide_offline(tensor)
        chosen = decision.chosen
        shapes = (_shard(decider, decision, tp),) * tp
    except CannotSplit as error:
        raise contradiction(decider.sharded(tensor), chosen, str(error)) from error
    is_default = chosen is not None and chosen.origin == BY_DEFAULT
    return LiveLayout(shapes, dim=0, origin=BY_DEFAULT) if is_default else LiveLayout(shapes)


def _shard(decider: Decider, decision: Decision, tp: int) -> Shape:
    sharded, chosen = decision.sharded, decision.chosen
    source, _, is_recorded = decision.layouts()
    if chosen is None and not is_recorded and (sharded.tensor.key == BUFFER or len(sharded.shapes[0]) < 2):
        return sharded.shapes[0]
    if source is None or (chosen is None and not is_recorded):
        ambiguous = next((each for each in decision.sources if each.is_ambiguous), None)
        raise undecided(sharded, ambiguous, decider.structure.qkv_widths(sharded.name))
    if source.is_whole if is_recorded else chosen is None or chosen.rule.kind in WHOLE_KINDS:
        return sharded.shapes[0]
    dim, size = source.dim, source.shape[source.dim]
    if not is_recorded and chosen is not None and chosen.rule.cut_dim != dim:
        raise CannotSplit(f"cut along dimension {chosen.rule.cut_dim}, but its shape is {sharded.shapes[0]}")
    if chosen is not None and chosen.rule.kind == VOCABULARY:
        size = -(-size // tp) * tp  # padded, as Megatron does
    if size % tp:
        raise sharded.mismatch(
            f"dimension {dim} of this parameter does not divide by the tensor-parallel degree",
            expected=f"a multiple of {tp}",
            found=size,
            remedy="choose a degree that divides it",
        )
    return (*source.shape[:dim], size // tp, *source.shape[dim + 1 :])


def undecided(sharded: Sharded, chosen: RuleSource | None, widths: Sequence[int] | None) -> MismatchError:
    """A parameter's layout is unknown; ``widths``: of query, key and value, if it fuses these."""
    pattern, said = re.escape(sharded.name), chosen if chosen is not None and chosen.is_ambiguous else None
    if said is not None and re.fullmatch(said.rule.pattern, sharded.saved_name):
        pattern = said.rule.pattern  # one line settles all that it applies to
    choices: list[Mapping[str, object]] = [{"pattern": pattern, "kind": "column"}]
    if sharded.is_fused:
        shown = list(widths) if widths else "<relative widths>"
        choices.append({"pattern": pattern, "kind": "column", "sub_parameters": shown})
        meaning = (
            "the first where nothing is fused, or each head (or group) holds its own q, k and v; the second where each "
            "rank holds its parts one behind the other, each cut on its own: [heads, key-value heads, key-value heads] "
            "for q, k and v, [1, 1] for gate and up"
        )
    elif len(sharded.shapes[0]) == 1 and len({*sharded.shapes, *sharded.live.shapes}) == 1:
        choices = [{"pattern": pattern, "kind": kind} for kind in ("replicated", "summed")]
        meaning = "whichever it is"
    else:
        choices += [{"pattern": pattern, "kind": kind} for kind in ("row", "vocabulary", "replicated")]
        meaning = "whichever it is"
    named = presets_for(sharded) if said is None else ()
    presets = [f'"elastic_checkpoint": {{"tp_preset": "{each}"}}' for each in named]
    meaning += f". If one of these code bases saved it: {' or '.join(presets)}" if presets else ""
    fused = ": it is made of several, whose arrangement its shape does not tell" if sharded.is_fused else ""
    why = "nothing says so" if said is None else f"{said.origin}: {said.rule.ambiguous}"
    return sharded.mismatch(
        f"the tensor-parallel degree changes, and it is not known how this parameter is cut{fused}",
        expected="a rule of yours, of the checkpoint, of the live parameter or of a preset",
        found=f"{why}; {_both(sharded)}",
        remedy=f"{' or '.join(map(_config, choices))}: {meaning}",
    )


def contradiction(sharded: Sharded, chosen: RuleSource | None, why: str) -> MismatchError:
    """A rule, or the recorded layout if ``chosen`` is ``None``, does not fit a parameter's shapes."""
    layout = f"{chosen.rule.kind}, according to {chosen.origin}" if chosen else "a recorded layout"
    saved, live = sharded.shapes, sharded.live.shapes
    rests = {shape[1:] for shape in (*saved, *live)}
    rows = [sum((*shape, 1)[0] for shape in side) for side in (saved, live)]
    kind = "vocabulary" if len(rests) == 1 and rows[0] != rows[1] else "row"
    config = _config({"pattern": re.escape(sharded.name), "kind": kind})
    if chosen is None and len(saved) == len(live) == 1:
        padded = f"; if rows of padding are all that differs: {config}" if kind == "vocabulary" else ""
        return sharded.mismatch(
            "the shape of this parameter differs",
            expected=f"{live[0]} in the live model",
            found=f"{saved[0]} in the checkpoint",
            remedy=f"build the model with the sizes it was saved with{padded}",
        )
    return sharded.mismatch(
        "what is known of this parameter's tensor-parallel layout contradicts the shapes",
        expected=f"{layout}: {why}",
        found=_both(sharded),
        remedy=f"say how it is cut (column, row, vocabulary ...): {config}",
    )


def vocabulary_too_small(sharded: Sharded, saved: int, live: int, real: int | None) -> MismatchError:
    """Rows that may not be padding would be dropped; ``real``: rows that are not, if known."""
    known = f", of which {real} are no padding" if real else ", and nothing says which of them are padding"
    return sharded.mismatch(
        "the live vocabulary has fewer rows than the saved one",
        expected=f"{live} rows",
        found=f"{saved} rows{known}",
        remedy="build the model with a vocabulary that holds all tokens; if it does: "
        + _config({"pattern": re.escape(sharded.name), "kind": "vocabulary", "vocabulary": real or live}),
    )


def _both(sharded: Sharded) -> str:
    return f"{_shards(sharded.shapes)} in the checkpoint, {_shards(sharded.live.shapes)} in the live model"


def _shards(shapes: Sequence[Shape]) -> str:
    if not shapes:
        return "nothing yet"  # without a live model
    distinct = list(dict.fromkeys(shapes))
    return f"{len(shapes)} x {distinct[0]}" if len(distinct) == 1 else " + ".join(map(str, shapes))


def _config(rule: Mapping[str, object]) -> str:
    return f'"elastic_checkpoint": {{"tp_rules": [{json.dumps(rule)}]}}'

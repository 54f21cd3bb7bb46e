"""How the tensor-parallel shards of each parameter were cut, and who says so, without a live model. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import AMBIGUOUS, CUSTOM, WHOLE_KINDS, CannotSplit, Rule
from elastic_ckpt.sharding.book import RuleBook, tensor_of
from elastic_ckpt.sharding.decide import Decider
from elastic_ckpt.sharding.presets import Preset
from elastic_ckpt.tools.inspection.facts import RuleFacts, RuleUse

#: What :attr:`Layout.rule` says where nothing tells, and where what is said contradicts the shapes.
UNDECIDED, CONTRADICTED = "undecided", "contradicted"
_RECORDED = "the checkpoint's recorded map"
_GUESS = "a guess: nothing says so"


@dataclass(frozen=True)
class Layout:
    """The shards of one parameter or buffer.

    Attributes:
        shards: their shapes.
        whole: shape of the whole; ``None``: not known.
        rule: how they were cut, in words; empty: there is one shard, of which nothing is said.
        origin: who says so.
        is_whole: whether each shard is the whole.
        problem: of a contradicted one.
    """

    shards: tuple[Shape, ...]
    whole: Shape | None
    rule: str = ""
    origin: str = ""
    is_whole: bool = False
    problem: str = ""


def layouts_of(metadata: CheckpointMetadata, book: RuleBook) -> dict[str, Layout]:
    """The layout of every parameter and buffer, by name."""
    decider = Decider(metadata, book)
    names = dict.fromkeys((*metadata.parameters, *(name for name, key in metadata.tensors if key in (FROZEN, BUFFER))))
    found = {}
    for name in names:
        tensor = tensor_of(metadata, name)
        if tensor is None:  # a master that is missing
            saved = metadata.parameters[name]
            shards = saved.shards or (saved.shape,)
            found[name] = Layout(shards, shards[0] if len(shards) == 1 else None)
        else:
            found[name] = _layout(decider, tensor)
    return found


def _layout(decider: Decider, tensor: TensorMetadata) -> Layout:
    shards = tensor.shard_shapes
    alone = shards[0] if len(shards) == 1 else None
    try:
        decision = decider.decide_offline(tensor)
        chosen = decision.chosen
        if alone is not None:  # rules tell how others would cut it
            return Layout(shards, alone, in_words(chosen.rule), chosen.origin) if chosen else Layout(shards, alone)
        split, _, is_recorded = decision.layouts()
    except CannotSplit as error:
        return Layout(shards, alone) if alone is not None else Layout(shards, None, CONTRADICTED, problem=str(error))
    if split is not None and is_recorded:
        rule = "replicated" if split.is_whole else f"cut along dimension {split.dim}"
        return Layout(shards, split.shape, rule, _RECORDED, split.is_whole)
    if split is not None and chosen is not None:
        return Layout(shards, split.shape, in_words(chosen.rule), chosen.origin, chosen.rule.kind in WHOLE_KINDS)
    if (tensor.key == BUFFER or len(shards[0]) < 2) and len(set(shards)) == 1:
        return Layout(shards, shards[0], "replicated", _GUESS, is_whole=True)
    return Layout(shards, None, UNDECIDED)


def in_words(rule: Rule) -> str:
    """A rule, shortly."""
    if rule.kind in WHOLE_KINDS:
        return rule.kind
    parts = rule.sub_parameters
    several = "" if parts is None else " of q, k, v" if isinstance(parts, str) else f" of parts {_ratio(parts)}"
    return f"{rule.kind}, dimension {rule.cut_dim}" + (several if rule.kind != CUSTOM else "")


def _ratio(parts: Sequence[int]) -> str:
    shown = ":".join(map(str, parts[:8]))
    return f"{shown}:... ({len(parts)})" if len(parts) > 8 else shown


def rule_facts(
    metadata: CheckpointMetadata, layouts: Mapping[str, Layout], book: RuleBook, presets: Iterable[Preset]
) -> RuleFacts:
    """What is known of all shards together.

    Args:
        metadata: what the checkpoint holds.
        layouts: from :func:`layouts_of`.
        book: the user's rules and preset.
        presets: those that might know what nothing else does.
    """
    declared = metadata.declared
    patterns: dict[str, int] = {}
    for rule in dict(declared.rules).values():
        kind = "fused" if rule.sub_parameters else rule.kind
        patterns[kind] = patterns.get(kind, 0) + 1
    uses: dict[tuple[str, str], list[str]] = {}
    for name, layout in layouts.items():
        if layout.rule and layout.rule not in (UNDECIDED, CONTRADICTED):
            uses.setdefault((layout.rule, layout.origin), []).append(name)
    undecided = tuple(name for name, layout in layouts.items() if layout.rule == UNDECIDED)
    return RuleFacts(
        patterns=patterns,
        recorded=len({*declared.affine, *declared.widths}),
        vocabulary_rows=declared.vocabulary,
        unreadable=declared.unreadable,
        user_rules=len(book.rules),
        preset=None if book.preset is None else book.preset.name,
        uses=tuple(RuleUse(rule, origin, tuple(names)) for (rule, origin), names in sorted(uses.items())),
        undecided=undecided,
        contradictions={name: layout.problem for name, layout in layouts.items() if layout.problem},
        fitting_presets=_fitting(metadata, undecided, presets),
    )


def _fitting(metadata: CheckpointMetadata, names: Sequence[str], presets: Iterable[Preset]) -> dict[str, int]:
    """Presets -> for how many of these parameters they have a rule that leaves nothing open; those with the most."""
    counts = {}
    for preset in presets:
        first = [next((rule for rule in preset.rules if rule.applies(name, metadata.run)), None) for name in names]
        counts[preset.name] = sum(rule is not None and rule.kind != AMBIGUOUS for rule in first)
    most = max(counts.values(), default=0)
    return {name: count for name, count in counts.items() if count == most > 0}


def replicas(metadata: CheckpointMetadata, layouts: Mapping[str, Layout]) -> tuple[int, int]:
    """Parameters that every tensor-parallel rank saved whole: how many, and the bytes of all copies but the first."""
    names, nbytes = set(), 0
    for (name, key), tensor in metadata.tensors.items():
        if key != BUFFER and name in layouts and layouts[name].is_whole:
            names.add(name)
            nbytes += sum(map(math.prod, tensor.shard_shapes[1:])) * ITEMSIZE[tensor.dtype]
    return len(names), nbytes

"""How the tensor-parallel shards of each parameter were cut, and who says so, without a live model. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.tp_rules import AMBIGUOUS, CUSTOM, WHOLE_KINDS, CannotSplit, Rule
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.sharding.decide import Decider
from elastic_ckpt.sharding.presets import Preset
from elastic_ckpt.tools.inspection.facts import ParameterEntry, RuleFacts, Shape

#: What stands in place of a rule where nothing says so, and where a rule contradicts the shapes.
UNDECIDED, CONTRADICTED = "undecided", "contradicted"
#: Shape of the whole parameter (``None``: not known), how its shards were cut, and who says so; empty: nothing does.
Layout = tuple[Shape | None, str, str]


def layout_of(decider: Decider, tensor: TensorMetadata) -> tuple[Layout, str]:
    """How the shards of a parameter or buffer were cut, and how that contradicts their shapes; empty: it does not."""
    try:
        return _layout(decider, tensor), ""
    except CannotSplit as error:
        is_alone = len(tensor.shard_shapes) == 1
        return ((tensor.shape, "", ""), "") if is_alone else ((None, CONTRADICTED, ""), str(error))


def _layout(decider: Decider, tensor: TensorMetadata) -> Layout:
    shards = tensor.shard_shapes
    decision = decider.decide_offline(tensor)
    chosen = decision.chosen
    if len(shards) == 1:  # rules tell how others would cut it
        return (shards[0], _in_words(chosen.rule), chosen.origin) if chosen is not None else (shards[0], "", "")
    split, _, is_recorded = decision.layouts()
    if split is not None and is_recorded:
        rule = "replicated" if split.is_whole else f"cut along dimension {split.dim}"
        return split.shape, rule, "the checkpoint's recorded map"
    if split is not None and chosen is not None:
        return split.shape, _in_words(chosen.rule), chosen.origin
    if (tensor.key == BUFFER or len(shards[0]) < 2) and len(set(shards)) == 1:
        return shards[0], "replicated", "a guess: nothing says so"
    return None, UNDECIDED, ""


def _in_words(rule: Rule) -> str:
    if rule.kind in WHOLE_KINDS:
        return rule.kind
    parts = rule.sub_parameters
    if parts is None or rule.kind == CUSTOM:
        several = ""
    elif isinstance(parts, str):
        several = " of q, k, v"
    else:
        several = f" of parts {':'.join(map(str, parts[:8]))}" + (f":... ({len(parts)})" if len(parts) > 8 else "")
    return f"{rule.kind}, dimension {rule.cut_dim}{several}"


def rule_facts(
    metadata: CheckpointMetadata,
    parameters: Sequence[ParameterEntry],
    contradictions: Mapping[str, str],
    book: RuleBook,
    presets: Iterable[Preset],
) -> RuleFacts:
    """What is known of all shards together.

    Args:
        metadata: what the checkpoint holds.
        parameters, contradictions: of :func:`elastic_ckpt.tools.inspection.contents.parameters_of`.
        book: the user's rules and preset.
        presets: those that might know what nothing else does.
    """
    declared = metadata.declared
    uses: dict[tuple[str, str], list[str]] = {}
    for entry in parameters:
        if entry.rule not in ("", UNDECIDED, CONTRADICTED):
            uses.setdefault((entry.rule, entry.rule_from), []).append(entry.name)
    undecided = tuple(entry.name for entry in parameters if entry.rule == UNDECIDED)
    return RuleFacts(
        patterns=Counter("fused" if rule.sub_parameters else rule.kind for rule in dict(declared.rules).values()),
        recorded=len({*declared.affine, *declared.widths}),
        vocabulary_rows=declared.vocabulary,
        unreadable=declared.unreadable,
        user_rules=len(book.rules),
        preset=None if book.preset is None else book.preset.name,
        uses=tuple({"rule": rule, "origin": by, "parameters": names} for (rule, by), names in sorted(uses.items())),
        undecided=undecided,
        contradictions=contradictions,
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

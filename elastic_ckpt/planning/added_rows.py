"""Parameters that have more rows in the live model than in the checkpoint, as after tokens were added. Pure.

Rows are the first dimension, so that the saved ones are the beginning of the flattened parameter. Only what the user
names under ``"added_rows"`` is restored in part: more rows may be another model, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import EXPERTS
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.shard_specs import VOCABULARY
from elastic_ckpt.core.strided import Shape, ShardSources, StridedCopy
from elastic_ckpt.errors import ConfigError, MismatchError, Remedy, UnsupportedError, listed
from elastic_ckpt.sharding.resolve import ReshardPlan
from elastic_ckpt.sharding.rules import ShardingRules, tensor_of
from elastic_ckpt.sharding.specs import Shardings

_KEPT = "rows added since the save keep the model's own values, with states as the optimizer begins them"
_SAME_SIZES = "build the model with the sizes it was saved with"


@dataclass(frozen=True)
class Resized:
    """A parameter or buffer whose shape is not the saved one."""

    name: str
    saved: Shape
    live: Shape

    @property
    def has_more_rows(self) -> bool:
        """Whether more rows are all that differs. A buffer without any is a parameter that ZeRO-3 had partitioned."""
        return self.saved[1:] == self.live[1:] and self.live[:1] > self.saved[:1] > (0,)

    @property
    def sources(self) -> ShardSources:
        """The saved rows, and the elements of those that no file has."""
        saved = math.prod(self.saved)
        live = math.prod(self.live)
        return ShardSources(((0, StridedCopy(0, 0, saved)),), missing=(FlatRange(saved, live),))


def grown_parameters(
    metadata: CheckpointMetadata,
    model: ModelLayout,
    names: Iterable[str],
    patterns: Sequence[str],
    rules: ShardingRules,
) -> tuple[Resized, ...]:
    """The parameters in ``names`` whose new rows the user asks to keep.

    Raises :class:`MismatchError` if one has other shapes and is not asked for, unless a rule says that it is a padded
    vocabulary, or if one that is asked for has fewer rows; :class:`ConfigError` for a pattern of no parameter;
    :class:`UnsupportedError` for one with tensor-parallel shards of other rows.
    """
    others = list(_of_other_shapes(metadata, model, names))
    _refuse_unknown(metadata, model, patterns, others)
    _refuse_shards(metadata, model, [name for name in names if _is_asked(metadata, model, name, patterns)], rules)
    asked = [each for each in others if _is_asked(metadata, model, each.name, patterns)]
    for each in asked:
        if not each.has_more_rows:
            problem = '"added_rows" names a parameter that does not have more rows than in the checkpoint'
            both = f"{each.live} in the live model", f"{each.saved} in the checkpoint"
            raise metadata.error(MismatchError, problem, each.name, *both, _SAME_SIZES)
    settled = {each.name for each in asked}
    others = [each for each in others if each.name not in settled and not _is_vocabulary(metadata, model, each, rules)]
    has_more_experts = any(EXPERTS in name for name in model.names.difference(metadata.parameters))  # and so has a gate
    if others and all(each.has_more_rows for each in others) and not has_more_experts:
        raise _not_asked_for(metadata, others, asked, patterns)
    return tuple(asked)


def keep_added_rows(plan: ReshardPlan, grown: Iterable[Resized]) -> None:
    """Add to a plan that the first rows of these parameters are the saved ones."""
    for each in grown:
        plan.transfers[each.name, ""] = each.sources
        plan.added.add(each.name)
        plan.note(_KEPT, f"{each.name} ({each.saved[0]} -> {each.live[0]})")


def _of_other_shapes(metadata: CheckpointMetadata, model: ModelLayout, names: Iterable[str]) -> Iterable[Resized]:
    """What has another shape than in the checkpoint, where neither side has tensor-parallel shards."""
    for name in sorted(names):
        tensor = tensor_of(metadata, name)
        live = model.layouts.get(name)
        if tensor is None or live is None or len(tensor.shard_shapes) != 1 or len(live.shapes) != 1:
            continue
        if tensor.shard_shapes != live.shapes:
            yield Resized(name, tensor.shard_shapes[0], live.shapes[0])


def _is_asked(metadata: CheckpointMetadata, model: ModelLayout, name: str, patterns: Sequence[str]) -> bool:
    known = {name, metadata.saved_names.get(name, name), *model.ties.get(name, ())}
    return any(_matches(pattern, each) for pattern in patterns for each in known)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or re.fullmatch(pattern, name) is not None


def _refuse_shards(
    metadata: CheckpointMetadata, model: ModelLayout, asked: Iterable[str], rules: ShardingRules
) -> None:
    """Refuse parameters that either side has in tensor-parallel shards, where no rule says that rows are vocabulary.

    Such a rule restores the saved rows and keeps the others.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(asked):
        tensor = tensor_of(metadata, name)
        live = model.layouts.get(name)
        if tensor is None or live is None or len(tensor.shard_shapes) == len(live.shapes) == 1:
            continue
        if _rows_of(tensor.shard_shapes) & _rows_of(live.shapes):
            continue  # as many, in one way of counting them
        with Shardings(metadata, rules, model.run).of(tensor, live) as sharding:
            if sharding.chosen is None or sharding.chosen.kind != VOCABULARY:
                found[name] = f"{name} {_shown(live.shapes)}", f"{name} {_shown(tensor.shard_shapes)}"
    if found:
        problem = '"added_rows" does not act on parameters with tensor-parallel shards'
        rule = [{"pattern": re.escape(name), "kind": VOCABULARY} for name in found]
        text = "restores the saved rows with their states, and leaves the others as the model has them"
        remedy = Remedy(text, config={"tp_rules": rule})
        expected = "in the live model: " + listed(live for live, _ in found.values())
        have = "in the checkpoint: " + listed(saved for _, saved in found.values())
        raise metadata.error(UnsupportedError, problem, found, expected, have, remedy)


def _rows_of(shapes: Sequence[Shape]) -> set[int]:
    """How many rows a parameter may have, by the shapes of its shards: those of one, and of all together."""
    return {shapes[0][0], sum(shape[0] for shape in shapes)} if shapes and all(shapes) else set()


def _shown(shapes: Sequence[Shape]) -> str:
    return f"{len(shapes)} x {shapes[0]}" if len(set(shapes)) == 1 else " + ".join(map(str, shapes))


def _is_vocabulary(metadata: CheckpointMetadata, model: ModelLayout, resized: Resized, rules: ShardingRules) -> bool:
    """Whether :func:`~elastic_ckpt.sharding.resolve.resolve` knows that the difference is padding."""
    tensor = tensor_of(metadata, resized.name)
    if tensor is None:
        return False
    if not metadata.source.is_universal:
        rule = rules.of_user(resized.name, metadata.saved_names.get(resized.name, resized.name), metadata.run)
        return rule is not None and rule.kind == VOCABULARY
    with Shardings(metadata, rules, model.run).of(tensor, model.layouts[resized.name]) as sharding:
        return sharding.chosen is not None and sharding.chosen.kind == VOCABULARY


def _refuse_unknown(
    metadata: CheckpointMetadata, model: ModelLayout, patterns: Sequence[str], others: Sequence[Resized]
) -> None:
    live = model.names.union(*model.ties.values())
    names = live.union(metadata.saved_names.values(), metadata.aliases)  # by which a parameter may be named, too
    for pattern in patterns if live else ():
        if not any(_matches(pattern, name) for name in names):
            grown = [each.name for each in others if each.has_more_rows]
            others_named = [each for each in patterns if any(_matches(each, name) for name in names)]
            nearest = grown or get_close_matches(pattern, names, n=1, cutoff=0.0)
            remedy = Remedy(config={"added_rows": [*others_named, *nearest]})
            problem = '"added_rows" names no parameter of the model'
            raise ConfigError(problem, None, "a name, or a pattern of whole names", pattern, remedy=remedy)


def _not_asked_for(
    metadata: CheckpointMetadata, grown: Sequence[Resized], asked: Sequence[Resized], patterns: Sequence[str]
) -> MismatchError:
    problem = "the live model has more rows than the checkpoint, as after tokens were added"
    expected = "in the live model: " + listed(f"{each.name} {each.live}" for each in grown)
    found = "in the checkpoint: " + listed(f"{each.name} {each.saved}" for each in grown)
    names = [*(patterns if asked else ()), *(each.name for each in grown)]
    text = "restores the saved rows with their states, and leaves the others as the model has them, with states as the "
    remedy = Remedy(f"{text}optimizer begins them", config={"added_rows": names}), Remedy(_SAME_SIZES)
    return metadata.error(MismatchError, problem, (each.name for each in grown), expected, found, remedy)

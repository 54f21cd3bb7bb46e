"""How tensor-parallel ranks shard each parameter, for live engines, offline tools and inspection. Pure.

The user's rules go before layouts that are recorded in full, and these before other rules. Without a live model, a rule
for the saved shards gives the whole parameter, and its shards on any number of ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.tp_rules import (
    COLUMN,
    REPLICATED_KINDS,
    VOCABULARY,
    CannotSplit,
    Rule,
    relative_widths,
    split_by,
)
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError
from elastic_ckpt.sharding.cross_checks import ModelShapes
from elastic_ckpt.sharding.rules import RuleSource, ShardingRules, presets_for, tensor_of

#: A checkpoint that declares patterns shards parameters that match none along dimension 0.
BY_DEFAULT = "the checkpoint's universal_checkpoint_info, by its default"


class ShardSpec:
    """How one parameter or buffer is sharded, saved and live; without a live model, the latter has no shapes.

    Attributes:
        metadata, tensor, live: the checkpoint, the saved tensor, and what the live side records.
        name, saved_name: in the live model and in the checkpoint, which differ for tied and renamed parameters.
        shapes: of the saved shards.
        is_fused: whether it is made of several sub-parameters.
        by_shapes, by_live: what shapes prove, on which rules may depend as on the run's arguments; names of those
            arguments that are the live run's.
        sources: all rules about it, by precedence.
        chosen: the one that counts; ``None``: nothing says how it is sharded. Without a live model, no guess.

    Raises:
        CannotSplit: the checkpoint's declaration cannot be understood.
    """

    def __init__(self, specs: ShardSpecs, tensor: TensorMetadata, live: LiveLayout | None) -> None:
        self.metadata = specs.metadata
        self.tensor = tensor
        self.live = live or LiveLayout(())
        self.name = tensor.name
        self.saved_name = self.metadata.saved_names.get(self.name, self.name)
        self.shapes = tensor.shard_shapes
        self.by_shapes, self.by_live = specs.shapes.proven(self.name), specs.by_live
        self.is_fused = specs.shapes.is_fused(self.name, self.saved_name)
        self.sources: Sequence[RuleSource] = ()
        self.chosen: RuleSource | None = None
        self._specs = specs
        self._is_offline = live is None

    def resolve(self) -> ShardSpec:
        """The same, with its rules."""
        self.sources = self._specs.rules.sources(self)
        chosen = _first(self.sources)
        if self._is_offline and (chosen is None or chosen.is_guess or chosen.is_ambiguous):
            is_plain = len(self.shapes) > 1 and not self.is_fused
            chosen = None
            if self.metadata.declared.rules and is_plain and (self.name, BUFFER) not in self.metadata.tensors:
                # what matches no pattern is sharded along dimension 0: ``merge_tp_slices``, ds_to_universal.py
                chosen = RuleSource(Rule(pattern=".*", kind=COLUMN), BY_DEFAULT)
        self.chosen = chosen
        return self

    def layouts(self) -> tuple[TPLayout | None, TPLayout | None, bool]:
        """The saved and the live layout (``None`` if unknown), and whether they are recorded in full.

        Raises :class:`CannotSplit` if the recorded layout or the rule contradicts the shapes.
        """
        by_user, is_alone = self.chosen is not None and self.chosen.is_users, len(self.shapes) == 1
        recorded = None if is_alone or by_user else self.metadata.declared.split(self.saved_name, self.shapes)
        live = None if by_user else self.live.split
        cut = [layout.dim for layout in (recorded, live) if layout is not None and not layout.is_replicated]
        dim = cut[0] if cut else 0 if self.chosen is None else self.chosen.rule.cut_dim
        source = recorded or self._by_rule(self.shapes, dim)
        target = live or self._by_rule(self.live.shapes, dim)
        return source, target, recorded is not None or (live is not None and is_alone)

    def _by_rule(self, shapes: Sequence[Shape], dim: int) -> TPLayout | None:
        rule = None if self.chosen is None else self.chosen.rule
        if len(shapes) == 1 and (rule is None or rule.kind not in REPLICATED_KINDS):
            shape = shapes[0]
            return fused(shape, dim, [[shape[dim]]]) if len(shape) > dim else replicated(shape, 1)
        if rule is None or (self.chosen is not None and self.chosen.is_ambiguous) or not shapes:
            return None
        return split_by(rule, shapes, self.metadata.run)

    def objection(self) -> str | None:
        """What contradicts the chosen rule: another one (unless the user's), or the shapes of other parameters."""
        certain = [source for source in self.sources if not source.is_guess]
        for other in certain[1:]:
            if not certain[0].is_users and certain[0].rule.contradicts(other.rule):
                return f"but {other.rule.kind}, according to {other.origin}"
        return None if self.chosen is None else self._specs.shapes.objection(self.name, self.chosen)

    def mismatch(self, problem: str, expected: object, found: object, remedy: str) -> MismatchError:
        """An error about this parameter."""
        folder = self.metadata.source.folder
        return MismatchError(problem, folder, expected, found, parameter=self.name, remedy=remedy)

    def undecided(self) -> MismatchError:
        """Nothing says how it is sharded."""
        pattern, said = re.escape(self.name), next((each for each in self.sources if each.is_ambiguous), None)
        if said is not None and re.fullmatch(said.rule.pattern, self.saved_name):
            pattern = said.rule.pattern  # one line settles all that it applies to
        choices: list[Mapping[str, object]] = [{"pattern": pattern, "kind": "column"}]
        meaning = "whichever it is"
        if self.is_fused:
            choices.append(
                {**choices[0], "sub_parameters": self._specs.shapes.qkv_widths(self.name) or "<relative widths>"}
            )
            meaning = (
                "the first where nothing is fused, or each head (or group) holds its own q, k and v; the second where "
                "each rank holds its parts one behind the other: [heads, key-value heads, key-value heads] for q, k "
                "and v, [1, 1] for gate and up"
            )
        elif len(self.shapes[0]) == 1 and len({*self.shapes, *self.live.shapes}) == 1:
            choices = [{"pattern": pattern, "kind": kind} for kind in ("replicated", "summed")]
        else:
            choices += [{"pattern": pattern, "kind": kind} for kind in ("row", "vocabulary", "replicated")]
        named = presets_for(self) if said is None else ()
        presets = [f'"elastic_checkpoint": {{"tp_preset": "{each}"}}' for each in named]
        meaning += f". If one of these code bases saved it: {' or '.join(presets)}" if presets else ""
        why = "nothing says so" if said is None else f"{said.origin}: {said.rule.ambiguous}"
        of_several = ": it is made of several, whose arrangement its shape does not show" if self.is_fused else ""
        return self.mismatch(
            f"the tensor-parallel degree changes, and it is not known how this parameter is sharded{of_several}",
            expected="a rule of yours, of the checkpoint, of the live parameter or of a preset",
            found=f"{why}; {self._both()}",
            remedy=f"{' or '.join(map(_config, choices))}: {meaning}",
        )

    def contradiction(self, why: object, is_recorded: bool = False) -> MismatchError:
        """The chosen rule, or the recorded layout, does not fit the shapes."""
        chosen = None if is_recorded else self.chosen
        layout = f"{chosen.rule.kind}, according to {chosen.origin}" if chosen else "a recorded layout"
        saved, live = self.shapes, self.live.shapes
        rests = {shape[1:] for shape in (*saved, *live)}
        rows = [sum((*shape, 1)[0] for shape in side) for side in (saved, live)]
        kind = "vocabulary" if len(rests) == 1 and rows[0] != rows[1] else "row"
        config = _config({"pattern": re.escape(self.name), "kind": kind})
        if chosen is None and len(saved) == len(live) == 1:
            padded = f"; if rows of padding are all that differs: {config}" if kind == "vocabulary" else ""
            remedy = f"build the model with the sizes it was saved with{padded}"
            shapes = f"{live[0]} in the live model", f"{saved[0]} in the checkpoint"
            return self.mismatch("the shape of this parameter differs", *shapes, remedy)
        problem = "what is known of this parameter's tensor-parallel layout contradicts the shapes"
        remedy = f"say how it is sharded (column, row, vocabulary ...): {config}"
        return self.mismatch(problem, f"{layout}: {why}", self._both(), remedy)

    def vocabulary_too_small(self, saved: int, live: int, real: int | None) -> MismatchError:
        """Rows that may not be padding would be dropped; ``real``: rows that are not, if known."""
        known = f", of which {real} are no padding" if real else ", and nothing says which of them are padding"
        rule = {"pattern": re.escape(self.name), "kind": "vocabulary", "vocabulary": real or live}
        remedy = f"build the model with a vocabulary that holds all tokens; if it does: {_config(rule)}"
        problem = "the live vocabulary has fewer rows than the saved one"
        return self.mismatch(problem, f"{live} rows", f"{saved} rows{known}", remedy)

    def _both(self) -> str:
        return f"{_shards(self.shapes)} in the checkpoint, {_shards(self.live.shapes)} in the live model"


class ShardSpecs:
    """Makes the specs of one checkpoint, for a live run with these arguments, if any."""

    def __init__(
        self, metadata: CheckpointMetadata, rules: ShardingRules, live_run: Mapping[str, Any] | None = None
    ) -> None:
        self.rules = rules.for_run(metadata.run)
        self.by_live = self.rules.completed(metadata, live_run or {})
        self.metadata = replace(metadata, run={**metadata.run, **self.by_live})

    @cached_property
    def shapes(self) -> ModelShapes:  # which looks at every tensor, for parameters whose layout changes
        """Relations between the shapes of the checkpoint's matrices."""
        return ModelShapes(self.metadata)

    @contextmanager
    def of(self, tensor: TensorMetadata, live: LiveLayout | None = None) -> Iterator[ShardSpec]:
        """The spec of a saved parameter or buffer; :class:`CannotSplit` in the body becomes its contradiction."""
        spec = ShardSpec(self, tensor, live)
        try:
            yield spec.resolve()
        except CannotSplit as error:
            raise spec.contradiction(error) from error


def _first(sources: Sequence[RuleSource]) -> RuleSource | None:
    """The source of highest precedence; if it shards dimension 0, a vocabulary rule goes first."""
    if not sources:
        return None
    first = sources[0]
    if first.rule.kind == COLUMN and first.rule.cut_dim == 0 and first.rule.sub_parameters is None:
        return next((source for source in sources if source.rule.kind == VOCABULARY), first)
    if first.is_ambiguous:  # a live parameter may resolve what a preset leaves open
        return next((source for source in sources if not source.is_ambiguous and not source.is_guess), first)
    return first


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
    rules: ShardingRules,
    errors: dict[str, ElasticCkptError] | None = None,
) -> dict[str, LiveLayout]:
    """The layout of each parameter, frozen weight and buffer over ``tp`` ranks.

    A vector or buffer without a rule is taken for replicated: a guess, which a load (and a conversion) verifies by
    comparing the saved copies.

    Raises, or collects in ``errors`` by name: :class:`DamagedError` if a name has no tensor, :class:`MismatchError` if
    a matrix has no rule, a rule does not fit, or a dimension is not divisible.
    """
    specs = ShardSpecs(metadata, rules)
    layouts: dict[str, LiveLayout] = {}
    for name in names:
        with collected(errors, name):
            tensor = tensor_of(specs.metadata, name)
            if tensor is None:
                problem, folder = (
                    "the checkpoint lists this parameter, but has no weights of it",
                    metadata.source.folder,
                )
                remedy = "files are missing: restore the folder from its original, or take another tag"
                raise DamagedError(problem, folder, "its weights", "none", parameter=name, remedy=remedy)
            if len(tensor.shard_shapes) == tp:
                layouts[name] = LiveLayout(tensor.shard_shapes)
                continue
            with specs.of(tensor) as spec:
                shapes, chosen = (_shard(spec, tp),) * tp, spec.chosen
                is_default = chosen is not None and chosen.origin == BY_DEFAULT
                layouts[name] = LiveLayout(shapes, 0, origin=BY_DEFAULT) if is_default else LiveLayout(shapes)
    return layouts


def known_rules(metadata: CheckpointMetadata, names: Iterable[str], rules: ShardingRules) -> dict[str, Rule | None]:
    """The tensor-parallel rule of each parameter; ``None`` without a rule, or where a recorded map replaces it.

    Widths of sub-parameters are numbers, even where the rule takes them from the run. Raises :class:`MismatchError` if
    a rule does not fit the shapes.
    """
    specs = ShardSpecs(metadata, rules)
    found: dict[str, Rule | None] = dict.fromkeys(names)
    for name in found:
        tensor = tensor_of(specs.metadata, name)
        if tensor is not None and not metadata.declared.is_recorded(metadata.saved_names.get(name, name)):
            with specs.of(tensor) as spec:
                if spec.chosen is not None:
                    parts = relative_widths(spec.chosen.rule, specs.metadata.run)
                    found[name] = spec.chosen.rule.model_copy(update={"sub_parameters": parts})
    return found


def _shard(spec: ShardSpec, tp: int) -> Shape:
    chosen = spec.chosen
    source, _, is_recorded = spec.layouts()
    if chosen is None and not is_recorded and (spec.tensor.key == BUFFER or len(spec.shapes[0]) < 2):
        return spec.shapes[0]
    if source is None or (chosen is None and not is_recorded):
        raise spec.undecided()
    if source.is_replicated if is_recorded else chosen is None or chosen.rule.kind in REPLICATED_KINDS:
        return spec.shapes[0]
    dim, size = source.dim, source.shape[source.dim]
    if not is_recorded and chosen is not None and chosen.rule.cut_dim != dim:
        raise CannotSplit(f"sharded along dimension {chosen.rule.cut_dim}, but its shape is {spec.shapes[0]}")
    if chosen is not None and chosen.rule.kind == VOCABULARY:
        size = -(-size // tp) * tp  # padded, as Megatron does
    if size % tp:
        problem = f"dimension {dim} of this parameter does not divide by the tensor-parallel degree"
        raise spec.mismatch(problem, f"a multiple of {tp}", size, "choose a degree that divides it")
    return (*source.shape[:dim], size // tp, *source.shape[dim + 1 :])


def _shards(shapes: Sequence[Shape]) -> str:
    if not shapes:
        return "nothing yet"  # without a live model
    distinct = list(dict.fromkeys(shapes))
    return f"{len(shapes)} x {distinct[0]}" if len(distinct) == 1 else " + ".join(map(str, shapes))


def _config(rule: Mapping[str, object]) -> str:
    return f'"elastic_checkpoint": {{"tp_rules": [{json.dumps(rule)}]}}'

"""How tensor-parallel ranks shard each parameter, for live engines, offline tools and inspection. Pure.

The user's rules go before layouts that are recorded in full, and these before all else. Without a live model, a spec of
the saved shards gives the whole parameter, and its shards on any number of ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from elastic_ckpt.core.local_state import LiveShards
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.name_patterns import matches_whole
from elastic_ckpt.core.shard_specs import BY_SHAPES, COLUMN, USER, VOCABULARY, CannotSplit, ShardSpec
from elastic_ckpt.core.strided import Shape, TPLayout, fused, replicated
from elastic_ckpt.core.text import config_text, counted
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, Remedies, Remedy
from elastic_ckpt.sharding.rules import ModelShapes, ShardingRules, presets_for, tensor_of

#: A checkpoint that declares patterns shards parameters that match none along dimension 0.
BY_DEFAULT = "the checkpoint's universal_checkpoint_info, by its default"
#: Of a layer or an expert, in a name.
_NUMBER = re.compile(r"(?<![a-z\d])\d+(?![a-z\d])")


class Sharding:
    """How one parameter or buffer is sharded, saved and live; without a live model, the latter has no shapes."""

    def __init__(self, checkpoint: Shardings, tensor: TensorMetadata, live: LiveShards | None) -> None:
        self.checkpoint = checkpoint
        self.metadata = checkpoint.metadata
        self.tensor = tensor
        self.live = live or LiveShards(())
        self.name = tensor.name
        self.shapes = tensor.shard_shapes
        self.saved_name = self.metadata.saved_names.get(self.name, self.name)  # another if tied or renamed
        self.is_fused = checkpoint.shapes.is_fused(self.name, self.saved_name)
        self.specs: Sequence[ShardSpec] = ()  # all that is said of it, by precedence
        self.chosen: ShardSpec | None = None  # the one that counts: without a live model, no guess
        self._is_offline = live is None

    def choose(self) -> None:
        """Find ``specs`` and ``chosen``; :class:`CannotSplit` if the checkpoint's declaration cannot be understood."""
        self.specs = self.checkpoint.rules.specs_for(self)
        chosen = self.specs[0] if self.specs else None
        if chosen is not None and chosen.kind == COLUMN and chosen.cut_dim == 0 and chosen.sub_parameters is None:
            chosen = next((spec for spec in self.specs if spec.kind == VOCABULARY), chosen)
        elif chosen is not None and chosen.is_ambiguous:  # a live parameter may resolve what a preset leaves open
            certain = (spec for spec in self.specs if not spec.is_ambiguous and spec.origin != BY_SHAPES)
            chosen = next(certain, chosen)
        if self._is_offline and (chosen is None or chosen.origin == BY_SHAPES or chosen.is_ambiguous):
            is_plain = len(self.shapes) > 1 and not self.is_fused
            chosen = None
            if self.metadata.declared.specs and is_plain and (self.name, BUFFER) not in self.metadata.tensors:
                # what matches no pattern is sharded along dimension 0: ``merge_tp_slices``, ds_to_universal.py
                chosen = ShardSpec(pattern=".*", kind=COLUMN).by(BY_DEFAULT)
        self.chosen = chosen

    def layouts(self) -> tuple[TPLayout | None, TPLayout | None, bool]:
        """The saved and the live layout (``None`` if unknown), and whether they are recorded in full.

        Raises :class:`CannotSplit` if one contradicts the shapes.
        """
        by_user = self.chosen is not None and self.chosen.origin == USER
        is_alone = len(self.shapes) == 1
        recorded = None if is_alone or by_user else self.metadata.declared.layout(self.saved_name, self.shapes)
        live = None if by_user else self.live.layout
        cut = [layout.dim for layout in (recorded, live) if layout is not None and not layout.is_replicated]
        dim = cut[0] if cut else 0 if self.chosen is None else self.chosen.cut_dim
        source = recorded or self._by_spec(self.shapes, dim)
        target = live or self._by_spec(self.live.shapes, dim)
        return source, target, recorded is not None or (live is not None and is_alone)

    def _by_spec(self, shapes: Sequence[Shape], dim: int) -> TPLayout | None:
        spec = self.chosen
        if len(shapes) == 1 and (spec is None or not spec.is_replicated):
            shape = shapes[0]
            return fused(shape, dim, [[shape[dim]]]) if len(shape) > dim else replicated(shape, 1)
        return None if spec is None or spec.is_ambiguous or not shapes else spec.layout(shapes, self.metadata.run)

    def objection(self) -> str | None:
        """What contradicts the chosen spec: another one (unless the user's), or the shapes of other parameters."""
        certain = [spec for spec in self.specs if spec.origin != BY_SHAPES]
        for other in certain[1:]:
            if certain[0].origin != USER and certain[0].contradicts(other):
                return f"but {other.kind}, according to {other.origin}"
        return None if self.chosen is None else self.checkpoint.shapes.objection(self.name, self.chosen)

    def mismatch(
        self, problem: str, expected: object, found: object, remedy: Remedies, names: str | None = None
    ) -> MismatchError:
        return self.metadata.error(MismatchError, problem, names or self.name, expected, found, remedy)

    def undecided(self, others: Sequence[Sharding] = ()) -> MismatchError:
        """Nothing says how it is sharded, nor how ``others`` are."""
        pattern = re.escape(self.name)
        said = next((each for each in self.specs if each.is_ambiguous), None)
        similar = Counter(_NUMBER.sub("#", each.name) for each in (self, *others))
        first = {_NUMBER.sub("#", each.name): each.name for each in (*reversed(others), self)}
        names = [first[like] + f" and {count - 1} like it" * (count > 1) for like, count in similar.items()]
        if said is not None and matches_whole(said.pattern, self.saved_name):
            pattern = said.pattern  # one line settles all that it applies to
        elif similar[_NUMBER.sub("#", self.name)] > 1:
            pattern = _NUMBER.sub(r"\\d+", pattern)
        named = presets_for(self) if said is None else ()
        named = [each for each in named if all(each in presets_for(other) for other in others)]
        remedy = [Remedy(when=f"if code of {each} saved it", config={"tp_preset": each}) for each in named]
        remedy += self._rules(pattern)
        why = "none of these" if said is None else f"{said.origin}: {said.ambiguous}"
        of_several = ": it is made of several, whose arrangement its shape does not show" if self.is_fused else ""
        return self.mismatch(
            f"the tensor-parallel degree changes, and it is not known how this parameter is sharded{of_several}",
            expected='a rule in your "tp_rules", the checkpoint, the live parameter or a preset',
            found=f"{why}; {self._both()}",
            remedy=remedy,
            names=", ".join(names),
        )

    def contradiction(self, why: object, is_recorded: bool = False) -> MismatchError:
        """The chosen spec, or the recorded layout, does not fit the shapes."""
        chosen = None if is_recorded else self.chosen
        saved = self.shapes
        live = self.live.shapes
        rests = {shape[1:] for shape in (*saved, *live)}
        rows = [sum((*shape, 1)[0] for shape in side) for side in (saved, live)]
        may_be_padded = len(rests) == 1 and rows[0] != rows[1]
        if chosen is None and len(saved) == len(live) == 1:
            ways = [Remedy("build the model with the sizes it was saved with")]
            if may_be_padded:
                ways.append(self._declared("vocabulary", "if rows of padding are all that differs"))
            shapes = f"{live[0]} in the live model", f"{saved[0]} in the checkpoint"
            return self.mismatch("the shape of this parameter differs", *shapes, ways)
        layout = f"{chosen.kind}, according to {chosen.origin}" if chosen else "a recorded layout"
        problem = "what is known of this parameter's tensor-parallel layout contradicts the shapes"
        likely = "vocabulary" if may_be_padded else "row"
        kinds = dict.fromkeys((likely, "column", "row", "vocabulary"))
        if chosen is not None and not chosen.sub_parameters:
            kinds.pop(chosen.kind, None)  # which is what contradicts them
        ways = [self._declared(kind, f"if it is sharded by {kind}") for kind in kinds]
        return self.mismatch(problem, f"{layout}: {why}", self._both(), ways)

    def _declared(self, kind: str, when: str, pattern: str | None = None) -> Remedy:
        """The rule of a user that says how this parameter, or all of a pattern, is sharded."""
        return Remedy(when=when, config={"tp_rules": [{"pattern": pattern or re.escape(self.name), "kind": kind}]})

    def _rules(self, pattern: str) -> list[Remedy]:
        """The rules for a pattern of which one is true, and when; each of the others would load wrong values."""
        if self.is_fused:
            return [self._declared("column", _NOT_FUSED, pattern), self._in_parts(pattern)]
        copies = self._declared("replicated", "if every rank holds the whole", pattern)
        if len(self.shapes[0]) == 1 and len({*self.shapes, *self.live.shapes}) == 1:
            return [copies, self._declared("summed", "if its value is the sum of what the ranks hold", pattern)]
        cut = [self._declared(kind, f"if it is sharded by {kind}", pattern) for kind in ("column", "row", "vocabulary")]
        return [*cut, copies]

    def _in_parts(self, pattern: str) -> Remedy:
        """The rule for several parameters in one, of which a person gives the widths where shapes do not."""
        rule: dict[str, object] = {"pattern": pattern, "kind": COLUMN}
        widths = self.checkpoint.shapes.widths_of_parts(self.name)
        if widths is not None:
            return Remedy(when=_IN_PARTS, config={"tp_rules": [{**rule, "sub_parameters": widths}]})
        meaning = "[heads, key-value heads, key-value heads] for q, k and v, [1, 1] for gate and up"
        return Remedy(f"{_config({**rule, 'sub_parameters': _WIDTHS})} ({meaning})", when=_IN_PARTS)

    def vocabulary_too_small(self, saved: int, live: int, real: int | None) -> MismatchError:
        """Rows that may not be padding would be dropped; ``real``: rows that are not, if known."""
        known = f", of which {real} are no padding" if real else ", and nothing says which of them are padding"
        rule = {"pattern": re.escape(self.name), "kind": "vocabulary", "vocabulary": real or live}
        larger = Remedy("build the model with a vocabulary that holds all tokens")
        remedy = larger, Remedy(when="if the live one holds all tokens", config={"tp_rules": [rule]})
        problem = "the live vocabulary has fewer rows than the saved one"
        return self.mismatch(problem, f"{counted(live, 'row')}", f"{counted(saved, 'row')}{known}", remedy)

    def _both(self) -> str:
        sides = []
        for shapes in (self.shapes, self.live.shapes):
            distinct = dict.fromkeys(map(str, shapes))
            shown = f"{len(shapes)} x {shapes[0]}" if len(distinct) == 1 else " + ".join(map(str, shapes))
            sides.append(shown or "nothing yet")  # without a live model
        return f"{sides[0]} in the checkpoint, {sides[1]} in the live model"

    def shard_of(self, tp: int) -> Shape | None:
        """The shape of its shard on each of ``tp`` ranks; ``None``: nothing says how it is sharded."""
        source, _, is_recorded = self.layouts()
        spec = None if is_recorded else self.chosen
        shape = self.shapes[0]
        if spec is None and not is_recorded and (self.tensor.key == BUFFER or len(shape) < 2):
            return shape
        if source is None or (spec is None and not is_recorded):
            return None
        if source.is_replicated if spec is None else spec.is_replicated:
            return shape
        dim = source.dim
        size = source.shape[source.dim]
        if spec is not None and spec.cut_dim != dim:
            raise CannotSplit(f"sharded along dimension {spec.cut_dim}, but its shape is {shape}")
        if self.chosen is not None and self.chosen.kind == VOCABULARY:
            size = -(-size // tp) * tp  # padded, as Megatron does
        if size % tp:
            problem = f"dimension {dim} of this parameter does not divide by the tensor-parallel degree"
            raise self.mismatch(problem, f"a multiple of {tp}", size, "choose a degree that divides it")
        return (*source.shape[:dim], size // tp, *source.shape[dim + 1 :])


class Shardings:
    """How one checkpoint's parameters are sharded, for a live run with these arguments, if any.

    Raises :class:`MismatchError` if the configuration beside the checkpoint states other arguments than the live run's.
    """

    def __init__(
        self, metadata: CheckpointMetadata, rules: ShardingRules, live: Mapping[str, Any] | None = None
    ) -> None:
        self.rules = rules
        self.preset = rules.preset_for(metadata.run)
        live = live or {}
        saved = metadata.run
        unsaved = () if self.preset is None else self.preset.unsaved
        self.by_live = {key: live[key] for key in unsaved if key in live}  # which only the live run gives
        if other := [key for key, value in self.by_live.items() if key in saved and saved[key] != value]:
            problem = "the live model was built with other arguments than the configuration beside the checkpoint has"
            expected, found = (", ".join(f"{key}: {side[key]}" for key in other) for side in (saved, live))
            remedy = 'build the model as it was saved, or correct the files in the folder "configs"'
            raise MismatchError(problem, metadata.source.folder, expected, found, remedy=remedy)
        self.metadata = replace(metadata, run={**saved, **self.by_live})

    @cached_property
    def shapes(self) -> ModelShapes:  # which looks at every tensor, for parameters whose layout changes
        """Relations between the shapes of the checkpoint's matrices."""
        return ModelShapes(self.metadata)

    @contextmanager
    def of(self, tensor: TensorMetadata, live: LiveShards | None = None) -> Iterator[Sharding]:
        """The sharding of a saved parameter or buffer; :class:`CannotSplit` in the body becomes its contradiction."""
        sharding = Sharding(self, tensor, live)
        try:
            sharding.choose()
            yield sharding
        except CannotSplit as error:
            raise sharding.contradiction(error) from error


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
) -> dict[str, LiveShards]:
    """The layout of each parameter, frozen weight and buffer over ``tp`` ranks.

    A vector or buffer without a spec is taken for replicated: a guess, which a comparison of the saved copies verifies.
    Raises, or collects in ``errors`` by name: :class:`DamagedError` if a name has no tensor, :class:`MismatchError` if
    a matrix has no spec, a spec does not fit, or a dimension is not divisible.
    """
    shardings = Shardings(metadata, rules)
    layouts: dict[str, LiveShards] = {}
    undecided: list[Sharding] = []
    for name in names:
        with collected(errors, name):
            tensor = tensor_of(metadata, name)
            if tensor is None:
                problem = "the checkpoint lists this parameter, but has no weights of it"
                remedy = "files are missing: restore the folder from its original, or use another tag"
                raise metadata.error(DamagedError, problem, name, "its weights", "none", remedy)
            if len(tensor.shard_shapes) == tp:
                layouts[name] = LiveShards(tensor.shard_shapes)
                continue
            with shardings.of(tensor) as sharding:
                if (shape := sharding.shard_of(tp)) is None:
                    undecided.append(sharding)
                elif sharding.chosen is not None and sharding.chosen.origin == BY_DEFAULT:
                    layouts[name] = LiveShards((shape,) * tp, 0, origin=BY_DEFAULT)
                else:
                    layouts[name] = LiveShards((shape,) * tp)
    if errors is not None:
        errors |= {each.name: each.undecided() for each in undecided}
    elif undecided:
        raise undecided[0].undecided(undecided[1:])
    return layouts


def known_specs(
    metadata: CheckpointMetadata, names: Iterable[str], rules: ShardingRules
) -> dict[str, ShardSpec | None]:
    """The spec of each parameter, its widths as numbers; ``None`` without one, or where a recorded map replaces it.

    Raises :class:`MismatchError` if a spec does not fit the shapes.
    """
    shardings = Shardings(metadata, rules)
    found: dict[str, ShardSpec | None] = dict.fromkeys(names)
    for name in found:
        tensor = tensor_of(metadata, name)
        if tensor is not None and not metadata.declared.is_recorded(metadata.saved_names.get(name, name)):
            with shardings.of(tensor) as sharding:
                if (chosen := sharding.chosen) is not None:
                    parts = chosen.relative_widths(shardings.metadata.run)
                    found[name] = chosen.model_copy(update={"sub_parameters": parts})
    return found


#: Stands for numbers that are not known.
_WIDTHS = "<relative widths>"
#: How a parameter may be arranged that is made of several.
_NOT_FUSED = "if nothing is fused in it, or each head (or group) holds its own q, k and v"
_IN_PARTS = "if each rank holds its parts one behind the other"


def _config(rule: Mapping[str, object]) -> str:
    return f'"elastic_checkpoint": {{"tp_rules": [{config_text(rule)}]}}'

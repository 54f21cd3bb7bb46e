"""Who says how a parameter is cut: the user, the checkpoint, the live model, a preset, or its shapes alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import AMBIGUOUS, COLUMN, REPLICATED, ROW, VOCABULARY, Kind, Rule
from elastic_ckpt.sharding.presets import Preset

#: Names of parameters that code bases fuse from several, in ways that neither shapes nor ``partition_dim`` tell.
_FUSED = re.compile(
    r"query_key_value|qkv|(^|[._])(q_k_v|kv_proj|key_value)([._]|$)|gate_up|up_gate|gate_and_up|w1_w3|w1?[23]([._]|$)"
    r"|h_to_4h|linear_fc1|(^|[._])(fc1|fc1_weight|fc1_bias|fc1_gate|linear_?1|input_linear|W_pack|c_attn|in_proj\w*|conv1d)"
    r"|(^|[._])(to_|W)?(kv|qk)(\.|$)|(^|[._])w_?i([._]|$)|(^|[._])(proj|lin)_in([._]|$)|glu([._]|$)|gated|c_kv|kv_b",
    re.IGNORECASE,
)
#: Those that Megatron Core interleaves, so that ``partition_dim`` says all of them.
_INTERLEAVED = re.compile(r"(^|[._])linear_(qkv|kv)[._]")
_VOCABULARY = re.compile(r"^(?!.*(pos|token_?type)).*(embed|wte|lm_head|output_layer|final_linear)", re.IGNORECASE)
_MEGATRON = "megatron.core"


@dataclass(frozen=True)
class Saying:
    """A rule, and who says so.

    Attributes:
        rule, origin: what, and who, in words.
        is_users: whether the user wrote it for this run.
        is_guess: whether it is only what the shapes allow.
    """

    rule: Rule
    origin: str
    is_users: bool = False
    is_guess: bool = False


@dataclass(frozen=True)
class Asked:
    """A parameter whose layout is asked for.

    Attributes:
        name: in the live model.
        saved_name: in the checkpoint, which may be another (``rename``, tied names).
        shapes: of its saved shards.
        is_fused: whether it is made of several.
        differs_live: whether it is a buffer that has other values on other live ranks.
    """

    name: str
    saved_name: str
    shapes: Sequence[Shape]
    is_fused: bool
    differs_live: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Both of its names."""
        return tuple(dict.fromkeys((self.name, self.saved_name)))


@dataclass(frozen=True)
class RuleBook:
    """The user's rules and preset.

    Attributes:
        rules: of the user's config.
        preset: named in the config; ``None``: none was.
        builtin: applied, after what the live parameters say, to models of the package of the same name.
    """

    rules: Sequence[Rule] = ()
    preset: Preset | None = None
    builtin: Preset | None = None

    def said(self, asked: Asked, layout: LiveLayout, declared: Declared, run: Mapping[str, Any]) -> list[Saying]:
        """All that is said about a parameter, the weightiest first.

        Args:
            asked: the parameter.
            layout: how the live ranks hold it.
            declared: what the checkpoint says.
            run: arguments of the run that saved it.

        Raises:
            CannotSplit: what the checkpoint says cannot be understood.
        """
        users = (rule for rule in self.rules for name in asked.names if rule.applies(name, run))
        found = [Saying(rule, 'your "tp_rules"', is_users=True) for rule in users][:1]
        if found:
            return found
        rule = declared.rule(asked.saved_name)
        if rule is not None:
            found.append(Saying(rule, "the checkpoint's universal_checkpoint_info"))
        found += _of_preset(self.preset, asked, run)
        live = _live(asked, layout)
        if live is not None:
            found.append(live)
        if layout.owner.startswith(_MEGATRON):
            found += _of_preset(self.builtin, asked, run)
        shapes = None if asked.is_fused else _by_shapes(asked, layout.shapes)
        return found if shapes is None else [*found, shapes]


def _of_preset(preset: Preset | None, asked: Asked, run: Mapping[str, Any]) -> list[Saying]:
    """The first rule of a preset that applies."""
    if preset is None:
        return []
    found = (rule for rule in preset.rules if rule.applies(asked.saved_name, run))
    return [Saying(rule, f'the preset "{preset.name}"') for rule in found][:1]


def is_fused(name: str) -> bool:
    """Whether a parameter is, by its name, made of several whose arrangement its shape does not tell."""
    return _FUSED.search(name) is not None


def is_vocabulary(name: str) -> bool:
    """Whether a parameter is, by its name, one whose first dimension may be padded."""
    return _VOCABULARY.search(name) is not None


def _live(asked: Asked, layout: LiveLayout) -> Saying | None:
    """What the live parameter says of itself (Megatron's attributes)."""
    pattern = re.escape(asked.name)
    if layout.dim is None:
        return None
    if layout.dim < 0:
        return Saying(_rule(pattern, REPLICATED), "the live parameter (not tensor_model_parallel)")
    is_whole_truth = layout.owner.startswith(_MEGATRON) and _INTERLEAVED.search(asked.name) is not None
    if layout.stride == 1 and asked.is_fused and not is_whole_truth:
        return None  # it says nothing about the parts
    origin = layout.origin or f"the live parameter (partition_dim {layout.dim}, partition_stride {layout.stride})"
    parts = [1] * layout.stride if layout.stride > 1 else None
    kind = ROW if layout.dim == 1 else COLUMN
    return Saying(Rule(pattern=pattern, kind=kind, dim=layout.dim, sub_parameters=parts), origin)


def _by_shapes(asked: Asked, live: Sequence[Shape]) -> Saying | None:
    """Equal shards are replicated; else the one dimension along which both sides add up to the same is cut."""
    pattern, origin, saved = re.escape(asked.name), "the shapes", asked.shapes
    if len({*saved, *live}) == 1:
        if len(saved) == 1 and len(saved[0]) > 1 and is_vocabulary(asked.name):
            return None  # as big on each of several ranks as it was on one: padding of a vocabulary looks like that
        if asked.differs_live:
            return None
        return Saying(_rule(pattern, REPLICATED), origin, is_guess=True)
    if not live or len({len(shape) for shape in (*saved, *live)}) > 1:
        return None
    fitting = []
    for dim in range(len(live[0])):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (*saved, *live)}
        if len(rest) == 1 and sum(s[dim] for s in saved) == sum(s[dim] for s in live):
            fitting.append(dim)
    if len(fitting) != 1:
        return None
    kind = ROW if fitting[0] == 1 else COLUMN
    return Saying(_rule(pattern, kind, fitting[0]), origin, is_guess=True)


def _rule(pattern: str, kind: Kind, dim: int | None = None) -> Rule:
    """A rule of an escaped name. There is one for every parameter, and compiling them is most of a plan's time."""
    return Rule.model_construct(pattern=pattern, kind=kind, dim=dim)


def choose(sayings: Sequence[Saying]) -> Saying | None:
    """The weightiest; where it says that dimension 0 is cut, one that knows this to be a vocabulary."""
    if not sayings:
        return None
    first = sayings[0]
    if first.rule.kind == COLUMN and first.rule.cut_dim == 0 and first.rule.sub_parameters is None:
        return next((saying for saying in sayings if saying.rule.kind == VOCABULARY), first)
    if is_ambiguous(first):  # a live parameter may say what a preset leaves open
        return next((saying for saying in sayings if not is_ambiguous(saying) and not saying.is_guess), first)
    return first


def is_ambiguous(saying: Saying) -> bool:
    """Whether a rule only says that the name does not tell."""
    return saying.rule.kind == AMBIGUOUS

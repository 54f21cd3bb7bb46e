"""Who says how a parameter is cut: the user, the checkpoint, the live model, a preset, or its shapes alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.bands import Shape
from elastic_ckpt.destinations import LiveLayout
from elastic_ckpt.rules.declared import Declared
from elastic_ckpt.rules.kinds import AMBIGUOUS, COLUMN, REPLICATED, ROW, Rule
from elastic_ckpt.rules.presets import Preset

#: Names of parameters that code bases fuse from several, in ways that neither shapes nor ``partition_dim`` tell.
_FUSED = re.compile(
    r"query_key_value|qkv|(^|[._])(q_k_v|kv_proj|key_value)([._]|$)|gate_up|up_gate|gate_and_up|w1_w3|w13"
    r"|h_to_4h|linear_fc1|fc1_gate|(^|[._])wqkv|c_attn|in_proj_weight|in_proj_bias",
    re.IGNORECASE,
)
#: Packages whose parallel layers tell all of it by ``partition_dim`` and ``partition_stride``.
_TRUSTED = ("megatron.core",)


@dataclass(frozen=True)
class Saying:
    """A rule, and who says so."""

    rule: Rule
    origin: str
    is_users: bool = False


@dataclass(frozen=True)
class RuleBook:
    """The user's rules and preset.

    Attributes:
        rules: of the user's config.
        preset: named in the config; ``None``: none was.
    """

    rules: Sequence[Rule] = ()
    preset: Preset | None = None

    def said(
        self,
        name: str,
        saved: Sequence[Shape],
        layout: LiveLayout,
        declared: Declared,
        run: Mapping[str, Any],
        fused: bool,
    ) -> list[Saying]:
        """All that is said about a parameter, the weightiest first.

        Args:
            name: of the parameter.
            saved: shapes of its saved shards.
            layout: how the live ranks hold it.
            declared: what the checkpoint says.
            run: arguments of the run that saved it.
            fused: whether it is made of several (:func:`is_fused`).
        """
        found = [Saying(rule, 'your "tp_rules"', is_users=True) for rule in self.rules if rule.applies(name, run)][:1]
        rule = declared.rule(name)
        if rule is not None:
            found.append(Saying(rule, "the checkpoint's universal_checkpoint_info"))
        live = _live(name, layout, fused)
        if live is not None:
            found.append(live)
        if self.preset is not None:
            of_preset = (rule for rule in self.preset.rules if rule.applies(name, run))
            found += [Saying(rule, f'the preset "{self.preset.name}"') for rule in of_preset][:1]
        shapes = None if fused else _by_shapes(name, saved, layout.shapes)
        return found if shapes is None else [*found, shapes]


def is_fused(name: str) -> bool:
    """Whether a parameter is, by its name, made of several whose arrangement its shape does not tell."""
    return _FUSED.search(name) is not None


def _live(name: str, layout: LiveLayout, fused: bool) -> Saying | None:
    """What the live parameter says of itself (Megatron's attributes)."""
    pattern = re.escape(name)
    if layout.dim is None:
        return None
    if layout.dim < 0:
        return Saying(Rule(pattern=pattern, kind=REPLICATED), "the live parameter (not tensor_model_parallel)")
    origin = f"the live parameter (partition_dim {layout.dim}, partition_stride {layout.stride})"
    if layout.stride == 1 and fused and not layout.owner.startswith(_TRUSTED):
        return None  # it says nothing about its parts
    parts = [1] * layout.stride if layout.stride > 1 else None
    kind = ROW if layout.dim == 1 else COLUMN
    return Saying(Rule(pattern=pattern, kind=kind, dim=layout.dim, sub_parameters=parts), origin)


def _by_shapes(name: str, saved: Sequence[Shape], live: Sequence[Shape]) -> Saying | None:
    """Equal shards are replicated; else the one dimension along which both sides add up to the same is cut."""
    pattern, origin = re.escape(name), "the shapes"
    if len({*saved, *live}) == 1:
        return Saying(Rule(pattern=pattern, kind=REPLICATED), origin)
    if len({len(shape) for shape in (*saved, *live)}) > 1:
        return None
    fitting = []
    for dim in range(len(live[0])):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (*saved, *live)}
        if len(rest) == 1 and sum(s[dim] for s in saved) == sum(s[dim] for s in live):
            fitting.append(dim)
    if len(fitting) != 1:
        return None
    kind = ROW if fitting[0] == 1 else COLUMN
    return Saying(Rule(pattern=pattern, kind=kind, dim=fitting[0]), origin)


def is_ambiguous(saying: Saying) -> bool:
    """Whether a rule only says that the name does not tell."""
    return saying.rule.kind == AMBIGUOUS

"""Do the shapes of other parameters bear out what is said about a fused one? Pure.

A gated layer has twice as many rows as its counterpart has columns, and ``query_key_value`` has three times as many
rows as columns, unless key-value heads are fewer: what a rule says without having seen the model can be held against
that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.bands import Shape
from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, Catalog, LogicalTensor
from elastic_ckpt.rules.book import Saying
from elastic_ckpt.rules.kinds import KV_HEADS, WHOLE_KINDS, Rule

#: Layer that widens -> layer that narrows again.
_COUNTERPARTS = (("h_to_4h", "4h_to_h"), ("linear_fc1", "linear_fc2"), ("linear1", "linear2"))
_QKV = "query_key_value"


def tensor_of(catalog: Catalog, name: str) -> LogicalTensor | None:
    """The weights of a parameter, or a buffer."""
    found = (catalog.tensors.get((name, key)) for key in (MASTER, FROZEN, BUFFER))
    return next((tensor for tensor in found if tensor is not None), None)


def gate_factor(catalog: Catalog, name: str) -> int | None:
    """How many times as many rows a widening layer has as its counterpart has columns; ``None``: not to be told."""
    for wide, narrow in _COUNTERPARTS:
        if wide in name:
            stem = name.rpartition(".")[0]
            up, down = tensor_of(catalog, name), tensor_of(catalog, stem.replace(wide, narrow) + ".weight")
            if up is None or down is None or any(len(shape) < 2 for shape in down.shard_shapes):
                return None
            rows, columns = _total(up.shard_shapes, 0), _total(down.shard_shapes, 1)
            return rows // columns if columns and rows % columns == 0 else None
    return None


def _total(shapes: Sequence[Shape], dim: int) -> int:
    return sum(shape[dim] for shape in shapes)


def objection(catalog: Catalog, name: str, rule: Rule) -> str | None:
    """What speaks against a rule that nobody who knows the model has made; ``None``: nothing."""
    if rule.kind in WHOLE_KINDS:
        return None
    factor = gate_factor(catalog, name)
    if factor == 2 and rule.sub_parameters is None:
        return "it has twice as many rows as its counterpart has columns, so a gate is fused into it"
    if factor == 1 and rule.sub_parameters is not None:
        return "it has as many rows as its counterpart has columns, so no gate is fused into it"
    if _QKV in name and rule.sub_parameters is None and _has_fewer_kv_heads(catalog, name):
        return "it does not have three times as many rows as columns, so key-value heads are fewer than query heads"
    return None


def _has_fewer_kv_heads(catalog: Catalog, name: str) -> bool:
    run: Mapping[str, Any] = catalog.run
    if any(run.get(key) for key in KV_HEADS) or _has_wide_heads(run):
        return False  # the run says how many there are, and rules may ask it
    weight = tensor_of(catalog, name.rpartition(".")[0] + ".weight")
    if weight is None or any(len(shape) != 2 for shape in weight.shard_shapes):
        return False
    return _total(weight.shard_shapes, 0) != 3 * weight.shard_shapes[0][1]


def _has_wide_heads(run: Mapping[str, Any]) -> bool:
    """Whether all heads together are not as wide as the hidden state."""
    heads, width, hidden = (run.get(key) for key in ("num_attention_heads", "kv_channels", "hidden_size"))
    if not (isinstance(heads, int) and isinstance(width, int) and isinstance(hidden, int)):
        return False
    return heads * width != hidden


def disagreement(sayings: Sequence[Saying]) -> tuple[Saying, Saying] | None:
    """Two who say different things of a parameter; the user's own rules are not held against others."""
    said = [saying for saying in sayings if not saying.is_guess]
    if not said or said[0].is_users:
        return None
    return next(((said[0], other) for other in said[1:] if _differ(said[0].rule, other.rule)), None)


def _differ(one: Rule, other: Rule) -> bool:
    if "whole_only" in (one.kind, other.kind):
        return False
    whole = [rule.kind in WHOLE_KINDS for rule in (one, other)]
    if whole[0] or whole[1]:
        return whole[0] != whole[1]
    parts = [rule.sub_parameters for rule in (one, other)]
    return one.cut_dim != other.cut_dim or (None not in parts and parts[0] != parts[1])

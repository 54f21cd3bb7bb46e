"""Do the shapes of other parameters bear out what is said about a fused one? Pure.

Within a module, a layer that widens has as many rows as the layer that narrows again has columns. Where it has more, it
is made of several: a gate beside it, or query, key and value. What a rule says without having seen the model can be
held against that, and a name that tells nothing does not hide it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import KV_HEADS, WHOLE_KINDS, Rule
from elastic_ckpt.sharding.book import Saying

#: Layer that widens -> layer that narrows again.
_COUNTERPARTS = (("h_to_4h", "4h_to_h"), ("fc1", "fc2"), ("linear1", "linear2"), ("wi", "wo"))
_QKV = re.compile(r"query_key_value|qkv|W_pack|c_attn", re.IGNORECASE)


def tensor_of(metadata: CheckpointMetadata, name: str) -> TensorMetadata | None:
    """The weights of a parameter, or a buffer."""
    found = (metadata.tensors.get((name, key)) for key in (MASTER, FROZEN, BUFFER))
    return next((tensor for tensor in found if tensor is not None), None)


class Structure:
    """What the shapes of a model's matrices say about each other.

    Args:
        metadata: what the checkpoint holds.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._catalog = metadata
        # (module, rows of a matrix on the first rank) -> how often which number of columns: of all ranks
        self._columns: dict[tuple[str, int], Counter[int]] = {}
        for name, key in metadata.tensors:
            shapes = metadata.tensors[name, key].shard_shapes
            if key in (MASTER, FROZEN) and len(shapes[0]) == 2:
                self._columns.setdefault((_module(name), shapes[0][0]), Counter())[_total(shapes, 1)] += 1

    def gate_factor(self, name: str) -> int | None:
        """How many times as many rows a widening layer has as its counterpart has columns; ``None``: not to be told."""
        for wide, narrow in _COUNTERPARTS:
            if wide in name:
                stem = name.rpartition(".")[0]
                up, down = (
                    tensor_of(self._catalog, name),
                    tensor_of(self._catalog, stem.replace(wide, narrow) + ".weight"),
                )
                if up is None or down is None or down is up or any(len(shape) < 2 for shape in down.shard_shapes):
                    continue
                rows, columns = _total(up.shard_shapes, 0), _total(down.shard_shapes, 1)
                return rows // columns if columns and rows % columns == 0 else None
        return None

    def _widths(self, name: str) -> tuple[int, int]:
        """Rows of a layer's weight, and columns of the layer of its module that takes its output; 0: not to be told."""
        weight = tensor_of(self._catalog, name.rpartition(".")[0] + ".weight")
        at_root = not _module(name)  # where layers stand that have nothing to do with each other
        if at_root or weight is None or any(len(shape) != 2 for shape in weight.shard_shapes):
            return 0, 0
        rows, columns = _total(weight.shard_shapes, 0), weight.shard_shapes[0][1]
        others = self._columns.get((_module(name), columns), Counter())
        if weight.shard_shapes[0][0] == columns and weight.key in (MASTER, FROZEN):
            others = others - Counter([_total(weight.shard_shapes, 1)])  # it is not its own counterpart
        if not others:
            return 0, 0
        return rows, rows if rows in others else max(others)

    def is_made_of_several(self, name: str) -> bool:
        """Whether a layer has more rows than the layer that takes its output has columns."""
        rows, taken = self._widths(name)
        return rows > taken > 0

    def qkv_widths(self, name: str) -> list[int] | None:
        """Relative widths of query, key and value, if the layer is made of these; ``None``: not to be told."""
        rows, taken = self._widths(name)
        if not rows > taken > 0 or (rows - taken) % 2:
            return None
        key = (rows - taken) // 2
        common = math.gcd(taken, key)
        return [taken // common, key // common, key // common]

    def objection(self, name: str, rule: Rule, by_user: bool) -> str | None:
        """What speaks against a rule; ``None``: nothing. A user may know what shapes do not tell."""
        if rule.kind in WHOLE_KINDS:
            return None
        parts, factor = rule.sub_parameters, self.gate_factor(name)
        if factor == 2 and parts is None and not by_user:
            return "it has twice as many rows as its counterpart has columns, so a gate is fused into it"
        if factor == 1 and parts is not None and not by_user:
            return "it has as many rows as its counterpart has columns, so nothing is fused into it"
        return self._objection_to_heads(name, parts, by_user) if _QKV.search(name) else None

    def _objection_to_heads(self, name: str, parts: Any, by_user: bool) -> str | None:
        widths = self.qkv_widths(name)
        if isinstance(parts, list) and len(parts) == 3 and widths is not None:
            given = [part // math.gcd(*parts) for part in parts]
            return None if given == widths else f"by the shapes of its module, its parts are as wide as {widths}"
        if parts is None and not by_user and "query_key_value" in name and self._has_fewer_kv_heads(name):
            return "it does not have three times as many rows as columns, so key-value heads are fewer than query heads"
        return None

    def _has_fewer_kv_heads(self, name: str) -> bool:
        run = self._catalog.run
        if any(run.get(key) for key in KV_HEADS):
            return False  # the run says how many there are, and rules may ask it
        heads, width, hidden = (run.get(key) for key in ("num_attention_heads", "kv_channels", "hidden_size"))
        if isinstance(heads, int) and isinstance(width, int) and isinstance(hidden, int) and heads * width != hidden:
            return False  # all heads together are not as wide as the hidden state
        weight = tensor_of(self._catalog, name.rpartition(".")[0] + ".weight")
        if weight is None or any(len(shape) != 2 for shape in weight.shard_shapes):
            return False
        return _total(weight.shard_shapes, 0) != 3 * weight.shard_shapes[0][1]


def _module(name: str) -> str:
    """The module whose layer a parameter is of."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _total(shapes: Sequence[Shape], dim: int) -> int:
    return sum(shape[dim] for shape in shapes)


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

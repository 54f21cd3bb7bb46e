"""Checks of rules for fused parameters against the shapes of other parameters. Pure.

Within a module, a widening layer has as many rows as the narrowing layer has columns. More rows mean that it is fused
with a gate, or from query, key and value. Rules written without the model at hand are checked against that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import KV_HEADS, REPLICATED_KINDS
from elastic_ckpt.sharding.rules import RuleSource, is_fused, is_vocabulary, tensor_of

#: Widening layer -> narrowing layer.
_COUNTERPARTS = (("h_to_4h", "4h_to_h"), ("fc1", "fc2"), ("linear1", "linear2"), ("wi", "wo"))
_QKV = re.compile(r"query_key_value|qkv|W_pack|c_attn", re.IGNORECASE)


class ModelShapes:
    """Relations between the shapes of a model's matrices."""

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._metadata = metadata
        # (module, rows of a matrix on the first rank) -> histogram of columns, summed over all ranks
        self._columns: dict[tuple[str, int], Counter[int]] = {}
        for (name, key), tensor in metadata.tensors.items():
            shapes = tensor.shard_shapes if key in (MASTER, FROZEN) else ((),)
            if len(shapes[0]) == 2:
                self._columns.setdefault((_module(name), shapes[0][0]), Counter())[_total(shapes, 1)] += 1

    def is_fused(self, name: str, saved_name: str = "") -> bool:
        """Whether a parameter is fused, by its names (unless its counterpart refutes that) or its module's shapes.

        Shapes are found by ``name``; ``saved_name`` is what the parameter was called before it was renamed.
        """
        rows, taken = self._widths(name)
        by_name = is_fused(name) or is_fused(saved_name)
        return (by_name and self._gate_factor(name) != 1) or (rows > taken > 0 and not is_vocabulary(name))

    def proven(self, name: str) -> dict[str, bool]:
        """What shapes prove of a parameter that may be fused: whether with a gate, and from fewer key-value heads."""
        factor, widths = self._gate_factor(name), self.qkv_widths(name) if _QKV.search(name) else None
        gated = {"gated": factor == 2} if factor in (1, 2) else {}
        return gated | ({"fewer_kv_heads": widths[0] != widths[1]} if widths else {})

    def qkv_widths(self, name: str) -> list[int] | None:
        """Relative widths of query, key and value, if the layer fuses these; ``None`` if unknown."""
        rows, taken = self._widths(name)
        if not rows > taken > 0 or (rows - taken) % 2:
            return None
        key = (rows - taken) // 2
        common = math.gcd(taken, key)
        return [taken // common, key // common, key // common]

    def objection(self, name: str, source: RuleSource) -> str | None:
        """What contradicts a rule, or ``None``. A user's rule may state what shapes do not show."""
        rule, by_user = source.rule, source.is_users
        if rule.kind in REPLICATED_KINDS or source.is_ambiguous:
            return None
        parts, factor = rule.sub_parameters, self._gate_factor(name)
        if factor == 2 and parts is None and not by_user:
            return "it has twice as many rows as its counterpart has columns, so a gate is fused into it"
        if factor == 1 and parts is not None and not by_user:
            return "it has as many rows as its counterpart has columns, so nothing is fused into it"
        return self._objection_to_heads(name, parts, by_user) if _QKV.search(name) else None

    def _objection_to_heads(self, name: str, parts: list[int] | str | None, by_user: bool) -> str | None:
        widths = self.qkv_widths(name)
        if isinstance(parts, list) and len(parts) == 3 and widths is not None:
            given = [part // math.gcd(*parts) for part in parts]
            return None if given == widths else f"by the shapes of its module, its parts are as wide as {widths}"
        if parts is None and not by_user and "query_key_value" in name and self._has_fewer_kv_heads(name):
            return "it does not have three times as many rows as columns, so key-value heads are fewer than query heads"
        return None

    def _gate_factor(self, name: str) -> int | None:
        """Rows of a widening layer divided by columns of its counterpart; ``None`` if unknown."""
        for wide, narrow in _COUNTERPARTS:
            if wide in name:
                counterpart = name.rpartition(".")[0].replace(wide, narrow) + ".weight"
                up, down = tensor_of(self._metadata, name), tensor_of(self._metadata, counterpart)
                if up is None or down is None or down is up or any(len(shape) < 2 for shape in down.shard_shapes):
                    continue
                rows, columns = _total(up.shard_shapes, 0), _total(down.shard_shapes, 1)
                return rows // columns if columns and rows % columns == 0 else None
        return None

    def _matrix(self, name: str) -> TensorMetadata | None:
        weight = tensor_of(self._metadata, name.rpartition(".")[0] + ".weight")
        return None if weight is None or any(len(shape) != 2 for shape in weight.shard_shapes) else weight

    def _widths(self, name: str) -> tuple[int, int]:
        """Rows of a layer's weight, and columns of the layer that takes its output; 0 if unknown."""
        weight = self._matrix(name)
        if not _module(name) or weight is None:  # layers at the root are unrelated
            return 0, 0
        rows, (first_rows, columns) = _total(weight.shard_shapes, 0), weight.shard_shapes[0]
        others = self._columns.get((_module(name), columns), Counter())
        if first_rows == columns and weight.key in (MASTER, FROZEN):
            others = others - Counter([_total(weight.shard_shapes, 1)])  # it is not its own counterpart
        if not others:
            return 0, 0
        return rows, rows if rows in others else max(others)

    def _has_fewer_kv_heads(self, name: str) -> bool:
        run = self._metadata.run
        if any(run.get(key) for key in KV_HEADS):
            return False  # the run states their number, and rules may refer to it
        heads, width, hidden = (run.get(key) for key in ("num_attention_heads", "kv_channels", "hidden_size"))
        if isinstance(heads, int) and isinstance(width, int) and isinstance(hidden, int) and heads * width != hidden:
            return False  # the heads together are not as wide as the hidden state
        weight = self._matrix(name)
        return weight is not None and _total(weight.shard_shapes, 0) != 3 * weight.shard_shapes[0][1]


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]


def _total(shapes: Sequence[Shape], dim: int) -> int:
    return sum(shape[dim] for shape in shapes)

"""Kinds of optimizer state, as pure data: the layout of each beside the flat partition that it belongs to.

A flat partition of ``N`` elements may have, beside scalars (``step``):

- *elementwise* states: ``[N]`` or ``[rows, N]`` (AdEMAMix keeps two averages in one tensor), cut like the parameters;
- *per-block* states: 8-bit codes, elementwise, and one scale for each block of them, counted from the start;
- *touched* states: whole parameters, all those that have an element in the partition, one behind the other
  (DeepSpeed's Muon in ZeRO-1 and 2);
- *whole* states: a tensor of any shape that belongs to one whole parameter and cannot be cut (Adafactor's factors);
- *replicated* states: the same tensor whatever the partition (quantization maps): never sharded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from math import isfinite

ELEMENTWISE = "elementwise"
TOUCHED = "touched"
WHOLE = "whole"
REPLICATED = "replicated"
SCRATCH = "scratch"

#: bitsandbytes' 8-bit states: key of the codes -> keys of their scales and of their quantization map.
COMPANIONS = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
#: Elements in a block of any version of bitsandbytes: 2048 until 0.43.3, 256 from 0.44.
BLOCK_NUMELS = (256, 2048)
#: bitsandbytes' tensors that do not grow with the partition: the default of ``"non_shard_state_keys"``.
NON_SHARD_KEYS = ("qmap1", "qmap2", "max1", "max2", "new_max1", "new_max2", "gnorm_vec", "unorm_vec")


@dataclass(frozen=True)
class Codebook:
    """A quantization map: the value of each code, as a fraction of its block's scale.

    Attributes:
        values: 256 values, ascending, from -1 (or 0) to 1.
    """

    values: tuple[float, ...]

    @cached_property
    def problem(self) -> str | None:
        """What makes it unusable, or ``None``."""
        values = self.values
        if len(values) != 256:
            return f"{len(values)} values instead of 256"
        if not all(map(isfinite, values)):
            return "values that are not finite"
        if any(b <= a for a, b in pairwise(values)):
            return "values that do not ascend"
        if values[-1] != 1.0 or not -1.0 <= values[0] <= 0.0:
            return f"values from {values[0]} to {values[-1]}"
        return None if 0.0 in values else "no code for zero"

    @property
    def zero(self) -> int:
        """The code whose value is zero: 127 in bitsandbytes' signed map, 0 in its unsigned one."""
        return bisect_left(self.values, 0.0)

    @property
    def signed(self) -> bool:
        return self.values[0] < 0.0

    @cached_property
    def bound(self) -> float:
        """The most by which quantizing changes a value, as a fraction of its block's scale: half the widest gap."""
        return max(b - a for a, b in pairwise(self.values)) / 2


@dataclass(frozen=True)
class BlockFormat:
    """How a state is quantized: code ``c`` in a block of scale ``s`` stands for ``codebook.values[c] * s``.

    Attributes:
        numel: elements in a block; the last one of a row may be shorter.
        scales: key of the state that holds the scales, fp32.
        codebook: the quantization map.
    """

    numel: int
    scales: str
    codebook: Codebook

    def blocks(self, numel: int) -> int:
        """Number of blocks in a row of ``numel`` elements."""
        return -(-numel // self.numel)


@dataclass(frozen=True)
class LiveState:
    """A tensor state that the live optimizer keeps for one flat partition.

    Attributes:
        key: its name.
        dtype: name of its torch dtype: of the codes, where it is quantized.
        layout: :data:`ELEMENTWISE`, :data:`TOUCHED`, :data:`WHOLE`, :data:`REPLICATED`, or :data:`SCRATCH`, which
            nothing needs to restore.
        rows: leading dimension of an elementwise state.
        blocks: how it is quantized; ``None``: it is not.
        shape: of a whole, replicated or scratch state.
        initial: value of elements that no step has touched.
    """

    key: str
    dtype: str
    layout: str = ELEMENTWISE
    rows: int = 1
    blocks: BlockFormat | None = None
    shape: tuple[int, ...] = ()
    initial: float = 0.0


def block_numel_of(numel: int, scales: int) -> int | None:
    """Elements in a block of a row of ``numel`` elements with so many scales; ``None`` where no version cuts so."""
    return next((block for block in BLOCK_NUMELS if -(-numel // block) == scales), None)


@dataclass(frozen=True)
class StateOptions:
    """The layouts of optimizer states that the user names; see :class:`elastic_ckpt.config.ElasticConfig`.

    Attributes:
        non_shard_keys: names of replicated states.
        named: those of them that the user wrote, so that a missing one is reported.
        non_shard_max_numel: unknown tensors of at most so many elements are replicated; 0: none.
        schema: state key -> ``"elementwise"``, ``"replicated"`` or ``"fresh"``.
    """

    non_shard_keys: tuple[str, ...] = NON_SHARD_KEYS
    named: tuple[str, ...] = ()
    non_shard_max_numel: int = 0
    schema: Mapping[str, str] = field(default_factory=dict)

    def says_replicated(self, key: str) -> bool:
        """Whether the user, or the default list, names a state as replicated."""
        return self.schema.get(key) == REPLICATED or (key in self.non_shard_keys and key not in self.schema)


def codebook(values: Iterable[float]) -> Codebook:
    """A quantization map as data; equal ones are one object, which is pickled once in a message."""
    return _codebook(tuple(values))


_codebook = lru_cache(maxsize=64)(Codebook)

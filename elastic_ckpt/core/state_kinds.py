"""Kinds of optimizer state, as pure data: the layout of each beside its flat partition.

A flat partition of ``N`` elements may have, besides scalars (``step``):

- *elementwise* states: ``[N]`` or ``[n, N]`` (AdEMAMix keeps two averages in one tensor), sharded like
  parameters: ``n`` *planes*, each with one value of every element;
- *per-block* states: elementwise 8-bit codes, and one scale for each quantization block, counted from the start;
- *touched* states: whole parameters, concatenated, that have an element in the partition (DeepSpeed's Muon in
  ZeRO-1 and 2);
- *per-parameter* states: tensors of any shape, one for each whole parameter, that cannot be cut (Adafactor's factors);
- *replicated* states: the same tensor for every partition (codebooks), never sharded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from math import isfinite

ELEMENTWISE = "elementwise"
TOUCHED = "touched"
PER_PARAMETER = "per-parameter"
REPLICATED = "replicated"
SCRATCH = "scratch"

#: What Adam and its kin keep: real numbers, in one shape for all of a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
#: bitsandbytes' 8-bit states: key of the codes -> keys of their scales and of their codebook.
COMPANIONS = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
#: Elements per block in bitsandbytes: 2048 until 0.43.3, 256 from 0.44.
BLOCK_NUMELS = (256, 2048)
#: bitsandbytes' tensors of constant size: the default of ``"states"``.
NON_SHARD_KEYS = ("qmap1", "qmap2", "max1", "max2", "new_max1", "new_max2", "gnorm_vec", "unorm_vec")


@dataclass(frozen=True)
class Codebook:
    """A quantization map: each code's value as a fraction of its block's scale (256 ascending values, -1 or 0 to 1)."""

    values: tuple[float, ...]

    @cached_property
    def problem(self) -> str | None:
        """Why it is unusable, or ``None``."""
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
        """The code whose value is zero."""
        return bisect_left(self.values, 0.0)

    @property
    def signed(self) -> bool:
        return self.values[0] < 0.0

    @cached_property
    def bound(self) -> float:
        """The largest error of quantization as a fraction of the block's scale: half the widest gap."""
        return max(b - a for a, b in pairwise(self.values)) / 2


@dataclass(frozen=True)
class BlockFormat:
    """How a state is quantized: code ``c`` in a block of scale ``s`` stands for ``codebook.values[c] * s``."""

    numel: int  # elements of a block; the last of a plane may have fewer
    scales: str  # key of the fp32 scales' state
    codebook: Codebook

    def blocks(self, numel: int) -> int:
        """Number of blocks in a plane of ``numel`` elements."""
        return -(-numel // self.numel)


@dataclass(frozen=True)
class LiveState:
    """A tensor state that the live optimizer keeps for one flat partition."""

    key: str
    dtype: str  # of the codes, if quantized
    layout: str = ELEMENTWISE  # SCRATCH need not be restored
    planes: int = 1  # values per element: the leading dimension of an elementwise state
    blocks: BlockFormat | None = None  # how it is quantized
    shape: tuple[int, ...] = ()  # of a whole, replicated or scratch one
    initial: float = 0.0  # value of elements that no step has updated


def block_numel_of(numel: int, scales: int) -> int | None:
    """Elements per block of a plane of ``numel`` elements with ``scales`` scales; ``None`` if no version has such."""
    return next((block for block in BLOCK_NUMELS if -(-numel // block) == scales), None)


@dataclass(frozen=True)
class StateOptions:
    """User-defined layouts of optimizer states: ``"states"`` of :class:`elastic_ckpt.config.ElasticConfig`."""

    schema: Mapping[str, str] = field(default_factory=dict)  # by state: "elementwise", "replicated" or "fresh"
    max_numel: int = 0  # unknown tensors of at most this many elements are replicated; 0 for none
    are_restored: bool = True  # whether states are restored: what a load passes over, it does not judge

    def layout(self, key: str) -> str | None:
        """The layout of a state, as the user or the default allowlist has it."""
        return self.schema.get(key, REPLICATED if key in NON_SHARD_KEYS else None)


#: An interned :class:`Codebook`: equal ones are one object, pickled once per message.
codebook = lru_cache(maxsize=64)(Codebook)

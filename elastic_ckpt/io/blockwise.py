"""Decodes and encodes block-wise 8-bit states, on CPU tensors.

The format is that of bitsandbytes' blockwise optimizers: each block has one fp32 scale (its ``absmax``), and a code
stands for ``codebook[code] * scale``, in fp32 (``optimizer_update_8bit_blockwise`` in ``backends/cpu/ops.py``).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from elastic_ckpt.core.state_kinds import Codebook
from elastic_ckpt.errors import DamagedError

#: Rounding of the fp32 arithmetic, relative to a block's scale.
_ROUNDING = 1e-6
#: Smallest difference between two fp32 numbers.
_LEAST = 2.0**-149


@lru_cache(maxsize=32)
def _tables(codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(codebook.values, dtype=torch.float32)
    return values, (values[1:] + values[:-1]) / 2


def decode(codes: torch.Tensor, scales: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Values of uint8 codes ``[n]`` with fp32 scales ``[n]``: fp32, bitwise those that bitsandbytes uses."""
    return _tables(codebook)[0][codes.long()] * scales


def encode(values: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Quantize whole blocks, each value to the nearest code.

    The scale of a block is the smallest that maps every value into the codebook's range, whose negative end is -0.99297
    in bitsandbytes' signed map, not -1.

    Args:
        values: fp32 ``[blocks, elements of a block]``; padding is zero.
        codebook: the quantization map.

    Returns:
        Codes, uint8, one per element; scales, fp32, one per block; and the largest error as a fraction of its block's
        scale, without blocks of denormal numbers, which change by one rounding.

    Raises:
        DamagedError: a value is not finite, or is negative and the codebook has no negative values.
    """
    table, midpoints = _tables(codebook)
    scales = values.amax(dim=1).clamp(min=0)
    if codebook.signed:
        scales = torch.maximum(scales, (-values.amin(dim=1)).clamp(min=0) / -table[0])
    if not torch.isfinite(scales).all() or (not codebook.signed and (values < 0).any()):
        raise DamagedError(
            "an optimizer state holds values that its 8-bit format cannot express",
            expected="finite values" if codebook.signed else "finite values that are not negative",
            found=f"{values.min().item()} to {values.max().item()}",
            remedy="the run that saved it had diverged: take an earlier tag, or load_optimizer_states=False",
        )
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    codes = torch.bucketize(values / divisors, midpoints)
    change = (table[codes] * scales.unsqueeze(1) - values).abs()
    allowed = scales.unsqueeze(1) * (codebook.bound + _ROUNDING) + _LEAST
    assert (change <= allowed).all(), f"values changed by up to {change.max()} in blocks of scale {scales.max()}"
    normal = scales >= torch.finfo(torch.float32).tiny  # below it, values have no full precision to lose
    worst = (change[normal] / divisors[normal]).max().item() if normal.any() else 0.0
    return codes.to(torch.uint8), scales, worst

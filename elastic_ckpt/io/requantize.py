"""Executes a plan's requantize items: reads codes and values, decodes and quantizes them in parts of bounded size.

The format is that of bitsandbytes' blockwise optimizers: each block has one fp32 scale (its ``absmax``), and a code
stands for ``codebook[code] * scale``, in fp32 (``optimizer_update_8bit_blockwise`` in ``backends/cpu/ops.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from elastic_ckpt.core.read_plan import ReadItem, RequantizeItem
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.coalesce import nbytes_read, scales_of
from elastic_ckpt.io.staging import write_flat

#: ``read(file, byte_offset, nbytes)`` returns bytes of a file of the plan.
ReadBytes = Callable[[int, int, int], bytearray]
#: Rounding of the fp32 arithmetic, relative to a block's scale.
_ROUNDING = 1e-6
#: Smallest difference between two fp32 numbers.
_LEAST = 2.0**-149


@dataclass(frozen=True)
class ReadStats:
    """What was read."""

    nbytes: int = 0
    calls: int = 0  # reads; the sources of one part of a requantize item count as one
    staged_nbytes: int = 0  # bytes that went through staging buffers or other host memory
    blocks: int = 0  # requantized 8-bit blocks
    worst_error: float = 0.0  # of these, as a fraction of the new block's scale

    def __add__(self, other: ReadStats) -> ReadStats:
        nbytes, staged = self.nbytes + other.nbytes, self.staged_nbytes + other.staged_nbytes
        calls, blocks = self.calls + other.calls, self.blocks + other.blocks
        return ReadStats(nbytes, calls, staged, blocks, max(self.worst_error, other.worst_error))


def requantize(item: RequantizeItem, tensors: Sequence[torch.Tensor], read: ReadBytes) -> ReadStats:
    """Fill a range of a target, and of that of its scales; :class:`DamagedError` if values cannot be quantized."""
    nbytes = nbytes_read(item)
    blocks, worst_error = 0, 0.0
    if item.blocks is not None:
        blocks, worst_error = _to_codes(item, item.blocks, tensors, read)
    elif item.scale is None:
        for source in item.sources:
            write_flat(tensors[item.target], source.target_offset, _source(source, read)[0])
    else:  # in double precision, in which equal shares sum exactly to the original
        total = torch.zeros(item.numel, dtype=torch.float64)
        for source in item.sources:
            here = slice(source.target_offset - item.start, source.target_stop - item.start)
            total[here] += _source(source, read)[0]
        write_flat(tensors[item.target], item.start, total * item.scale)
    return ReadStats(nbytes, 1, nbytes, blocks, worst_error)


def _to_codes(
    item: RequantizeItem, target: BlockFormat, tensors: Sequence[torch.Tensor], read: ReadBytes
) -> tuple[int, float]:
    """Fill codes and scales; returns the number of requantized blocks and their largest error."""
    blocks = target.blocks(item.numel)
    padded = blocks * target.numel  # the last block of a row may be short
    codes = torch.full((padded,), target.codebook.zero, dtype=torch.uint8)
    values = torch.zeros(padded)
    # the least and greatest scale among a block's source elements: if equal, its codes can stay
    least, greatest = torch.full((padded,), torch.inf), torch.full((padded,), -torch.inf)
    for source in item.sources:
        here = slice(source.target_offset - item.start, source.target_stop - item.start)
        values[here], raw, source_scales = _source(source, read)
        if source_scales is not None and source.code is not None and source.code.format.codebook == target.codebook:
            codes[here] = raw
            least[here] = greatest[here] = source_scales
        else:
            least[here], greatest[here] = -torch.inf, torch.inf
    lower, upper = least.view(blocks, -1).amin(dim=1), greatest.view(blocks, -1).amax(dim=1)
    scales = torch.where(lower == upper, upper, torch.zeros_like(upper))
    mixed = lower < upper
    worst_error = 0.0
    if mixed.any():
        mixed_codes, scales[mixed], worst_error = encode(values.view(blocks, -1)[mixed], target.codebook)
        codes.view(blocks, -1)[mixed] = mixed_codes
    tensors[item.target].view(-1)[item.start : item.stop].copy_(codes[: item.numel])
    tensors[item.scales_target].view(-1)[item.scales_start : item.scales_start + blocks].copy_(scales)
    return int(mixed.sum()), worst_error


def _source(item: ReadItem, read: ReadBytes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The values of a source (fp32 if quantized), its elements as in the file, and if quantized each one's scale."""
    raw = torch.frombuffer(read(item.file, item.byte_offset, item.nbytes), dtype=getattr(torch, item.dtype))
    if item.code is None:
        return raw, raw, None
    scales = torch.frombuffer(read(item.file, *scales_of(item)), dtype=torch.float32)
    if not torch.isfinite(scales).all():
        found = f"{scales[~torch.isfinite(scales)][0].item()} near byte {item.code.scales_offset}"
        remedy = "the run that saved it had diverged, or the file is damaged: take another tag"
        raise DamagedError("the scale of an 8-bit block is not finite", None, "finite numbers", found, remedy=remedy)
    within = item.code.position % item.code.format.numel
    scales = scales.repeat_interleave(item.code.format.numel)[within : within + item.numel]
    return decode(raw, scales, item.code.format.codebook), raw, scales


@lru_cache(maxsize=32)
def _tables(codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(codebook.values, dtype=torch.float32)
    return values, (values[1:] + values[:-1]) / 2


def decode(codes: torch.Tensor, scales: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Values of uint8 codes ``[n]`` with fp32 scales ``[n]``: fp32, bitwise those that bitsandbytes uses."""
    return _tables(codebook)[0][codes.long()] * scales


def encode(values: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Quantize whole blocks, each value to the nearest code. ``values``: fp32 ``[blocks, elements of a block]``.

    The scale of a block is the smallest that maps every value into the codebook's range, whose negative end is -0.99297
    in bitsandbytes' signed map, not -1. Returns codes, uint8, one per element; scales, fp32, one per block; and the
    largest error as a fraction of its block's scale, without blocks of denormal numbers, which change by one rounding.

    Raises :class:`DamagedError` for a value that is not finite, or negative where the codebook has no negative values.
    """
    table, midpoints = _tables(codebook)
    scales = values.amax(dim=1).clamp(min=0)
    if codebook.signed:
        scales = torch.maximum(scales, (-values.amin(dim=1)).clamp(min=0) / -table[0])
    if not torch.isfinite(scales).all() or (not codebook.signed and (values < 0).any()):
        problem, expected = "an optimizer state holds values that its 8-bit format cannot express", "finite values"
        expected += "" if codebook.signed else " that are not negative"
        remedy = "the run that saved it had diverged: take an earlier tag, or load_optimizer_states=False"
        raise DamagedError(problem, None, expected, f"{values.min()} to {values.max()}", remedy=remedy)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    codes = torch.bucketize(values / divisors, midpoints)
    change = (table[codes] * scales.unsqueeze(1) - values).abs()
    allowed = scales.unsqueeze(1) * (codebook.bound + _ROUNDING) + _LEAST
    assert (change <= allowed).all(), f"values changed by up to {change.max()} in blocks of scale {scales.max()}"
    normal = scales >= torch.finfo(torch.float32).tiny  # below it, values have no full precision to lose
    worst = (change[normal] / divisors[normal]).max().item() if normal.any() else 0.0
    return codes.to(torch.uint8), scales, worst

"""Executes a plan's recodes: codes and values from files, decoded and quantized in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.read_plan import Piece, RequantizeItem
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.blockwise import decode, encode
from elastic_ckpt.io.staging import write_flat

#: ``read(file, byte_offset, nbytes)``: bytes of a file of the plan.
ReadBytes = Callable[[int, int, int], bytearray]
#: Host memory that one element takes on its way: bytes, index, value, scales, the scale's bounds, normalized value.
_NBYTES_PER_ELEMENT = 48
_SCALE_NBYTES = 4


@dataclass(frozen=True)
class RequantizeStats:
    """What was done.

    Attributes:
        nbytes: read.
        blocks: that were quantized anew.
        worst_error: largest change of a value by that, as a fraction of its new block's scale.
    """

    nbytes: int = 0
    blocks: int = 0
    worst_error: float = 0.0

    def __add__(self, other: RequantizeStats) -> RequantizeStats:
        return RequantizeStats(
            self.nbytes + other.nbytes, self.blocks + other.blocks, max(self.worst_error, other.worst_error)
        )


@dataclass(frozen=True)
class Chunk:
    """A part of a recode, of whole blocks: elements ``[start, stop)`` of the slot."""

    recode: RequantizeItem
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its source elements, without their scales."""
        return sum(_overlap(self, piece) * ITEMSIZE[piece.dtype] for piece in self.pieces)


def chunks(recode: RequantizeItem, staging_nbytes: int) -> list[Chunk]:
    """Cut a recode so that each part needs at most so much host memory, but at least one block."""
    block = 1 if recode.target is None else recode.target.numel
    step = max(staging_nbytes // _NBYTES_PER_ELEMENT // block, 1) * block
    end, found, first = recode.start + recode.numel, [], 0
    for start in range(recode.start, end, step):
        stop = min(start + step, end)
        while first < len(recode.pieces) and recode.pieces[first].start + recode.pieces[first].numel <= start:
            first += 1
        last = first
        while last < len(recode.pieces) and recode.pieces[last].start < stop:
            last += 1
        # of pieces that are added up, one may end before another that started earlier
        inside = tuple(piece for piece in recode.pieces[first:last] if piece.start + piece.numel > start)
        if inside:
            found.append(Chunk(recode, start, stop, inside))
    return found


def run_chunk(chunk: Chunk, tensors: Sequence[torch.Tensor], read: ReadBytes) -> RequantizeStats:
    """Fill one part of a slot, and of the slot of its scales.

    Args:
        chunk: what to fill.
        tensors: the live tensor of every slot of the plan; overwritten.
        read: reads bytes of the plan's files.

    Raises:
        DamagedError: values that cannot be quantized.
    """
    if chunk.recode.scale is not None:
        return _to_sum(chunk, chunk.recode.scale, tensors, read)
    return _to_values(chunk, tensors, read) if chunk.recode.target is None else _to_codes(chunk, tensors, read)


def _to_sum(chunk: Chunk, scale: float, tensors: Sequence[torch.Tensor], read: ReadBytes) -> RequantizeStats:
    """Added up in double precision: equal shares give back exactly what they are the shares of."""
    total = torch.zeros(chunk.stop - chunk.start, dtype=torch.float64)
    nbytes = 0
    for piece in chunk.pieces:
        source = _Source(chunk, piece, read)
        total[source.start - chunk.start : source.stop - chunk.start] += source.values()
        nbytes += source.nbytes
    write_flat(tensors[chunk.recode.slot], chunk.start, total * scale)
    return RequantizeStats(nbytes)


def _to_values(chunk: Chunk, tensors: Sequence[torch.Tensor], read: ReadBytes) -> RequantizeStats:
    nbytes = 0
    for piece in chunk.pieces:
        source = _Source(chunk, piece, read)
        write_flat(tensors[chunk.recode.slot], source.start, source.values())
        nbytes += source.nbytes
    return RequantizeStats(nbytes)


def _to_codes(chunk: Chunk, tensors: Sequence[torch.Tensor], read: ReadBytes) -> RequantizeStats:
    recode, target = chunk.recode, chunk.recode.target
    assert target is not None
    numel = chunk.stop - chunk.start
    blocks = target.blocks(numel)
    padded = blocks * target.numel  # the last block of a row may be short
    codes = torch.full((padded,), target.codebook.zero, dtype=torch.uint8)
    values = torch.zeros(padded)
    # the least and the greatest scale among a block's source elements: where they are one, its codes can stay
    least, greatest = torch.full((padded,), torch.inf), torch.full((padded,), -torch.inf)
    nbytes = 0
    for piece in chunk.pieces:
        source = _Source(chunk, piece, read)
        here = slice(source.start - chunk.start, source.stop - chunk.start)
        values[here] = source.values()
        nbytes += source.nbytes
        if piece.code is not None and piece.code.format.codebook == target.codebook:
            codes[here] = source.raw
            least[here] = greatest[here] = source.scales()
        else:
            least[here], greatest[here] = -torch.inf, torch.inf
    lower, upper = least.view(blocks, -1).amin(dim=1), greatest.view(blocks, -1).amax(dim=1)
    scales = torch.where(lower == upper, upper, torch.zeros_like(upper))
    mixed = lower < upper
    if mixed.any():
        encoded = encode(values.view(blocks, -1)[mixed], target.codebook)
        codes.view(blocks, -1)[mixed] = encoded.codes
        scales[mixed] = encoded.scales
    else:
        encoded = None
    tensors[recode.slot].view(-1)[chunk.start : chunk.stop].copy_(codes[:numel])
    first = recode.scales_start + (chunk.start - recode.start) // target.numel
    tensors[recode.scales_slot].view(-1)[first : first + blocks].copy_(scales)
    return RequantizeStats(nbytes, int(mixed.sum()), encoded.worst_error if encoded else 0.0)


class _Source:
    """The elements of one piece that lie in a chunk: ``[start, stop)`` of the slot."""

    def __init__(self, chunk: Chunk, piece: Piece, read: ReadBytes) -> None:
        self.start = max(piece.start, chunk.start)
        self.stop = min(piece.start + piece.numel, chunk.stop)
        self._piece = piece
        self._read = read
        self._scales: torch.Tensor | None = None
        skipped, itemsize = self.start - piece.start, ITEMSIZE[piece.dtype]
        self.nbytes = (self.stop - self.start) * itemsize
        raw = read(piece.file, piece.byte_offset + skipped * itemsize, self.nbytes)
        self.raw = torch.frombuffer(raw, dtype=getattr(torch, piece.dtype))

    def scales(self) -> torch.Tensor:
        """The scale of each element, fp32."""
        if self._scales is None:
            code = self._piece.code
            assert code is not None
            position = code.position + self.start - self._piece.start
            first, last = position // code.format.numel, (position + self.stop - self.start - 1) // code.format.numel
            nbytes = (last + 1 - first) * _SCALE_NBYTES
            held = torch.frombuffer(
                self._read(self._piece.file, code.scales_offset + first * _SCALE_NBYTES, nbytes), dtype=torch.float32
            )
            if not torch.isfinite(held).all():
                raise DamagedError(
                    "the scale of an 8-bit block is not finite",
                    expected="finite numbers",
                    found=f"{held[~torch.isfinite(held)][0].item()} near byte {code.scales_offset}",
                    remedy="the run that saved it had diverged, or the file is damaged: take another tag",
                )
            self.nbytes += nbytes
            within = position - first * code.format.numel
            self._scales = held.repeat_interleave(code.format.numel)[within : within + self.stop - self.start]
        return self._scales

    def values(self) -> torch.Tensor:
        """The value of each element; decoded ones are fp32."""
        if self._piece.code is None:
            return self.raw
        return decode(self.raw, self.scales(), self._piece.code.format.codebook)


def _overlap(chunk: Chunk, piece: Piece) -> int:
    return min(piece.start + piece.numel, chunk.stop) - max(piece.start, chunk.start)

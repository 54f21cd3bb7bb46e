"""Flat partitions and their states in files, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_ckpt.core.chunks import BlockCode
from elastic_ckpt.core.read_plan import ReadItem
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook

ITEMSIZE = {"uint8": 1, "float32": 4, "bfloat16": 2}


#: Rounding of a few fp32 operations, as a fraction of a scale.
ROUNDING = 2e-6


def curved(power: float, least: float) -> Codebook:
    """256 ascending values, dense around zero."""
    negative = 100 if least < 0 else 0
    below = [least * (1 - number / negative) ** power for number in range(negative)]
    above = [(number / (255 - negative)) ** power for number in range(256 - negative)]
    return Codebook(tuple(np.float32([*below, *above]).tolist()))


SIGNED = (curved(1.5, -0.95), curved(2.0, -1.0))


UNSIGNED = (curved(1.5, 0.0), curved(2.0, 0.0))


@dataclass(frozen=True, eq=False)
class Partition:
    """Elements of one source tensor, and where they lie."""

    file: int
    byte_offset: int
    scales_offset: int
    dtype: str
    format: BlockFormat | None
    values: NDArray[np.float32]
    scales: NDArray[np.float32]

    def scale(self, position: int) -> float:
        assert self.format is not None
        return float(self.scales[position // self.format.numel])

    def piece(self, position: int, start: int, numel: int) -> ReadItem:
        """The source elements from ``position`` on, for the elements of a row from ``start`` on."""
        code = None if self.format is None else BlockCode(self.format, position, self.scales_offset)
        offset = self.byte_offset + position * ITEMSIZE[self.dtype]
        return ReadItem(self.file, offset, 0, start, numel, self.dtype, code=code)


@dataclass
class Disk:
    """Files, and how many of their bytes were read."""

    files: list[bytearray] = field(default_factory=list)
    nbytes: int = 0

    def add(self, raw: bytes, new_file: bool, header: int) -> tuple[int, int]:
        if new_file or not self.files:
            self.files.append(bytearray())
        self.files[-1] += b"\xee" * header
        offset = len(self.files[-1])
        self.files[-1] += raw
        return len(self.files) - 1, offset

    def coded(
        self,
        codes: Sequence[int] | NDArray[np.uint8],
        scales: Sequence[float] | NDArray[np.float32],
        blocks: BlockFormat,
        new_file: bool = True,
        header: int = 3,
        scales_first: bool = False,
    ) -> Partition:
        """Codes, and one scale for each block, counted from the start."""
        raw_codes, raw_scales = np.array(codes, np.uint8), np.array(scales, np.float32)
        assert len(raw_scales) == -(-len(raw_codes) // blocks.numel)
        if scales_first:
            file, scales_offset = self.add(raw_scales.tobytes(), new_file, header)
            _, byte_offset = self.add(raw_codes.tobytes(), False, 2)
        else:
            file, byte_offset = self.add(raw_codes.tobytes(), new_file, header)
            _, scales_offset = self.add(raw_scales.tobytes(), False, 2)
        each = np.repeat(raw_scales, blocks.numel)[: len(raw_codes)]
        values = np.float32(blocks.codebook.values)[raw_codes] * each
        return Partition(file, byte_offset, scales_offset, "uint8", blocks, values, raw_scales)

    def raw(
        self, values: Sequence[float] | NDArray[np.float32], dtype: str = "float32", new_file: bool = True
    ) -> Partition:
        tensor = torch.tensor(np.array(values, np.float32)).to(getattr(torch, dtype))
        raw = tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        file, offset = self.add(raw, new_file, 5)
        return Partition(file, offset, -1, dtype, None, tensor.float().numpy(), np.zeros(0, np.float32))

    def read(self, file: int, byte_offset: int, nbytes: int) -> bytearray:
        raw = self.files[file][byte_offset : byte_offset + nbytes]
        assert len(raw) == nbytes > 0, "reads nothing, or beyond the end of the file"
        self.nbytes += nbytes
        return raw

"""Where the elements of a live shard lie in the files of a checkpoint. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, StorageChunk, TensorMetadata
from elastic_ckpt.core.read_plan import Piece
from elastic_ckpt.core.strided import ShardSources, StridedCopy, clip_source, clip_target
from elastic_ckpt.errors import DamagedError

#: Extents that are looked through sooner than searched.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of elements of one chunk.

    Attributes:
        chunk: which one.
        dtype: name of the torch dtype in the file.
        band: its source counts from the chunk's first element, its target from the live shard's.
    """

    chunk: StorageChunk
    dtype: str
    band: StridedCopy

    @property
    def byte_offset(self) -> int:
        """Absolute offset of its first element in the file."""
        return self.chunk.byte_offset + self.band.source * ITEMSIZE[self.dtype]

    def pieces(self, offset: int) -> Iterator[Piece]:
        """Its rows, each for itself; ``offset`` is added to where they go."""
        band, code = self.band, self.chunk.code
        for row in range(band.rows):
            skipped = band.source + row * band.source_stride
            yield Piece(
                self.chunk.file,
                self.chunk.byte_offset + skipped * ITEMSIZE[self.dtype],
                offset + band.target + row * band.target_stride,
                band.width,
                self.dtype,
                None if code is None else replace(code, position=code.position + skipped),
            )


def strips(
    tensor: TensorMetadata, transfer: ShardSources, wanted: FlatRange, row: int = 0, rows: int = 1
) -> Iterator[Strip]:
    """The strips that hold some elements of a live shard.

    Args:
        tensor: the saved tensor.
        transfer: where the live shard gets its elements from.
        wanted: which of its elements.
        row, rows: of a state with several rows: which one, and how many there are.
    """
    chunks, shapes = tensor.chunks, tensor.shard_shapes
    for shard, band in transfer.bands:
        base = row * (math.prod(shapes[shard]) // rows)
        if band.rows == 1:
            yield from _of_one_row(tensor, shard, band, base, wanted)
            continue
        for part in clip_target(band, wanted):
            source = part.moved(base, 0) if base else part
            end = source.source + (source.rows - 1) * source.source_stride + source.width
            first = max(bisect_right(chunks, (shard, source.source), key=_place) - 1, 0)
            for chunk in chunks[first:]:
                if (chunk.shard, chunk.range.start) >= (shard, end):
                    break
                if chunk.shard == shard:
                    is_all = chunk.range.start <= source.source and end <= chunk.range.stop
                    for held in (source,) if is_all else clip_source(source, chunk.range):
                        yield Strip(chunk, tensor.dtype, held.moved(-chunk.range.start, 0))


def _of_one_row(tensor: TensorMetadata, shard: int, band: StridedCopy, base: int, wanted: FlatRange) -> Iterator[Strip]:
    """The same for what is not cut along a dimension of its own: most of what is planned, so without detours."""
    start, stop = max(wanted.start, band.target), min(wanted.stop, band.target + band.width)
    if start >= stop:
        return
    to_source = base + band.source - band.target
    source_start, source_stop = start + to_source, stop + to_source
    chunks = tensor.chunks
    if len(chunks) > _FEW:
        chunks = chunks[max(bisect_right(chunks, (shard, source_start), key=_place) - 1, 0) :]
    for chunk in chunks:
        held = chunk.range
        if chunk.shard > shard or (chunk.shard == shard and held.start >= source_stop):
            break
        left = held.start if held.start > source_start else source_start
        right = held.stop if held.stop < source_stop else source_stop
        if chunk.shard == shard and left < right:
            numel = right - left
            yield Strip(chunk, tensor.dtype, StridedCopy(1, numel, left - held.start, numel, left - to_source, numel))


def _place(chunk: StorageChunk) -> tuple[int, int]:
    return chunk.shard, chunk.range.start


def check_tiling(metadata: CheckpointMetadata, tensor: TensorMetadata) -> None:
    """Every element of the whole tensor, on this rank or not, lies in exactly one chunk.

    Raises:
        DamagedError: naming the first elements of which that is not so.
    """
    if not tensor.shards and _tiles(tensor.chunks, math.prod(tensor.shape)):
        return
    for shard, shape in enumerate(tensor.shard_shapes):
        position = 0
        ends = [(chunk.range.start, chunk.range.stop) for chunk in tensor.chunks if chunk.shard == shard]
        for start, stop in [*ends, (math.prod(shape),) * 2]:
            if start != position:
                said, where = ("held twice", "two files") if start < position else ("incomplete", "no file")
                of = f" of tensor-parallel rank {shard}" if tensor.shards else ""
                raise DamagedError(
                    f"{tensor.key} of this parameter is {said} in the checkpoint",
                    parameter=tensor.name,
                    file=metadata.source.folder,
                    expected="every element in exactly one file",
                    found=f"elements {min(start, position)} to {max(start, position)}{of} in {where}",
                    remedy="a shard is missing or belongs to another save: restore the folder from its original",
                )
            position = stop


def _tiles(chunks: Iterable[StorageChunk], numel: int) -> bool:
    position = 0
    for chunk in chunks:
        if chunk.shard or chunk.range.start != position:
            return False
        position = chunk.range.stop
    return position == numel

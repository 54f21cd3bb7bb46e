"""Locates the elements of a live shard in the files of a checkpoint: the read items that fetch them. Pure.

Of a tensor that every data-parallel rank holds whole, each byte is read once in the job: large tensors are divided into
one range per rank, small ones go whole to the rank that has least to read so far.

Of a state that is quantized on either side, whole blocks in the same grid on both sides are plain copies. All others
are requantized; a block whose source elements share one scale keeps its codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from elastic_ckpt.core.chunks import StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import Fragment
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.read_plan import SCALE_DTYPE, BroadcastRange, ReadItem, RequantizeItem, TargetTensor, join_items
from elastic_ckpt.core.strided import ShardSources, StridedCopy, clip_source, clip_target
from elastic_ckpt.errors import DamagedError, UnsupportedError

#: Tensors up to this many bytes per rank are not divided.
_SMALL_NBYTES = 1 << 20
#: Bytes of all tensors for each byte of their files.
_MOST_TIMES = 8
#: Those in addition.
_MORE_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FragmentSource:
    """A fragment of a live shard, at its flat offset in each plane of the target; its saved tensor and sources."""

    fragment: Fragment
    tensor: TensorMetadata
    sources: ShardSources

    def to_target(self, plane: int, plane_numel: int) -> int:
        """The difference between a position in the target and one in the live shard."""
        return plane * plane_numel + self.fragment.flat_offset - self.fragment.range.start


def gaps_of(parts: Sequence[FragmentSource], planes: int, numel: int) -> tuple[FlatRange, ...]:
    """The elements of a target of ``planes`` times ``numel`` that no part fills; parts are sorted by offset."""
    gaps = []
    for plane in range(planes):
        position = 0
        for part in parts:
            start = part.fragment.flat_offset
            if start < position:
                raise AssertionError(f"fragments of {part.fragment.name} overlap")
            if start > position:
                gaps.append(FlatRange(plane * numel + position, plane * numel + start))
            for missing in part.sources.missing:
                if (gap := missing.intersect(part.fragment.range)) is not None:
                    distance = part.to_target(plane, numel)
                    gaps.append(FlatRange(gap.start + distance, gap.stop + distance))
            position = start + part.fragment.range.numel
        if position < numel:
            gaps.append(FlatRange(plane * numel + position, (plane + 1) * numel))
    return tuple(gaps)


def read_items(
    tensor: TensorMetadata,
    sources: ShardSources,
    wanted: FlatRange,
    target: int = 0,
    to_target: int = 0,
    plane: int = 0,
    planes: int = 1,
) -> Iterator[ReadItem]:
    """The items that read some elements of a live shard.

    ``to_target``: what to add to a position in the live shard for one in the target; ``plane``, ``planes``: of a
    state with several, which one, and their number.
    """
    for shard, copy in sources.copies:
        base = plane * (math.prod(tensor.shard_shapes[shard]) // planes)
        if copy.rows == 1:
            yield from _of_one_row(tensor, shard, copy, base, wanted, target, to_target)
            continue
        for part in clip_target(replace(copy, source=copy.source + base), wanted):
            start = part.source
            stop = part.source + (part.rows - 1) * part.source_stride + part.width
            for chunk in tensor.sources[shard].within(start, stop):
                is_all = chunk.range.start <= start and stop <= chunk.range.stop
                for inside in (part,) if is_all else clip_source(part, chunk.range):
                    strides = inside.rows, inside.source_stride, inside.target_stride
                    skipped = inside.source - chunk.range.start
                    target_offset = inside.target + to_target
                    yield _item(tensor.dtype, chunk, skipped, target, target_offset, inside.width, strides)


def _of_one_row(
    tensor: TensorMetadata, shard: int, copy: StridedCopy, base: int, wanted: FlatRange, target: int, to_target: int
) -> Iterator[ReadItem]:
    """The hot path of most plans: a parameter that is not strided."""
    start = max(wanted.start, copy.target)
    stop = min(wanted.stop, copy.target + copy.width)
    if start >= stop:
        return
    to_source = base + copy.source - copy.target
    source_start = start + to_source
    source_stop = stop + to_source
    for chunk in tensor.sources[shard].within(source_start, source_stop):
        found = chunk.range
        left = found.start if found.start > source_start else source_start
        right = found.stop if found.stop < source_stop else source_stop
        target_offset = left - to_source + to_target
        yield _item(tensor.dtype, chunk, left - found.start, target, target_offset, right - left, (1, 0, 0))


def _item(
    dtype: str, chunk: StorageChunk, skipped: int, target: int, offset: int, numel: int, rows: tuple[int, int, int]
) -> ReadItem:
    """``rows``: their number, and their strides in file and target."""
    byte_offset = chunk.byte_offset + skipped * ITEMSIZE[dtype]
    code = chunk.code and replace(chunk.code, position=chunk.code.position + skipped)
    return ReadItem(chunk.file, byte_offset, target, offset, numel, dtype, *rows, code)


def rows_in_order(items: Iterable[ReadItem]) -> tuple[ReadItem, ...]:
    """Each row as a single-row item, sorted by ``target_offset``."""
    rows = (item.row(number) for item in items for number in range(item.rows))
    return tuple(sorted(rows, key=lambda row: row.target_offset))


def check_tiling(metadata: CheckpointMetadata, tensor: TensorMetadata) -> None:
    """Refuse a saved tensor whose chunks do not contain each element exactly once (:class:`DamagedError`)."""
    if not tensor.shards and tensor.sources[0].tile(math.prod(tensor.shape)):
        return
    for shard, (shape, source) in enumerate(zip(tensor.shard_shapes, tensor.sources, strict=True)):
        numel = math.prod(shape)
        if source.tile(numel):
            continue
        position = 0
        for start, stop in [*((chunk.range.start, chunk.range.stop) for chunk in source), (numel, numel)]:
            if start != position:
                problem, where = ("stored twice", "two files") if start < position else ("incomplete", "no file")
                of = f" of tensor-parallel rank {shard}" if tensor.shards else ""
                problem = f"{tensor.key} of this parameter is {problem} in the checkpoint"
                found = f"elements {min(start, position)} to {max(start, position)}{of} in {where}"
                remedy = "a shard is missing or belongs to another save: restore the folder from its original"
                expected = "every element in exactly one file"
                raise metadata.error(DamagedError, problem, tensor.name, expected, found, remedy)
            position = stop


def shared_bytes_error(metadata: CheckpointMetadata) -> UnsupportedError | None:
    """The error for tensors that have the same bytes so often that the size of their files does not bound a reading."""
    file_nbytes = sum(file.nbytes for file in metadata.files)
    most = _MOST_TIMES * file_nbytes + _MORE_NBYTES
    nbytes = 0
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        nbytes += sum(map(math.prod, tensor.shard_shapes)) * ITEMSIZE[tensor.dtype]
    if nbytes <= most:
        return None
    problem = "tensors have the same bytes of their files, again and again: no save of DeepSpeed writes them so"
    expected = f"at most {most} bytes, of files of {file_nbytes}"
    found = f"tensors of {nbytes} bytes"
    remedy = "save copies of tensors that are views of one storage"
    return UnsupportedError(problem, metadata.source.folder, expected, found, remedy=remedy)


def refuse_shared_bytes(metadata: CheckpointMetadata) -> None:
    """Raise :func:`shared_bytes_error`, if there is one: before whatever reads the tensors of a whole checkpoint."""
    if (error := shared_bytes_error(metadata)) is not None:
        raise error


class BroadcastRanges:
    """Assigns replicated targets to data-parallel ranks; deterministic given the order of calls."""

    def __init__(self, dp: int, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._load_nbytes = [0] * dp
        self.shares: list[BroadcastRange] = []

    def mine(self, first: int, targets: Sequence[TargetTensor]) -> FlatRange:
        """Assign targets read together, numbered from ``first`` on; returns the range of the first to be read here."""
        dp = len(self._load_nbytes)
        numel = targets[0].numel
        mine = FlatRange(0, 0)
        owners = range(dp)
        step = -(-numel // dp)
        if len(targets) > 1 or numel * ITEMSIZE[targets[0].dtype] <= _SMALL_NBYTES * dp:
            least = self._load_nbytes.index(min(self._load_nbytes))
            owners = range(least, least + 1)
            step = max(target.numel for target in targets)
        for number, target in enumerate(targets):
            for part, owner in enumerate(owners):
                elements = FlatRange(min(part * step, target.numel), min((part + 1) * step, target.numel))
                if elements.numel:
                    self.shares.append(BroadcastRange(first + number, elements, owner))
                    self._load_nbytes[owner] += elements.numel * ITEMSIZE[target.dtype]
                    mine = elements if number == 0 and owner == self._dp_rank else mine
        return mine


def split_plane(plane: RequantizeItem) -> tuple[list[ReadItem], list[RequantizeItem]]:
    """Split a plane, of which no two sources write the same element, into plain copies and items to requantize."""
    live = plane.blocks
    plane = replace(plane, sources=tuple(join_items(plane.sources)))
    if live is None:
        coded = tuple(item for item in plane.sources if item.code is not None)
        plain = [item for item in plane.sources if item.code is None]
        return plain, [replace(plane, sources=coded)] if coded else []
    copies: list[ReadItem] = []
    rest: list[tuple[int, int]] = []
    step = live.numel
    for item in plane.sources:
        code = item.code
        start = item.target_offset - plane.start
        stop = item.target_stop - plane.start
        end = live.blocks(stop)
        begin = live.blocks(start)
        whole = end if stop == plane.numel else stop // step
        in_grid = (
            code is not None
            and (code.format.numel, code.format.codebook) == (step, live.codebook)
            and not (start - code.position) % step
        )
        first, last = (begin, whole) if in_grid and begin < whole else (end, end)
        if first < last:  # blocks that the source has whole
            codes = item.clip(plane.start + first * step, min(plane.start + last * step, plane.stop))
            assert codes.code is not None
            file, scales, _ = codes.code.scales_of(codes.numel, item.file)
            to_scales = plane.scales_target, plane.scales_start + first, last - first
            copies += [replace(codes, code=None), ReadItem(file, scales, *to_scales, SCALE_DTYPE)]
        for left, right in ((start // step, first), (last, end)):
            if rest and left < right and left <= rest[-1][1]:
                rest[-1] = rest[-1][0], max(right, rest[-1][1])
            elif left < right:
                rest.append((left, right))
    parts = [(plane.start + first * step, min(plane.start + last * step, plane.stop)) for first, last in rest]
    return copies, [plane.part(start, stop) for start, stop in parts]


def requantized_blocks(item: RequantizeItem) -> int:
    """Number of blocks that mix elements of several source blocks, or take values that none of their codes has."""
    if (live := item.blocks) is None:
        return 0
    sources: dict[int, set[tuple[int, int, int]]] = {}
    of_values = (-1, -1, -1)  # and of codes of another codebook
    for source in item.sources:
        code = source.code
        start = source.target_offset
        while start < source.target_stop:
            stop = source.target_stop
            block = of_values
            if code is not None and code.format.codebook == live.codebook:
                position = code.position + start - source.target_offset
                number = position // code.format.numel
                stop = min(stop, start + (number + 1) * code.format.numel - position)
                file = (source.file, code.scales_offset) if code.origin < 0 else (-2, code.origin)
                block = *file, number
            for at in range((start - item.start) // live.numel, live.blocks(stop - item.start)):
                sources.setdefault(at, set()).add(block)
            start = stop
    return sum(len(found) > 1 or of_values in found for found in sources.values())

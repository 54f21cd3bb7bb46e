"""One pass over the bytes of files: the CRC32 of every record, and NaN and infinite values.

Threads read slices of files through a small buffer each, so that memory does not depend on file or record sizes, and
checksums of slices are combined. A chunk is checked while in the processor's cache. Files are not memory-mapped: a disk
failure under a map would kill the process without naming the file.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from isal import isal_zlib
from tqdm import tqdm

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import StorageChunk
from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, CheckpointMetadata, TensorMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.storage.local import open_stream
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding
from elastic_ckpt.tools.verification.archive import Record

#: Key of the weights that the model computes with, which metadata does not list.
_WEIGHTS = "weights"
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"})
#: Fits into a processor's cache.
CHUNK_NBYTES = 1 << 20
SLICE_NBYTES = 64 * CHUNK_NBYTES
#: Bytes read behind a chunk to complete its last value: the largest item, less one byte.
_MORE_NBYTES = max(ITEMSIZE.values()) - 1
#: Bits of infinity, by dtype; with greater ones, signs aside, a value is NaN.
_INFINITY = {
    **{"float64": 0x7FF0 << 48, "complex128": 0x7FF0 << 48, "float32": 0x7F80 << 16, "complex64": 0x7F80 << 16},
    **{"bfloat16": 0x7F80, "float16": 0x7C00, "complex32": 0x7C00, "float8_e5m2": 0x7C},
}
#: Bits of NaN in dtypes without infinity.
_NAN = {
    **{"float8_e4m3fn": (0x7F, 0xFF), "float8_e8m0fnu": (0xFF,)},
    **{"float8_e4m3fnuz": (0x80,), "float8_e5m2fnuz": (0x80,)},
}
#: Non-finite values: ``"nan"`` or ``"inf"`` -> their number, and the index of the first.
Odd = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Span:
    """Values in a file from byte ``offset`` on; the first is element ``start`` of its tensor or TP shard."""

    offset: int
    numel: int
    dtype: str
    name: str
    key: str
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Work:
    """Checks in bytes ``[start, stop)`` of a file: the CRC32 of records, and the values of spans."""

    path: str
    stop: int
    items: tuple[Record | Span, ...] = ()
    start: int = 0

    @property
    def records(self) -> list[Record]:
        """The records among the items."""
        return [item for item in self.items if isinstance(item, Record)]

    @property
    def has_checksums(self) -> bool:
        """Whether the file was saved with checksums, or has no data."""
        return any(record.crc32 for record in self.records) or not any(record.nbytes for record in self.records)

    def split(self, step: int) -> list[Work]:
        """Ranges of ``step`` bytes, at least one, each with the items that overlap it."""
        starts = range(self.start, max(self.stop, self.start + 1), step)
        items: list[list[Record | Span]] = [[] for _ in starts]
        for item in self.items:
            low, high = max(item.offset, self.start), min(item.offset + item.nbytes, self.stop)
            if low < high:
                for number in range((low - self.start) // step, (high - 1 - self.start) // step + 1):
                    items[number].append(item)
        return [
            Work(self.path, min(start + step, self.stop), tuple(inside), start)
            for start, inside in zip(starts, items, strict=True)
        ]


@dataclass
class Checked:
    """The outcome of a :class:`Work`: bytes read, (CRC32, bytes) per record, non-finite values, read failure."""

    nbytes: int = 0
    crc32: dict[Record, tuple[int, int]] = field(default_factory=dict)
    odd: dict[Span, Odd] = field(default_factory=dict)
    failure: str | None = None

    def add(self, following: Checked) -> None:
        """Add the outcome of the file's next range."""
        self.nbytes += following.nbytes
        self.failure = self.failure or following.failure
        for record, (crc, nbytes) in following.crc32.items():
            before, done = self.crc32.get(record, (0, 0))
            self.crc32[record] = isal_zlib.crc32_combine(before, crc, nbytes) if done else crc, done + nbytes
        for span, odd in following.odd.items():
            _add_odd(self.odd.setdefault(span, {}), odd)


def check(works: Sequence[Work], threads: int, show_progress: bool | None = False) -> list[Checked]:
    """Read and check files, with :data:`CHUNK_NBYTES` of buffer per thread; ``show_progress`` as in ``verify``."""
    results = [Checked() for _ in works]
    parts = [(number, part) for number, work in enumerate(works) for part in work.split(SLICE_NBYTES)]
    disable = None if show_progress is None else not show_progress
    buffers = threading.local()

    def run(part: Work) -> Checked:
        if not hasattr(buffers, "mine"):
            buffers.mine = memoryview(bytearray(CHUNK_NBYTES + _MORE_NBYTES))
        result = Checked()
        try:
            _check_part(part, buffers.mine, result)
        except OSError as error:
            result.failure = f"{type(error).__name__}: {error.strerror or error}"
        except ElasticCkptError as error:
            result.failure = f"{error.problem}: {error.found}"
        return result

    with ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool:
        total = sum(work.stop for work in works)
        with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=disable, leave=False) as bar:
            # after an error or Ctrl-C, map cancels pending work
            for (number, _), result in zip(parts, pool.map(run, [part for _, part in parts]), strict=True):
                results[number].add(result)
                bar.update(result.nbytes)
    return results


def _check_part(part: Work, buffer: memoryview, result: Checked) -> None:
    with open_stream(part.path, buffering=0) as stream:
        descriptor = stream.fileno()
        os.posix_fadvise(descriptor, part.start, part.stop - part.start, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(descriptor).st_size
        for chunk in part.split(CHUNK_NBYTES):
            nbytes = chunk.stop - chunk.start
            view = buffer[: max(nbytes, min(nbytes + _MORE_NBYTES, size - chunk.start))]
            _read(descriptor, chunk.start, view)
            result.nbytes += nbytes
            for item in chunk.items:
                if isinstance(item, Record):
                    low, high = max(item.offset - chunk.start, 0), item.offset + item.nbytes - chunk.start
                    crc, done = result.crc32.get(item, (0, 0))
                    inside = view[low : min(high, nbytes)]
                    result.crc32[item] = isal_zlib.crc32(inside, crc), done + len(inside)
                else:
                    _look_at(item, chunk, view, result)


def _look_at(span: Span, chunk: Work, view: memoryview, result: Checked) -> None:
    itemsize = ITEMSIZE[span.dtype]
    first = max(-(-(chunk.start - span.offset) // itemsize), 0)
    stop = min(-(-(chunk.stop - span.offset) // itemsize), span.numel)
    if first < stop:
        low = span.offset + first * itemsize - chunk.start
        if odd := look(view[low : low + (stop - first) * itemsize], span.dtype):
            _add_odd(result.odd.setdefault(span, {}), odd, first)


def _read(descriptor: int, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, at byte {offset + done}") from error
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}: it became shorter while it was read")
        done += count


def look(raw: memoryview, dtype: str) -> Odd:
    """Count NaN and infinite values among those of a floating-point dtype, by their bits."""
    parts = 2 if dtype.startswith("complex") else 1
    nbits = 8 * ITEMSIZE[dtype] // parts
    bits = np.frombuffer(raw, f"uint{nbits}")
    if dtype in _NAN:
        masks = {"nan": np.isin(bits, _NAN[dtype])}
    else:
        bits = bits & bits.dtype.type((1 << nbits - 1) - 1)
        infinity = _INFINITY[dtype]
        if bits.max(initial=0) < infinity:
            return {}
        masks = {"nan": bits > infinity, "inf": bits == infinity}
    by_value = {kind: mask.reshape(-1, parts).any(axis=1) for kind, mask in masks.items()}
    return {kind: (int(mask.sum()), int(mask.argmax())) for kind, mask in by_value.items() if mask.any()}


def _add_odd(total: Odd, more: Odd, start: int = 0) -> None:
    for kind, (count, first) in more.items():
        before, earliest = total.get(kind, (0, first + start))
        total[kind] = before + count, min(earliest, first + start)


def wrong_records(work: Work, checked: Checked) -> dict[Record, int]:
    """The records that have changed -> their present CRC32; those not read to their end are left out.

    If all CRC32 in a file are 0, it has none (``torch.serialization.set_crc32_options(False)``).
    """
    records = work.records if work.has_checksums else []
    now = {record: checked.crc32.get(record, (0, 0)) for record in records}
    return {record: crc for record, (crc, n) in now.items() if n == record.nbytes and crc != record.crc32}


def judge(path: str, odd: Mapping[Span, Odd]) -> Iterator[Finding]:
    """One finding per tensor and kind; infinity in a buffer may be intended, and is a note."""
    totals: dict[tuple[str, str], Odd] = {}
    for span, counts in odd.items():
        _add_odd(totals.setdefault((span.name, span.key), {}), counts, span.start)
    for (name, key), total in totals.items():
        counted = "block" if key.startswith("absmax") else "element"
        for kind, what in (("nan", "NaN"), ("inf", "infinite values")):
            if kind in total:
                count, first = total[kind]
                level = NOTE if kind == "inf" and key == BUFFER else ERROR
                yield Finding(level, kind, f"{count} {what} in {key}, the first at {counted} {first}", name, path)


def metadata_spans(metadata: CheckpointMetadata) -> dict[str, list[Span]]:
    """Path -> the values of tensors in that file, with replicas of other pipeline stages."""
    spans: dict[str, list[Span]] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        for chunk in tensor.chunks:
            if span := _span(tensor, chunk):
                spans.setdefault(metadata.files[chunk.file].path, []).append(span)
    return spans


def _span(tensor: TensorMetadata, chunk: StorageChunk) -> Span | None:
    """The values of a chunk, or the scales of a quantized one."""
    code = chunk.code
    if code is None:
        if tensor.dtype in _INTEGERS:
            return None
        return Span(chunk.byte_offset, chunk.range.numel, tensor.dtype, tensor.name, tensor.key, chunk.range.start)
    if not chunk.range.numel:
        return None
    first = code.position // code.format.numel
    last = (code.position + chunk.range.numel - 1) // code.format.numel
    offset = code.scales_offset + first * ITEMSIZE["float32"]
    return Span(offset, last - first + 1, "float32", tensor.name, code.format.scales, first)


def weight_spans(
    path: str, found: Found, known: Sequence[Span], with_states: bool, config: ElasticConfig
) -> list[Span]:
    """The weights that the model computes with in the file ``path``, named by their paths in its tree.

    Spans in ``known``, and duplicates, are left out. ``with_states``: whether to add unpartitioned optimizer states.
    """
    name, files = os.path.basename(path), found.files
    name = files.copies.get(name, name)
    is_layer = name in (*files.layers.values(), *files.experts.values())
    models = *files.model.values(), *files.model_zero3.values(), *files.expert_optimizers.values()
    if os.path.dirname(path) != found.folder or not (is_layer or name in models):
        return []
    try:
        tree = open_pickled(path, config.trust_pickle).tree
    except ElasticCkptError:
        return []  # it is a finding already
    if not isinstance(tree, dict):
        return []
    tensors = list(_tensors(tree if is_layer else tree.get("module"), ""))
    if with_states and not is_layer:
        tensors += _tensors(tree.get("optimizer"), "optimizer")
    seen = {(span.offset, span.numel) for span in known}
    spans: dict[tuple[int, int], Span] = {}
    for name, ref in tensors:
        at = ref.byte_offset, ref.numel
        if ref.dtype not in _INTEGERS and ref.is_contiguous and ref.numel and ref.swap_id is None and at not in seen:
            spans.setdefault(at, Span(*at, ref.dtype, name, _WEIGHTS, 0))
    return list(spans.values())


def _tensors(node: Any, name: str) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(node, TensorRef):
        yield name, node
    elif isinstance(node, Mapping | list | tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(value, f"{name}/{key}" if name else str(key))

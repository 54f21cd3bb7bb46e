"""One pass over the bytes of a file: the CRC32 of every record, and NaN and infinite values.

A file is read in chunks that fit into a processor's cache, so that memory does not depend on its size. It is not
memory-mapped: a disk failure under a map would kill the process without naming the file.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.storage.local import open_stream
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding

CHUNK_NBYTES = 1 << 20
#: Bytes read behind a chunk to complete its last value: the largest item, less one byte.
_MORE_NBYTES = max(ITEMSIZE.values()) - 1
#: Dtypes of which values are looked at; ``bfloat16`` by its bits.
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})
_WORDS = {"nan": "NaN", "inf": "infinite values"}
#: Number of values of one kind in a tensor's part, and the index of the first.
_Counts = dict[str, tuple[int, int]]


class Record(NamedTuple):
    """Byte range of a record's data, and its CRC32 by the archive's directory (0: none)."""

    offset: int
    nbytes: int
    crc32: int


class Span(NamedTuple):
    """Values in a file from byte ``offset`` on; the first is element ``start`` of its tensor or TP shard."""

    offset: int
    nbytes: int
    dtype: str
    name: str
    key: str
    start: int


def scan_file(
    path: str, nbytes: int, records: Sequence[Record], spans: Sequence[Span], advance: Callable[[int], object]
) -> Iterator[Finding]:
    """Read a file; findings on its records and values. ``advance`` is called with the bytes that were read."""
    sums, odd = dict.fromkeys(records, 0), dict[tuple[str, str], _Counts]()
    waiting: list[Record | Span] = [*records, *spans]
    waiting.sort(key=lambda item: -item.offset)
    active: list[Record | Span] = []
    try:
        with open_stream(path) as stream:
            for start in range(0, nbytes, CHUNK_NBYTES):
                stop = min(start + CHUNK_NBYTES, nbytes)
                stream.seek(start)
                view = memoryview(stream.read(min(CHUNK_NBYTES + _MORE_NBYTES, nbytes - start)))
                if len(view) < stop - start:
                    raise OSError(errno.EIO, f"the file ends at byte {start + len(view)}: it became shorter meanwhile")
                while waiting and waiting[-1].offset < stop:
                    active.append(waiting.pop())
                for item in active:
                    if isinstance(item, Record):
                        low, high = max(item.offset, start), min(item.offset + item.nbytes, stop)
                        sums[item] = isal_zlib.crc32(view[low - start : high - start], sums[item])
                    else:
                        _look_at(item, start, stop, view, odd.setdefault((item.name, item.key), {}))
                active = [item for item in active if item.offset + item.nbytes > stop]
                advance(stop - start)
    except (OSError, ElasticCkptError) as error:
        found = error.strerror if isinstance(error, OSError) else f"{error.problem}: {error.found}"
        yield Finding(ERROR, "read-error", found or str(error), file=path)
        return
    for record, crc32 in sums.items():
        if record.crc32 and crc32 != record.crc32:
            text = f"the {record.nbytes} bytes of a tensor from byte {record.offset} on have changed since the save"
            crcs = f"CRC32 {record.crc32:#010x}", f"{crc32:#010x}"
            yield Finding(ERROR, "checksum", text, file=path, expected=crcs[0], found=crcs[1])
    for (name, key), counts in odd.items():
        for kind, (count, first) in counts.items():
            unit = "block" if key.startswith("absmax") else "element"
            text = f"{count} {_WORDS[kind]} in {key}, the first at {unit} {first}"
            # infinity in a buffer may be intended: a mask
            yield Finding(NOTE if kind == "inf" and key == BUFFER else ERROR, kind, text, name, path)


def _look_at(span: Span, start: int, stop: int, view: memoryview, counts: _Counts) -> None:
    """Count what is not finite among the values of a span that begin in bytes ``[start, stop)``, by ``view``."""
    itemsize = ITEMSIZE[span.dtype]
    first = max(-(-(start - span.offset) // itemsize), 0)
    last = min(-(-(stop - span.offset) // itemsize), span.nbytes // itemsize)
    low = span.offset + first * itemsize - start
    raw = view[low : low + max(last - first, 0) * itemsize]
    if span.dtype == "bfloat16":
        values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(raw, span.dtype)
    if np.isfinite(values).all():
        return
    nan = np.isnan(values)
    for kind, mask in (("nan", nan), ("inf", np.isinf(values) & ~nan)):
        if mask.any():
            before, earliest = counts.get(kind, (0, 1 << 62))
            at = span.start + first + int(mask.argmax())
            counts[kind] = before + int(mask.sum()), min(earliest, at)


def spans_of(metadata: CheckpointMetadata) -> dict[str, list[Span]]:
    """Path -> the values of tensors in that file, or scales of quantized ones; with replicas of other stages."""
    spans: dict[str, list[Span]] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        for chunk in tensor.chunks:
            code, numel = chunk.code, chunk.range.numel
            if not numel or (code is None and tensor.dtype not in _FLOATS):
                continue
            if code is None:
                nbytes = numel * ITEMSIZE[tensor.dtype]
                span = Span(chunk.byte_offset, nbytes, tensor.dtype, tensor.name, tensor.key, chunk.range.start)
            else:  # its scales
                size = ITEMSIZE["float32"]
                first, last = code.position // code.format.numel, (code.position + numel - 1) // code.format.numel
                offset, nbytes = code.scales_offset + first * size, (last - first + 1) * size
                span = Span(offset, nbytes, "float32", tensor.name, code.format.scales, first)
            spans.setdefault(metadata.files[chunk.file].path, []).append(span)
    return spans

"""Verification that a checkpoint is complete, of one save and undamaged.

Its steps: folder, metadata, records and their checksums, values, replicas. Files are judged by the reader of loads.
A file is read in chunks that fit into a processor's cache, so that memory does not depend on its size. It is not
memory-mapped: a disk failure under a map would kill the process without naming the file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, CheckpointMetadata, SourceFile
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, listed
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.pickled import PickledFile, open_file
from elastic_ckpt.report import progress_bar
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.storage.local import open_stream
from elastic_ckpt.tools.inspection import ERROR, NOTE, Finding, check_metadata, of_error
from elastic_ckpt.tools.opened import locate_despite_latest
from elastic_ckpt.tools.verification.files import (
    OTHER,
    OWN,
    SWAPPED,
    files_by_kind,
    of_unreadable,
    read_metadata,
    size_of,
)

CHUNK_NBYTES = 1 << 20
#: Bytes read behind a chunk to complete its last value: the largest item, less one byte.
_MORE_NBYTES = max(ITEMSIZE.values()) - 1
#: Dtypes of which values are looked at; ``bfloat16`` by its bits.
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})
_WORDS = {"nan": "NaN", "inf": "infinite values"}
#: Number of values of one kind in a tensor's part, and the index of the first.
_Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification."""

    folder: str  # requested absolute path
    tag: str  # verified tag
    full: bool  # whether every byte was read, or only metadata
    findings: tuple[Finding, ...]  # problems
    notes: tuple[Finding, ...]  # other facts, and what was not checked
    files: int  # number of files checked
    tensors: int  # number of logical tensors checked: masters, states, buffers, frozen weights
    nbytes: int  # read and checked; without ``full``, the size of the files
    seconds: float


def verify(
    folder: str,
    tag: str | None,
    config: ElasticConfig,
    full: bool = False,
    threads: int = 4,
    show_progress: bool | None = False,
) -> Verification:
    """Find all problems of a checkpoint.

    Args:
        folder, tag: folder with a ``latest`` file, or of a tag; tag to verify, or ``None`` for the latest.
        config: as for a load.
        full: read every byte, to check checksums, non-finite values and replicas.
        threads: number of reading threads.
        show_progress: whether to show a progress bar; ``None``: if standard error is a terminal.

    Raises:
        NotFoundError: there is no such checkpoint.
        ConfigError: there is no such preset.
    """
    began = time.perf_counter()
    ShardingRules.of(config)  # a missing preset is an error at once, not after an hour of reading
    found, misled = locate_despite_latest(folder, tag, config.trust_pickle)
    findings: list[Finding] = []
    if misled is not None:
        findings += [of_error(misled, "latest"), Finding(NOTE, "latest", f"verified {found.tag} instead")]
    files = files_by_kind(found)
    checked = files[OWN] | files[SWAPPED]
    metadata, wrong = read_metadata(found, config)
    findings += wrong
    names = [os.path.relpath(path, found.folder) for path in files[OTHER]]
    if others := [name for name in names if os.sep not in name and not name.endswith(".py")]:  # DeepSpeed's scripts
        findings.append(Finding(NOTE, "not-checked", f"files that are none of DeepSpeed's: {listed(others)}"))
    if metadata is not None:
        findings += check_metadata(metadata)
    if full:
        findings += _check_bytes(found, files, metadata, config, threads, show_progress)
    unique = tuple(dict.fromkeys(findings))
    return Verification(
        folder=os.path.abspath(folder),
        tag=found.tag,
        full=full,
        findings=tuple(finding for finding in unique if finding.level == ERROR),
        notes=tuple(finding for finding in unique if finding.level == NOTE),
        files=len(checked),
        tensors=len(metadata.tensors) if metadata is not None else 0,
        nbytes=sum(checked.values()),
        seconds=time.perf_counter() - began,
    )


def _check_bytes(
    found: CheckpointInfo,
    files: dict[str, dict[str, int]],
    metadata: CheckpointMetadata | None,
    config: ElasticConfig,
    threads: int,
    show_progress: bool | None,
) -> Iterator[Finding]:
    """Read all files."""
    known: dict[str, SourceFile] = {} if metadata is None else {file.path: file for file in metadata.files}
    spans = {} if metadata is None else spans_of(metadata)
    is_read = True

    def check(path: str) -> list[Finding]:
        file: SourceFile | PickledFile | None = known.get(path)
        findings: list[Finding] = []
        if file is None and path in files[OWN] and not found.foreign:
            try:
                file = open_file(path, config.trust_pickle)
            except ElasticCkptError as error:
                findings.append(of_unreadable(error))
        records = [] if file is None else [Record(*record) for record in file.records if record[1]]
        has_data = records or spans.get(path) or path in files[SWAPPED] or os.path.basename(path) == DCP_METADATA
        if has_data and not any(record.crc32 for record in records):
            text = "saved without checksums: bit flips are undetectable, only values are looked at"
            findings.append(Finding(NOTE, "no-checksum", text, file=path))
        return [*findings, *scan_file(path, size_of(path), records, spans.get(path, []), bar.update)]

    sizes = files[OWN] | files[SWAPPED]
    with (
        progress_bar("verify", sum(sizes.values()), show_progress, leave=False) as bar,
        ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool,
    ):
        for findings in pool.map(check, sizes):
            is_read &= all(finding.kind != "read-error" for finding in findings)
            yield from findings
    if metadata is not None and is_read and (metadata.source.tp > 1 or metadata.replicas):
        from elastic_ckpt.tools.comparison import check_copies  # noqa: PLC0415  it takes torch to import

        try:
            yield from check_copies(metadata, config, threads)
        except (DamagedError, MismatchError) as error:
            yield of_error(error)


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

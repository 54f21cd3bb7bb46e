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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import ne
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, CheckpointMetadata, SourceFile
from elastic_ckpt.core.resume_sheet import SHEET
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, NotFoundError, UnsupportedError, listed
from elastic_ckpt.formats import CheckpointInfo, naming
from elastic_ckpt.formats.base import refuse_swapped
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, list_tags, read_latest
from elastic_ckpt.formats.pickled import PickledFile, open_file, refuse_unmade
from elastic_ckpt.formats.safetensors import SUFFIX
from elastic_ckpt.formats.values import to_numbers
from elastic_ckpt.planning.read_items import shared_bytes_error
from elastic_ckpt.report import progress_bar
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.storage import VIEW, absolute, copies_of, is_url, open_stream, seen_through, walk
from elastic_ckpt.storage.local import version_of
from elastic_ckpt.tools.incomplete import missing_paths
from elastic_ckpt.tools.inspection import (
    ERROR,
    NOTE,
    UNCHECKED,
    Finding,
    check_metadata,
    kind_of,
    of_error,
    of_folders,
    of_missing,
    of_unreadable,
)
from elastic_ckpt.tools.module_files import layer_findings, odd_entries
from elastic_ckpt.tools.opened import locate, open_checkpoint

CHUNK_NBYTES = 1 << 20
#: Bytes read behind a chunk to complete its last value: the largest item, less one byte.
_MORE_NBYTES = max(ITEMSIZE.values()) - 1
#: Dtypes of which values are looked at.
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})
#: How the files of formats that are not DeepSpeed's end.
_ENDINGS = {"dcp": (naming.DCP_METADATA, naming.DCP_SUFFIX), "safetensors": (SUFFIX,)}
OWN = "own"
SWAPPED = "swapped"
OTHER = "other"
#: Kind of the finding on optimizer states that are not in the metadata, as of ``inspect``'s.
_STATES = "states"
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
    unchecked: tuple[Finding, ...]  # what this version refuses to read, so that it cannot tell whether it is whole
    notes: tuple[Finding, ...]  # other facts, and what was left out on purpose
    files: int  # number of files checked
    tensors: int  # number of logical tensors checked: masters, states, buffers, frozen weights
    nbytes: int  # read and checked; without ``full``, the size of the files
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all was checked, and nothing is wrong."""
        return not self.findings and not self.unchecked

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Why it is not ok: what is wrong, then what could not be checked."""
        return (*self.findings, *self.unchecked)


def verify(
    folder: str,
    tag: str | None,
    config: ElasticConfig,
    full: bool = False,
    threads: int = 4,
    show_progress: bool | None = False,
) -> Verification:
    """Find all problems of a checkpoint; ``full``: by every byte, with checksums, non-finite values and replicas.

    Raises :class:`NotFoundError` if there is no such checkpoint, :class:`ConfigError` if there is no such preset.
    """
    began = time.perf_counter()
    ShardingRules.of(config)  # a missing preset is an error at once, not after an hour of reading
    path = absolute(folder)
    misled = list[Finding]()
    try:
        found = locate(path, tag, config.trust_pickle, without_latest=False)  # its loss is a finding
    except (NotFoundError, DamagedError) as error:
        tags = list_tags(path) if tag is None else []
        for pointer in (LATEST_UNIVERSAL, LATEST):  # where one of them can be read, it counts
            with suppress(DamagedError):
                tags.sort(key=partial(ne, read_latest(path, pointer)))
        if not tags:
            raise
        found = locate(path, tags[0], config.trust_pickle)
        misled = [of_error(error, "latest"), Finding(NOTE, "latest", f"verified {found.tag} instead")]
    metadata, findings = read_metadata(found, config)
    unlisted = list[OSError]()
    files = files_by_kind(found, unlisted.append)
    findings += [_of_unlisted(found, error) for error in unlisted]
    is_whole = all(finding.kind not in (_STATES, "missing") for finding in findings)
    if metadata is not None and found.by_rank and is_whole:  # not what is left out, with a note
        of_ranks = (*found.files.optimizer.values(), *found.files.model_zero3.values())
        for path in {*map(found.path, of_ranks)} - {file.path for file in metadata.files}:
            files[OWN].pop(path, None)
    checked = files[OWN] | files[SWAPPED]
    names = [name for path in files[OTHER] if (name := os.path.relpath(path, found.folder)) != SHEET]
    if others := [name for name in names if os.sep not in name and not name.endswith(".py")]:  # DeepSpeed's scripts
        findings.append(Finding(NOTE, "not-checked", f"files that are not DeepSpeed's: {listed(others)}"))
    if metadata is not None:
        are_read = all(finding.level != ERROR for finding in findings)  # else perhaps without what is damaged
        findings += [each for each in check_metadata(metadata) if are_read or each.kind != "state-missing"]
    if full:
        is_bounded = metadata is not None and shared_bytes_error(metadata) is None
        findings += _check_bytes(found, files, metadata if is_bounded else None, config, threads, show_progress)
    unique = tuple(dict.fromkeys(finding.placed() for finding in (*misled, *findings, *of_folders(found.folder))))
    return Verification(
        folder=path,
        tag=found.tag,
        full=full,
        findings=tuple(finding for finding in unique if finding.level == ERROR),
        unchecked=tuple(finding for finding in unique if finding.level == UNCHECKED),
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
    sizes = files[OWN] | files[SWAPPED]
    is_read = True
    view = VIEW.get()

    def check(path: str, copy: str, is_read: bool) -> list[Finding]:
        # an object is read as the file that it is seen as, one of a folder where it is
        with seen_through(view if is_url(copy) else None):
            return check_copy(path, path if is_url(copy) else copy, is_read)

    def check_copy(path: str, copy: str, is_read: bool) -> list[Finding]:
        file: SourceFile | PickledFile | None = known.get(path)
        findings = list[Finding]()
        is_pickled = path in files[OWN] and not found.foreign
        values = spans.get(path, [])
        if is_pickled and (file is None or not is_read):
            try:
                first = file
                file = open_file(copy, config.trust_pickle)
                values = values if first is None or [*file.records] == [*first.records] else []
            except ElasticCkptError as error:
                findings.append(of_unreadable(error))
                if file is None:  # whose bytes nothing says what to compare with
                    bar.update(sizes[path])
                    return findings
        records = [] if file is None else [Record(*record) for record in file.records if record[1]]
        has_data = records or values or path in files[SWAPPED] or os.path.basename(path) == naming.DCP_METADATA
        if has_data and not any(record.crc32 for record in records):
            text = "saved without checksums: bit flips are undetectable, only values are checked"
            findings.append(Finding(NOTE, "no-checksum", text, file=copy))
        nbytes = sizes[path] if is_read else version_of(copy).nbytes
        return [*findings, *scan_file(copy, nbytes, records, values, bar.update)]

    copies = [(path, copy, not number) for path in sizes for number, copy in enumerate(copies_of(path))]
    copies = [each for each in copies if each[2] or not is_url(each[1])]
    with (
        progress_bar("verify", sum(sizes[path] for path, *_ in copies), show_progress, leave=False) as bar,
        ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool,
    ):
        for findings in pool.map(lambda each: check(*each), copies):
            is_read &= all(finding.kind != "read-error" for finding in findings)
            yield from findings
    if metadata is not None and is_read and (metadata.source.tp > 1 or metadata.replicas):
        try:
            from elastic_ckpt.tools.comparison import check_copies  # noqa: PLC0415  it takes torch to import

            yield from check_copies(metadata, config, threads)
        except (DamagedError, MismatchError) as error:
            yield of_error(error)
        except ModuleNotFoundError as error:
            yield Finding(NOTE, "not-checked", f"whether copies of tensors are equal: {error}")


def files_by_kind(
    found: CheckpointInfo, on_error: Callable[[OSError], object] | None = None
) -> dict[str, dict[str, int]]:
    """By :data:`OWN`, :data:`SWAPPED` (from NVMe) and :data:`OTHER` (none of DeepSpeed's): path -> size in bytes.

    Of every file in the tag's folder and below it, links followed; opens none. ``on_error``: of what is not looked at.
    """
    files: dict[str, dict[str, int]] = {OWN: {}, SWAPPED: {}, OTHER: {}}
    for path, version in walk(found.folder, on_error):
        files[_kind_of_file(found, os.path.relpath(path, found.folder))][path] = version.nbytes
    return files


def _of_unlisted(found: CheckpointInfo, error: OSError) -> Finding:
    """The finding for a folder that was not looked into; where DeepSpeed has files, it is more than a note."""
    path = os.fsdecode(error.filename)
    top = os.path.relpath(path, found.folder).split(os.sep)[0]
    is_own = top in (naming.SWAPPED_FOLDER, naming.UNIVERSAL_FOLDER) and error.errno != errno.ENAMETOOLONG
    text = f"what is in this folder: {error.strerror}"
    return Finding(UNCHECKED if is_own else NOTE, "not-checked", text, file=path)


def _kind_of_file(found: CheckpointInfo, name: str) -> str:
    top, _, inside = name.partition(os.sep)
    if top == naming.SWAPPED_FOLDER and inside:
        return SWAPPED
    if found.foreign or name.endswith(tuple(chain.from_iterable(_ENDINGS.values()))):
        is_own = name.endswith(_ENDINGS.get(found.format, ()))
    elif top == naming.UNIVERSAL_FOLDER and inside:
        is_own = found.files.is_universal and name.endswith(".pt")
    else:
        files = naming.sort_names([name], is_universal=False)
        is_own = bool(files.layers or files.mp_ranks or files.of_experts)
    return OWN if is_own else OTHER


def _missing_files(found: CheckpointInfo, config: ElasticConfig) -> Iterator[Finding]:
    """Findings on the files that a folder should have and has not."""
    return map(of_missing, missing_paths(found, config.trust_pickle))


def read_metadata(found: CheckpointInfo, config: ElasticConfig) -> tuple[CheckpointMetadata | None, list[Finding]]:
    """The metadata, as a load would read it; else what is wrong with each file."""
    try:
        metadata = open_checkpoint(found, config, with_unmade=False).checkpoint.metadata
        # of a pipeline, masters alone are enough to read
        missing = _missing_files(found, config) if found.files.layers else ()
        return metadata, [*missing, *layer_findings(found, config.trust_pickle)]
    except ElasticCkptError as raised:
        error = raised
    if found.foreign:
        return None, [of_unreadable(error, kind_of(error)), Finding(NOTE, "not-checked", "anything else")]
    findings = list(_missing_files(found, config))
    for path in files_by_kind(found)[OWN]:
        try:
            file = open_file(path, config.trust_pickle)
            refuse_unmade(file)
            refuse_swapped(file)
        except ElasticCkptError as refused:
            findings.append(of_unreadable(refused))
    if isinstance(error, UnsupportedError):
        return None, [*findings, of_unreadable(error)]
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        with suppress(ElasticCkptError):  # then they are not the reason
            weights = open_checkpoint(found, config, with_states=False, with_unmade=False).checkpoint.metadata
            # without ZeRO, states that only a live model can name are no damage
            return weights, [of_error(error, _STATES, NOTE), *odd_entries(found, config.trust_pickle)]
    if error.file not in {finding.file for finding in findings}:
        findings.append(of_error(error))
    values_alone = config.model_copy(update={"verify": "bytes"})  # contradict each other, maybe
    for options, with_states in ((values_alone, True), (config, False)):
        if with_states or not found.files.model_zero3:
            with suppress(ElasticCkptError):
                return open_checkpoint(found, options, with_states).checkpoint.metadata, findings
    note = Finding(NOTE, "not-checked", "the tensors, since not all files can be read together")
    return None, [*findings, note]


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
    sums = dict.fromkeys(records, 0)
    odd = dict[tuple[str, str], _Counts]()
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
                        low = max(item.offset, start)
                        high = min(item.offset + item.nbytes, stop)
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
    values = to_numbers(span.dtype, raw)
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
            code = chunk.code
            numel = chunk.range.numel
            file = chunk.file
            if not numel or (code is None and tensor.dtype not in _FLOATS):
                continue
            if code is None:
                nbytes = numel * ITEMSIZE[tensor.dtype]
                span = Span(chunk.byte_offset, nbytes, tensor.dtype, tensor.name, tensor.key, chunk.range.start)
            else:  # its scales
                file, offset, nbytes = code.scales_of(numel, file)
                first = code.position // code.format.numel
                span = Span(offset, nbytes, "float32", tensor.name, code.format.scales, first)
            spans.setdefault(metadata.files[file].path, []).append(span)
    return spans

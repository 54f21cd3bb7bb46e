"""Verification that a checkpoint is complete, of one save and undamaged.

Its steps: folder, metadata, records and their checksums, values, replicas. Files are judged by the reader of loads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFile
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, listed
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.pickled import PickledFile, open_file
from elastic_ckpt.report import progress_bar
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, check_metadata, kind_of, of_error
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
from elastic_ckpt.tools.verification.scan import Record, scan_file, spans_of


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        folder, tag: requested absolute path; verified tag.
        full: whether every byte was read, or only metadata.
        findings, notes: problems; other facts, and what was not checked.
        files, tensors: number of files and of logical tensors (masters, states, buffers, frozen weights) checked.
        nbytes: bytes read and checked; without ``full``, the size of the files.
    """

    folder: str
    tag: str
    full: bool
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    files: int
    tensors: int
    nbytes: int
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
            yield of_error(error, kind_of(error))

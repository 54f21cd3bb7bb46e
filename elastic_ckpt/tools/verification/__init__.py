"""Verification that a checkpoint is complete, of one save and undamaged; lists all problems.

Its steps: folder, metadata, archives, records and their checksums, values, replicas.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats import Found
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, kind_of, of_error
from elastic_ckpt.tools.verification.archive import Record, read_archive
from elastic_ckpt.tools.verification.contents import check_copies, check_metadata
from elastic_ckpt.tools.verification.files import checkpoint_files, choose, other_files, read_metadata, swap_files
from elastic_ckpt.tools.verification.scan import (
    Checked,
    Span,
    Work,
    check,
    judge,
    metadata_spans,
    weight_spans,
    wrong_records,
)

#: Problems listed of one file; the rest are counted.
_MOST_PROBLEMS = 40


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        folder, tag: requested absolute path; verified tag, or ``None`` if ambiguous.
        full: whether every byte was read, or only metadata.
        findings, notes: problems; other facts, and what was not checked.
        files, tensors: number of files and of logical tensors (masters, states, buffers, frozen weights) checked.
        nbytes: bytes read and checked; without ``full``, the size of the files.
    """

    folder: str
    tag: str | None
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
    RuleBook.of(config)  # a missing preset is an error at once, not after an hour of reading
    found, findings = choose(folder, tag, config.trust_pickle)
    files: list[str] = []
    metadata: CheckpointMetadata | None = None
    nbytes = 0
    if found is not None:
        files = [*checkpoint_files(found), *swap_files(found)]
        metadata, wrong = read_metadata(found, config)
        findings += wrong
        if others := other_files(found):
            findings.append(Finding(NOTE, "not-checked", f"files that are none of DeepSpeed's: {listed(others)}"))
        if metadata is not None:
            findings += check_metadata(metadata)
        if full:
            nbytes = _check_bytes(found, metadata, config, threads, show_progress, findings)
    if not full:
        nbytes = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    unique = tuple(dict.fromkeys(findings))
    return Verification(
        folder=os.path.abspath(folder),
        tag=found.tag if found is not None else None,
        full=full,
        findings=tuple(finding for finding in unique if finding.level == ERROR),
        notes=tuple(finding for finding in unique if finding.level == NOTE),
        files=len(files),
        tensors=len(metadata.tensors) if metadata is not None else 0,
        nbytes=nbytes,
        seconds=time.perf_counter() - began,
    )


def _check_bytes(
    found: Found,
    metadata: CheckpointMetadata | None,
    config: ElasticConfig,
    threads: int,
    show_progress: bool | None,
    findings: list[Finding],
) -> int:
    """Read all files and append to ``findings``; returns the number of bytes read."""
    known = metadata_spans(metadata) if metadata is not None else {}
    works = []
    for path in checkpoint_files(found):
        spans = known.get(path, [])
        weights = weight_spans(path, found, spans, metadata is None, config)
        works.append(_archive_work(path, [*spans, *weights], findings))
    for path in swap_files(found):
        text = "a swap file of NVMe offload: raw bytes, saved without a checksum; only their values are looked at"
        findings.append(Finding(NOTE, "no-checksum", text, file=path))
        works.append(_work(path, os.path.getsize(path), (), known.get(path, [])))
    checked = check(works, threads, show_progress)
    for work, result in zip(works, checked, strict=True):
        findings += _limited(work.path, _judge_bytes(work, result))
        findings += judge(work.path, result.odd)
    if metadata is not None and not any(result.failure for result in checked):
        try:
            findings += check_copies(metadata, config, threads)
        except DamagedError as error:
            findings.append(of_error(error, kind_of(error)))
    return sum(result.nbytes for result in checked)


def _archive_work(path: str, spans: Sequence[Span], findings: list[Finding]) -> Work:
    """The work for a ``torch.save`` file; problems of the archive itself are appended to ``findings``."""
    try:
        with open(path, "rb", buffering=0) as stream:
            archive = read_archive(stream)
            nbytes = stream.seek(0, os.SEEK_END)
    except OSError as error:
        findings.append(Finding(ERROR, "read-error", str(error), file=path))
        return Work(path, 0)
    findings += _limited(path, (Finding(ERROR, kind, text, file=path) for kind, text in archive.problems))
    work = _work(path, nbytes, archive.records, spans)
    if not work.has_checksums:
        text = "saved without checksums (torch.serialization.set_crc32_options(False)): turned bits cannot be seen"
        findings.append(Finding(NOTE, "no-checksum", text, file=path))
    return work


def _work(path: str, nbytes: int, records: Sequence[Record], spans: Sequence[Span]) -> Work:
    return Work(path, nbytes, (*records, *(span for span in spans if span.offset + span.nbytes <= nbytes)))


def _judge_bytes(work: Work, result: Checked) -> Iterator[Finding]:
    if result.failure is not None:
        yield Finding(ERROR, "read-error", result.failure, file=work.path)
    for record, crc in wrong_records(work, result).items():
        text = (
            f"record {record.name} ({record.nbytes} bytes from byte {record.offset} on) has the CRC32 {crc:#010x}, "
            f"and was saved with {record.crc32:#010x}: its bytes have changed"
        )
        yield Finding(ERROR, "checksum", text, file=work.path)


def _limited(path: str, findings: Iterable[Finding]) -> list[Finding]:
    every = list(findings)
    more = len(every) - _MOST_PROBLEMS
    if more <= 0:
        return every
    text = f"and {more} more problems in this file"
    return [*every[:_MOST_PROBLEMS], Finding(ERROR, every[0].kind, text, file=path)]

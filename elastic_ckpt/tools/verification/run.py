"""A verification from top to bottom."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import DamagedError, ElasticCkptError, listed
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.tools.opened import rule_book
from elastic_ckpt.tools.verification.archive import Directory, Problem, read_directory
from elastic_ckpt.tools.verification.checksums import Checked, Work, check, has_checksums, wrong_records
from elastic_ckpt.tools.verification.contents import check_catalog
from elastic_ckpt.tools.verification.copies import check_copies
from elastic_ckpt.tools.verification.diagnosis import Diagnosis, read_metadata
from elastic_ckpt.tools.verification.findings import (
    CHECKSUM,
    IO,
    NO_CHECKSUM,
    UNCHECKED,
    Finding,
    Verification,
    of_error,
    without_repeats,
)
from elastic_ckpt.tools.verification.folder import checkpoint_files, choose, other_files, swap_files
from elastic_ckpt.tools.verification.records import Record, read_records
from elastic_ckpt.tools.verification.scan import Span, catalog_spans, judge, weight_spans, without_twice

#: Of one file, so many problems are listed, and the rest counted.
_MOST_PROBLEMS = 40


@dataclass
class _Report:
    """What was found so far."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    nbytes: int = 0

    def add(self, both: tuple[Iterable[Finding], Iterable[Finding]]) -> None:
        """Findings and notes."""
        self.findings += both[0]
        self.notes += both[1]


def verify(
    folder: str,
    tag: str | None,
    config: ElasticConfig,
    full: bool = False,
    threads: int = 4,
    show_progress: bool | None = False,
) -> Verification:
    """Look for everything that is wrong with a checkpoint.

    Args:
        folder: one with a ``latest`` file, or that of a tag.
        tag: which checkpoint of the folder; ``None``: the latest.
        config: as for a load.
        full: read every byte: checksums, values that are no numbers, copies that have drifted apart.
        threads: how many read at once.
        show_progress: of reading: whether to draw a bar; ``None``: if standard error is a terminal.

    Raises:
        NotFoundError: there is no checkpoint to look at.
        ConfigError: the config names rules that are not there.
    """
    began = time.perf_counter()
    rule_book(config)  # a preset that is not there is an error at once, not after an hour of reading
    report = _Report()
    found, findings, notes = choose(folder, tag, config.trust_pickle)
    report.add((findings, notes))
    files = [] if found is None else [*checkpoint_files(found), *swap_files(found)]
    metadata: CheckpointMetadata | None = None
    if found is not None:
        diagnosis = read_metadata(found, config)
        metadata = diagnosis.metadata
        report.add((diagnosis.findings, diagnosis.notes))
        if others := other_files(found):
            report.notes.append(Finding(UNCHECKED, f"files that are none of DeepSpeed's: {listed(others)}"))
        if metadata is not None:
            report.add(check_catalog(metadata))
        if full:
            _check_bytes(found, diagnosis, config, threads, show_progress, report)
    if not full:
        report.nbytes = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    return Verification(
        folder=os.path.abspath(folder),
        tag=found.tag if found is not None else None,
        full=full,
        findings=without_repeats(report.findings),
        notes=without_repeats(report.notes),
        files=len(files),
        tensors=len(metadata.tensors) if metadata is not None else 0,
        nbytes=report.nbytes,
        seconds=time.perf_counter() - began,
    )


def _check_bytes(
    found: Found,
    diagnosis: Diagnosis,
    config: ElasticConfig,
    threads: int,
    show_progress: bool | None,
    report: _Report,
) -> None:
    metadata = diagnosis.metadata
    known = catalog_spans(metadata) if metadata is not None else {}
    archives = checkpoint_files(found)
    works = [_archive_work(path, found, known.get(path, []), metadata is None, config, report) for path in archives]
    works += [_swap_work(path, known.get(path, []), report) for path in swap_files(found)]
    checked = check(works, threads, show_progress)
    for work, result in zip(works, checked, strict=True):
        report.nbytes += result.nbytes
        report.findings += _limited(work.path, _judge_bytes(work, result))
        report.add(judge(work.path, result.seen))
    failed = any(result.failure for result in checked)
    if metadata is not None and not failed:
        try:
            report.add(check_copies(metadata, config, threads))
        except DamagedError as error:
            report.findings.append(of_error(error))


def _archive_work(
    path: str, found: Found, known: Sequence[Span], without_catalog: bool, config: ElasticConfig, report: _Report
) -> Work:
    """What is to be checked in a ``torch.save`` file; what is wrong with the archive itself is reported at once."""
    problems: list[Problem] = []
    records: tuple[Record, ...] = ()
    try:
        nbytes = os.path.getsize(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:

            def read(offset: int, count: int) -> bytes:
                return os.pread(descriptor, max(count, 0), offset)

            directory: Directory = read_directory(read, nbytes)
            problems += directory.problems
            records = read_records(read, directory, problems)
        finally:
            os.close(descriptor)
    except OSError as error:
        report.findings.append(Finding(IO, str(error), path))
        return Work(path, 0)
    report.findings += _limited(path, (Finding(code, what, path) for code, what in problems))
    spans = without_twice(known, _weights(path, found, without_catalog, config))
    work = Work(path, nbytes, records, tuple(span for span in spans if span.byte_offset + span.nbytes <= nbytes))
    if not has_checksums(work):
        message = "saved without checksums (torch.serialization.set_crc32_options(False)): turned bits cannot be seen"
        report.notes.append(Finding(NO_CHECKSUM, message, path))
    return work


def _weights(path: str, found: Found, without_catalog: bool, config: ElasticConfig) -> list[Span]:
    """Weights that the model computes with; without a metadata also states, of those that were not cut or padded."""
    name = os.path.basename(path)
    is_layer = name in found.files.layers.values()
    is_model = name in found.files.model.values() or name in found.files.model_zero3.values()
    if os.path.dirname(path) != found.folder or not (is_layer or is_model):
        return []
    try:
        file = open_pickled(path, config.trust_pickle)
    except ElasticCkptError:
        return []  # which is a finding already
    if not isinstance(file.tree, dict):
        return []
    if is_layer:
        return weight_spans(file, {"": file.tree})
    sections = {"": file.tree.get("module")}
    if without_catalog:
        sections["optimizer"] = file.tree.get("optimizer")
    return weight_spans(file, sections)


def _swap_work(path: str, known: Sequence[Span], report: _Report) -> Work:
    message = "a swap file of NVMe offload: raw bytes, saved without a checksum; only their values are looked at"
    report.notes.append(Finding(NO_CHECKSUM, message, path))
    nbytes = os.path.getsize(path)
    return Work(path, nbytes, (), tuple(span for span in known if span.byte_offset + span.nbytes <= nbytes))


def _judge_bytes(work: Work, result: Checked) -> Iterator[Finding]:
    if result.failure is not None:
        yield Finding(IO, result.failure, work.path)
    for record, crc in wrong_records(work, result).items():
        message = (
            f"record {record.name} ({record.nbytes} bytes from byte {record.offset} on) has the CRC32 {crc:#010x}, "
            f"and was saved with {record.crc32:#010x}: its bytes have changed"
        )
        yield Finding(CHECKSUM, message, work.path)


def _limited(path: str, findings: Iterable[Finding]) -> list[Finding]:
    every = list(findings)
    more = len(every) - _MOST_PROBLEMS
    if more <= 0:
        return every
    return [*every[:_MOST_PROBLEMS], Finding(every[0].code, f"and {more} more problems in this file", path)]

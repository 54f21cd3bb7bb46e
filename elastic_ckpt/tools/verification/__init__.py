"""Verification that a checkpoint is complete, of one save and undamaged; lists all problems.

Its steps: folder, metadata, archives, records and their checksums, values, replicas.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.errors import DamagedError, MismatchError, listed
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.datastates import is_datastates
from elastic_ckpt.formats.naming import DCP_METADATA, DCP_SUFFIX, UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.safetensors import SUFFIX
from elastic_ckpt.formats.torch_archive.archive import is_legacy
from elastic_ckpt.planning.state_matching import state_errors
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.storage.local import file_names, open_stream
from elastic_ckpt.tools.files import WHOLE_FORMATS, size_of
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, kind_of, of_error, of_tensors
from elastic_ckpt.tools.verification.archive import Archive, Record, read_archive
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

#: Releases of DeepSpeed whose universal checkpoints (BLOOM's) have no file of the optimizer.
_WITHOUT_OPTIMIZER_FILE = re.compile(r"0\.\d\.")
_CRC_OFF = "torch.serialization.set_crc32_options(False)"
#: Problems listed of one file; the rest are counted.
_MOST_PROBLEMS = 40


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
    found, findings = choose(folder, tag, config.trust_pickle)
    files = [*checkpoint_files(found), *swap_files(found)]
    metadata, wrong = read_metadata(found, config)
    findings += wrong
    if others := other_files(found):
        findings.append(Finding(NOTE, "not-checked", f"files that are none of DeepSpeed's: {listed(others)}"))
    if metadata is not None:
        findings += check_metadata(metadata)
    if full:
        nbytes = _check_bytes(found, metadata, config, threads, show_progress, findings)
    else:
        nbytes = sum(map(size_of, files))
    unique = tuple(dict.fromkeys(findings))
    return Verification(
        folder=os.path.abspath(folder),
        tag=found.tag,
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
        if found.format in WHOLE_FORMATS:
            works.append(_work_by_metadata(path, metadata, spans, findings))
            continue
        weights = weight_spans(path, found, spans, metadata is None, config)
        works.append(_archive_work(path, [*spans, *weights], findings))
    for path in swap_files(found):
        text = "a swap file of NVMe offload: raw bytes, saved without a checksum; only their values are looked at"
        findings.append(Finding(NOTE, "no-checksum", text, file=path))
        works.append(_work(path, size_of(path), (), known.get(path, [])))
    checked = check(works, threads, show_progress)
    for work, result in zip(works, checked, strict=True):
        findings += _limited(work.path, _judge_bytes(work, result))
        findings += judge(work.path, result.odd)
    is_read = not any(result.failure for result in checked)
    if metadata is not None and is_read and (metadata.source.tp > 1 or metadata.replicas):
        from elastic_ckpt.tools.verification.copies import check_copies  # noqa: PLC0415  it takes torch to import

        try:
            findings += check_copies(metadata, config, threads)
        except (DamagedError, MismatchError) as error:
            findings.append(of_error(error, kind_of(error)))
    return sum(result.nbytes for result in checked)


def _archive_work(path: str, spans: Sequence[Span], findings: list[Finding]) -> Work:
    """The work for a checkpoint's file; problems of the archive itself are appended to ``findings``."""
    try:
        with open_stream(path, buffering=0) as stream:
            is_zip = not is_legacy(stream) and not is_datastates(stream)
            archive = read_archive(stream) if is_zip else Archive()
            nbytes = stream.seek(0, os.SEEK_END)
    except (OSError, DamagedError) as error:
        text = error.found if isinstance(error, DamagedError) else str(error)
        findings.append(Finding(ERROR, "read-error", str(text), file=path))
        return Work(path, 0)
    findings += _limited(path, (Finding(ERROR, kind, text, file=path) for kind, text in archive.problems))
    work = _work(path, nbytes, archive.records, spans)
    if not is_zip or not work.has_checksums:
        findings.append(_no_checksums(path, _CRC_OFF if is_zip else "a legacy archive, or one of DataStates-LLM"))
    return work


def _work_by_metadata(
    path: str, metadata: CheckpointMetadata | None, spans: Sequence[Span], findings: list[Finding]
) -> Work:
    """The work for a file whose records are those of its tensors: of safetensors none."""
    file = next((file for file in (metadata.files if metadata is not None else ()) if file.path == path), None)
    if file is None:
        if os.path.basename(path) == DCP_METADATA:
            findings.append(_no_checksums(path, "as torch writes it"))
        return Work(path, size_of(path))
    records = [Record(f"data at {offset}", offset, nbytes, crc32) for offset, nbytes, crc32 in file.records]
    work = _work(path, file.nbytes, records, spans)
    if not work.has_checksums or path.endswith(SUFFIX):
        findings.append(_no_checksums(path, "as the format has none" if path.endswith(SUFFIX) else _CRC_OFF))
    return work


def _no_checksums(path: str, how: str) -> Finding:
    return Finding(NOTE, "no-checksum", f"saved without checksums ({how}): turned bits cannot be seen", file=path)


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


def check_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Findings on coverage and states, from metadata alone."""
    yield from of_tensors(metadata)
    is_universal, folder = metadata.source.format == "universal", metadata.source.folder
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            file = os.path.join(folder, UNIVERSAL_FOLDER) if is_universal else folder
            text = f"no fp32 master of this parameter: no {name}/{MASTER}.pt"
            yield Finding(ERROR, "incomplete", text, name, file)
    if is_universal and not _WITHOUT_OPTIMIZER_FILE.match(metadata.source.ds_version):
        file = os.path.join(folder, UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER)
        if not os.path.lexists(file):
            text = "no such file, which has the param groups' hyperparameters: restore it, or convert again"
            yield Finding(ERROR, "missing", text, file=file)
    yield from _unlisted(metadata)
    yield from _state_findings(metadata)
    for error in state_errors(metadata):
        yield of_error(error, kind_of(error), ERROR if isinstance(error, DamagedError) else NOTE)
    for note in dict.fromkeys((*metadata.notes, *metadata.warnings)):
        yield Finding(NOTE, "reader", note)


def _unlisted(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Files of ``torch.distributed.checkpoint`` with nothing of this save, as one of more ranks leaves them."""
    source, listed_files = metadata.source, {file.path for file in metadata.files}
    for name in sorted(file_names(source.folder)) if source.format == "dcp" else ():
        path = os.path.join(source.folder, name)
        if name.endswith(DCP_SUFFIX) and path not in listed_files:
            text = ".metadata names no tensor in this file: it is of another save, and no load reads it"
            yield Finding(NOTE, "foreign", text, file=path)


def _state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Members of a param group have the same states; without ZeRO, those without gradients have none."""
    keys = metadata.keys_by_name
    whole = metadata.source.zero_stage == 0 and metadata.source.format == "native"
    stateless: list[str] = []
    for group in range(len(metadata.groups)):
        members = {name: saved for name, saved in metadata.parameters.items() if saved.group == group}
        states = {
            name: {*keys.get(name, ()), *dict(saved.scalars)}
            for name, saved in members.items()
            if (name, MASTER) in metadata.tensors  # the others are reported above
        }
        every = set().union(*states.values())
        if states and not every and keys:
            yield Finding(NOTE, "state-missing", f"param group {group} has no optimizer states: {listed(states)}")
        for name, present in states.items():
            if whole and every and not present:
                stateless.append(name)
            elif lost := every - present:
                text = f"no {', '.join(sorted(lost))} of this parameter, but of others in its param group"
                yield Finding(ERROR, "state-missing", text, name, metadata.source.folder)
    if stateless:
        text = f"no optimizer states, as of parameters that got no gradient: {listed(stateless)}"
        yield Finding(NOTE, "state-missing", text)

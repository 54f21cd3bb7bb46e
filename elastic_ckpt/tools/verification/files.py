"""Files that a checkpoint has and should have, and what is wrong with them where its metadata cannot be read."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.base import refuse_swapped
from elastic_ckpt.formats.naming import plain_name
from elastic_ckpt.formats.pickled import open_file, refuse_unmade
from elastic_ckpt.storage.local import file_names
from elastic_ckpt.tools.files import expected_files, file_sizes, kind_of_file
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, kind_of, of_error
from elastic_ckpt.tools.opened import open_checkpoint

#: Kinds of the files of formats of whole tensors.
_OF_WHOLE = {"dcp": {"chunks", "metadata"}, "safetensors": {"safetensors"}}
OWN, SWAPPED, OTHER = "own", "swapped", "other"


def files_by_kind(found: CheckpointInfo) -> dict[str, dict[str, int]]:
    """By :data:`OWN`, :data:`SWAPPED` (from NVMe) and :data:`OTHER` (none of DeepSpeed's): path -> size in bytes."""
    files: dict[str, dict[str, int]] = {OWN: {}, SWAPPED: {}, OTHER: {}}
    for name, nbytes in file_sizes(found).items():
        kind = kind_of_file(name)
        if found.foreign or kind in set().union(*_OF_WHOLE.values()):
            is_own = kind in _OF_WHOLE.get(found.format, ())
        else:
            is_in_universal = found.files.is_universal and name.endswith(".pt")
            is_own = kind != "other" and (is_in_universal or kind not in ("parameter", "optimizer"))
        files[SWAPPED if kind == "swapped" else OWN if is_own else OTHER][found.path(name)] = nbytes
    return files


def read_metadata(found: CheckpointInfo, config: ElasticConfig) -> tuple[CheckpointMetadata | None, list[Finding]]:
    """The metadata, as a load would read it; else what is wrong with each file."""
    try:
        return open_checkpoint(found, config, with_unmade=False).checkpoint.metadata, []
    except ElasticCkptError as raised:
        error = raised
    if found.foreign:
        return None, [of_error(error, kind_of(error)), Finding(NOTE, "not-checked", "anything else")]
    findings = [*_missing(found, config), *_unreadable(found, config)]
    if isinstance(error, UnsupportedError):
        return None, [*findings, of_error(error, "not-checked", NOTE)]
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        # without ZeRO, states that only a live model can name are no damage
        return None, [of_error(error, "not-checked", NOTE)]
    if error.file not in {finding.file for finding in findings}:
        findings.append(of_error(error, kind_of(error)))
    try:  # where values alone contradict each other
        return open_checkpoint(found, config.model_copy(update={"verify": "bytes"})).checkpoint.metadata, findings
    except ElasticCkptError:
        note = Finding(NOTE, "not-checked", "the tensors, since not all files can be read together")
        return None, [*findings, note]


def _missing(found: CheckpointInfo, config: ElasticConfig) -> Iterator[Finding]:
    present = set(map(plain_name, file_names(found.folder)))
    for name in expected_files(found, config.trust_pickle):
        if name not in present:
            text = "no such file; restore it, or take another tag"
            yield Finding(ERROR, "missing", text, file=found.path(name))


def _unreadable(found: CheckpointInfo, config: ElasticConfig) -> Iterator[Finding]:
    for path in files_by_kind(found)[OWN]:
        try:
            file = open_file(path, config.trust_pickle)
            refuse_unmade(file)
            refuse_swapped(file)
        except ElasticCkptError as error:
            yield of_unreadable(error)


def of_unreadable(error: ElasticCkptError) -> Finding:
    """The finding for a file that the reader refuses."""
    kind = "unreadable" if kind_of(error) == "damaged" else kind_of(error)
    return of_error(error, kind, NOTE if kind == "not-checked" else ERROR)

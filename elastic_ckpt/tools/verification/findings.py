"""The kinds of findings of a verification, and its outcome as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsafePickleError, UnsupportedError
from elastic_ckpt.tools.findings import Finding

#: A ``latest`` file that cannot be read, or names nothing.
LATEST = "latest"
#: A file that is not there; one that does not open; one that asks for code.
MISSING, UNREADABLE, UNSAFE = "missing", "unreadable", "unsafe-pickle"
#: A file of another save; files that do not fit together in another way.
FOREIGN, DAMAGED, MISMATCH = "foreign", "damaged", "mismatch"
#: Elements of a tensor that are in no file, or in two; states that a parameter lacks.
INCOMPLETE, NO_STATE = "incomplete", "state-missing"
#: Of a zip archive: its directory, the headers of its records, bytes of it that no reader looks at.
DIRECTORY, HEADER, PADDING = "zip-directory", "zip-header", "zip-padding"
#: Bytes that are not those that were written; bytes that the disk does not give.
CHECKSUM, IO = "checksum", "read-error"
#: Values that are no numbers; copies that should be equal.
NAN, INF, DRIFT = "nan", "inf", "drift"
#: Only among the notes: what was not checked, and why; what the reader notes.
NO_CHECKSUM, UNCHECKED, READER = "no-checksum", "not-checked", "reader"


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of a verification.

    Attributes:
        folder: absolute path that was asked for.
        tag: of the checkpoint that was verified; ``None``: it is not clear which.
        full: whether every byte was read, or metadata alone.
        findings: what is wrong.
        notes: what is not wrong, and what was not checked.
        files: number of files that were looked at.
        tensors: number of logical tensors (masters, states, buffers, frozen weights) that were checked.
        nbytes: bytes that were read and checked; without ``full``, the size of the files.
        seconds: how long it took.
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


def kind_of(error: ElasticCkptError) -> str:
    """The kind of finding that an error of the reader is."""
    if isinstance(error, UnsafePickleError):
        return UNSAFE
    if isinstance(error, UnsupportedError):
        return UNCHECKED
    return MISMATCH if isinstance(error, MismatchError) else DAMAGED

"""What a verification finds, as plain data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsafePickleError, UnsupportedError, listed

#: A ``latest`` file that cannot be read, or names nothing.
LATEST = "latest"
#: A file that is not there; one that does not open; one that asks for code.
MISSING, UNREADABLE, UNSAFE = "missing", "unreadable", "unsafe-pickle"
#: A file of another save; files that do not fit together in another way.
FOREIGN, DAMAGED, MISMATCH = "foreign", "damaged", "mismatch"
#: Elements of a tensor that lie in no file, or in two; states that a parameter lacks.
INCOMPLETE, NO_STATE = "incomplete", "state-missing"
#: Of a zip archive: its directory, the headers of its records, bytes of it that no reader looks at.
DIRECTORY, HEADER, PADDING = "zip-directory", "zip-header", "zip-padding"
#: Bytes that are not those that were written; bytes that the disk does not give.
CHECKSUM, IO = "checksum", "read-error"
#: Values that are no numbers; copies that should be equal.
NAN, INF, DRIFT = "nan", "inf", "drift"
#: Only among the notes: what was not checked, and why; what the reader had to say.
NO_CHECKSUM, UNCHECKED, READER = "no-checksum", "not-checked", "reader"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth a note.

    Attributes:
        code: its kind, one of this module's constants.
        message: one line that says what it is.
        file: path of the file concerned.
        parameter: name of the parameter, buffer or state concerned.
    """

    code: str
    message: str
    file: str | None = None
    parameter: str | None = None

    def line(self, folder: str) -> str:
        """All of it on one line, the file as seen from ``folder``; nothing in it can move a terminal's cursor."""
        parts = [self.code]
        if self.file is not None:
            inside = os.path.relpath(self.file, folder)
            parts.append(self.file if inside.startswith("..") else inside)
        if self.parameter is not None:
            parts.append(self.parameter)
        return one_line(": ".join([*parts, self.message]))


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of a verification.

    Attributes:
        folder: absolute path that was asked for.
        tag: of the checkpoint that was looked at; ``None``: it could not be told which.
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


def one_line(text: str) -> str:
    """Text without line breaks and control characters; what a file says may hold any."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in joined)


def of_error(error: ElasticCkptError, code: str | None = None) -> Finding:
    """An error of the reader as a finding: problem, expected, found and remedy on one line."""
    said = [error.problem]
    for word, value in (("expected", error.expected), ("found", error.found), ("remedy", error.remedy)):
        if value is not None:
            said.append(f"{word}: {value}")
    parameter = None if error.parameter == listed(()) else error.parameter
    return Finding(code or _code_of(error), one_line("; ".join(said)), error.file, parameter)


def _code_of(error: ElasticCkptError) -> str:
    if isinstance(error, UnsafePickleError):
        return UNSAFE
    if isinstance(error, UnsupportedError):
        return UNCHECKED
    return MISMATCH if isinstance(error, MismatchError) else DAMAGED


def without_repeats(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, in order."""
    return tuple(dict.fromkeys(findings))

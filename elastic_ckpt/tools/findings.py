"""What ``inspect`` and ``verify`` find in a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsafePickleError, UnsupportedError, listed

Level = Literal["error", "warning", "note"]
ERROR: Level = "error"
WARNING: Level = "warning"
NOTE: Level = "note"

# The kinds of a verification.
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
#: Values that are not finite; copies that should be equal.
NAN, INF, DRIFT = "nan", "inf", "drift"
#: Only among the notes: what was not checked, and why; what the reader notes.
NO_CHECKSUM, UNCHECKED, READER = "no-checksum", "not-checked", "reader"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint, or worth knowing about it.

    Attributes:
        level: ``"error"``: a load would be refused, or lose something; ``"warning"``: look at it; ``"note"``: know it.
        kind: one word for programs, the same in every version (``"missing_file"``).
        text: what it is.
        parameter: name of the parameter, buffer or state concerned.
        file: path of the file concerned.
        expected, found, remedy: as far as they are known.
    """

    level: Level
    kind: str
    text: str
    parameter: str | None = None
    file: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None

    @property
    def message(self) -> str:
        """Text, expected, found and remedy on one line, without control characters."""
        details = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        known = (f"{name}: {value}" for name, value in details.items() if value is not None)
        return one_line("; ".join([self.text, *known]))

    def line(self, folder: str) -> str:
        """All of it on one line, the file relative to ``folder``, without control characters."""
        parts = [self.kind]
        if self.file is not None:
            inside = os.path.relpath(self.file, folder)
            parts.append(self.file if inside.startswith("..") else inside)
        if self.parameter is not None:
            parts.append(self.parameter)
        return one_line(": ".join([*parts, self.message]))


def of_error(error: ElasticCkptError, kind: str, level: Level = ERROR) -> Finding:
    """An error as a finding."""
    known = {name: getattr(error, name) for name in ("file", "expected", "found", "remedy")}
    parameter = None if error.parameter == listed(()) else error.parameter
    return Finding(level, kind, error.problem, parameter, **known)


def kind_of(error: ElasticCkptError) -> str:
    """The kind of finding of a verification that an error of the reader is."""
    if isinstance(error, UnsafePickleError):
        return UNSAFE
    if isinstance(error, UnsupportedError):
        return UNCHECKED
    return MISMATCH if isinstance(error, MismatchError) else DAMAGED


def one_line(text: str) -> str:
    """Text without line breaks and control characters, which file contents may hold."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in joined)

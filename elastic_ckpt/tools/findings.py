"""What ``inspect`` and ``verify`` find in a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from elastic_ckpt.errors import ElasticCkptError, listed

Level = Literal["error", "warning", "note"]
ERROR: Level = "error"
WARNING: Level = "warning"
NOTE: Level = "note"


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
        return one_line(
            "; ".join([self.text, *(f"{name}: {value}" for name, value in details.items() if value is not None)])
        )

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


def one_line(text: str) -> str:
    """Text without line breaks and control characters, which file contents may hold."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in joined)

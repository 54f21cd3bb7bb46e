"""Text that others chose, as a terminal may show it: names, paths and values of a checkpoint.

What moves a cursor, clears or recolors a terminal, reverses the order of what follows, or begins another line is
escaped as Python escapes it. Everything else stays: accents, Chinese, emoji.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: Control characters of 7 and 8 bits; those of bidirectional text and deprecated ones beside them; separators of lines
#: and paragraphs; surrogates, which cannot be encoded.
_CONTROL = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
_ANY = re.compile(f"[{_CONTROL}]")
_ANY_BUT_NEWLINE = re.compile(f"(?!\n)[{_CONTROL}]")

#: Characters of one line that are shown: a name or value of a checkpoint may have millions.
_MOST_LENGTH = 1 << 14
#: Characters that may be added to what was cut, before it is cut again.
_MORE_LENGTH = 1 << 10


def shortened_text(text: str) -> str:
    """A text, or of a very long one its beginning and how many characters follow."""
    if len(text) <= _MOST_LENGTH + _MORE_LENGTH:
        return text
    return f"{text[:_MOST_LENGTH]}... and {len(text) - _MOST_LENGTH} characters"


class NamesText(str):
    """Text with lists of names, of which a screen shows the first few; ``whole`` has all of them, for a file."""

    whole: str

    def __new__(cls, shown: str, whole: str) -> NamesText:
        made = super().__new__(cls, shown)
        made.whole = whole
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.whole

    def __add__(self, other: str) -> NamesText:
        return NamesText(str(self) + str(other), self.whole + whole_text(other))

    def __radd__(self, other: str) -> NamesText:
        return NamesText(str(other) + str(self), whole_text(other) + self.whole)


def whole_text(text: str) -> str:
    """Text with the lists that it shows the first few names of."""
    return text.whole if isinstance(text, NamesText) else text


def printable(text: str) -> str:
    """Text on one line, with control characters escaped, and cut if it is very long."""
    return _ANY.sub(_escaped, shortened_text(text))


def printable_lines(text: str) -> str:
    """Text of several lines, each cut if it is very long, with other control characters than newlines escaped."""
    if len(text) > _MOST_LENGTH + _MORE_LENGTH:
        text = "\n".join(map(shortened_text, text.split("\n")))
    return _ANY_BUT_NEWLINE.sub(_escaped, text)


def counted(number: int, noun: str) -> str:
    """A number of things, in words: ``1 file``, ``2,000 files``, ``3 copies``."""
    plural = f"{noun[:-1]}ies" if noun.endswith(("ry", "py")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def one_line(text: str) -> str:
    """Text of several lines on one, with control characters escaped and other white space as single spaces."""
    return printable(" ".join(text.split()))


def config_text(value: Any) -> str:
    """A value as JSON for a config, with letters of any language as they are and control characters escaped."""
    return _ANY.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(value, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    return ascii(found.group())[1:-1]

"""Text that does something to a terminal, of every kind, and what tells that some of it is left."""

from __future__ import annotations

import unicodedata
from typing import Any

from hypothesis import strategies as st

#: Escape sequences of 7 and 8 bits, a backspace, writing from right to left, other lines, half a character, markup of
#: rich, its emoji, conversions of logging and fields of formats.
HOSTILE = "\x1b]0;x\x07\x9b2J\x08\x7f\x85\u202e\u2028\u2029\r\n\tx\ud800[red]b[/red][link=x]:bomb:%s%(x)d{0}\\"
#: The same as the name of a file, and as what a UTF-8 file has.
HOSTILE_NAME, HOSTILE_UTF8 = HOSTILE.replace("\ud800", "\udcff"), HOSTILE.replace("\ud800", "")
#: What stays as it is, whatever language a name is in.
READABLE = (
    "layers.0.weight",
    "ñandú.größe",
    "模型.层",
    "модель",
    "نموذج",
    "क्षि",
    "👩\u200d🔬",
    "a\u3000b\u00a0c",
    "=>[0]",
)
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
_MARKS = "\u061c\u200e\u200f"


def is_control(sign: str) -> bool:
    """Whether a character is one that a terminal must not get, as Unicode's own tables have it."""
    is_of_kind = unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
    return is_of_kind or unicodedata.bidirectional(sign) in _DIRECTIONS or sign in _MARKS


def controls_in(text: str, but: str = "") -> list[str]:
    """Characters of a text that a terminal must not get, with those around them."""
    return [text[max(at - 40, 0) : at + 40] for at, sign in enumerate(text) if is_control(sign) and sign not in but]


_CONTROLS = [chr(number) for number in range(0x110000) if is_control(chr(number)) and not 0xD800 < number < 0xDFFF]
_MARKUP = ["[red]", "[/]", "[link=file:///x]", "\\", ":bomb:", "%s", "%", "{", "}", "\x1b[2J", "\x1b]8;;x\x07", "\r\n"]
#: Strings with a character of these kinds at least, among markup and ordinary letters.
hostile_texts: st.SearchStrategy[str] = st.builds(
    "".join,
    st.tuples(
        st.text(max_size=3),
        st.sampled_from(_CONTROLS),
        st.sampled_from(_MARKUP),
        st.text(st.sampled_from([*_CONTROLS, *"aé模."]), max_size=3),
    ),
)


def with_strings(node: Any, text: str) -> Any:
    """A tree whose strings, keys and values alike, end with a text."""
    if isinstance(node, dict):
        return {key + text if isinstance(key, str) else key: with_strings(value, text) for key, value in node.items()}
    if isinstance(node, list):
        return [with_strings(each, text) for each in node]
    return node + text if isinstance(node, str) else node

"""JSON of a checkpoint: read within bounds of memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.safetensors import _COST_OF_ASCII, _COST_OF_OTHERS, _COSTS, parse_json

#: What takes most memory for its length, of each kind.
DENSE = {
    "objects": b"[" + b",".join([b"{}"] * 9000) + b"]",
    "lists": b"[" + b",".join([b"[]"] * 9000) + b"]",
    "lists of one": b"[" + b",".join([b"[1]"] * 9000) + b"]",
    "objects of one": b"[" + b",".join([b'{"a":1}'] * 9000) + b"]",
    "names": b"{" + b",".join(b'"%x":1.5' % number for number in range(9000)) + b"}",
    "numbers": b"[" + b",".join([b"1000"] * 9000) + b"]",
    "strings": b"[" + b",".join([b'"ab"'] * 9000) + b"]",
    "a long string": b'["' + b"a" * 90_000 + b'"]',
    "a wide string": b'["\xf0\x9f\x98\x80' + b"a" * 90_000 + b'"]',
    "an escaped string": b'["\\ud83d\\ude00' + b"a" * 90_000 + b'"]',
}


@pytest.mark.parametrize("what", DENSE)
def test_no_text_takes_more_memory_than_is_reckoned_with(what: str) -> None:
    text = DENSE[what]
    needed = len(text) * (_COST_OF_ASCII if text.isascii() else _COST_OF_OTHERS)
    needed += sum(cost * text.count(sign) for sign, cost in _COSTS.items())
    tracemalloc.start()
    value = parse_json(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= needed + 4096 and value == json.loads(text)


def test_a_text_that_would_take_too_much_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="too much JSON"):
        parse_json(b"[" + b"{}," * 4_000_000 + b"1]")


HUGE = str(10**400).encode()


@pytest.mark.parametrize(
    "text",
    [b'{"a": 1, "a": 2}', b"[" * 100_000, b"{", b"\xff", b"", HUGE, b"-" + HUGE, b"18446744073709551616", b"9" * 5000],
)
def test_what_is_no_json_of_these_files_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig"])
def test_utf_8_is_the_only_encoding(encoding: str) -> None:
    assert parse_json('{"ä": 1}'.encode()) == {"ä": 1}
    with pytest.raises(ValueError):
        parse_json('{"ä": 1}'.encode(encoding))


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63), 1.5, 1e300])
def test_numbers_are_what_they_are(number: float) -> None:
    assert parse_json(str(number).encode()) == number

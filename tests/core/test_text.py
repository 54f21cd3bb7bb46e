"""Which characters are escaped, and which stay."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.text import config_text, counted, one_line, printable, printable_lines
from tests.hostile_text import HOSTILE, READABLE, controls_in, hostile_texts, is_control


def test_every_control_character_is_escaped_and_no_other() -> None:
    """But for those of bidirectional text that Unicode has given up, which it gives no direction."""
    for number in range(0x110000):
        sign = chr(number)
        is_given_up = 0x206A <= number <= 0x206F
        assert (printable(sign) != sign) == (is_control(sign) or is_given_up), hex(number)
        assert (printable_lines(sign) != sign) == ((is_control(sign) or is_given_up) and sign != "\n"), hex(number)


@given(st.one_of(hostile_texts, st.text()))
def test_what_is_printable_has_none_and_can_be_read_back(text: str) -> None:
    shown = printable(text)
    assert controls_in(shown) == controls_in(printable_lines(text), but="\n") == controls_in(one_line(text)) == []
    assert printable(shown) == shown
    without = text.replace("\\", "/").replace('"', "'")
    assert ast.literal_eval(f'"{printable(without)}"') == without
    assert printable_lines(text).split("\n") == [printable(line) for line in text.split("\n")]


@pytest.mark.parametrize("text", READABLE)
def test_names_in_any_language_stay_readable(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_escapes_are_pythons() -> None:
    assert printable("a\ud800\x1b[2J\tb\nc\u00e9") == "a\\ud800\\x1b[2J\\tb\\nc\u00e9"
    assert printable_lines("a\x9b\r\nc") == "a\\x9b\\r\nc"
    assert one_line(" a\n\tb \x1b ") == "a b \\x1b"
    assert controls_in(HOSTILE) and not controls_in(printable(HOSTILE))


@given(st.one_of(hostile_texts, st.text(), st.sampled_from(READABLE)))
def test_config_lines_are_json_that_can_be_read_and_pasted(text: str) -> None:
    line = config_text({"pattern": [text]})
    assert json.loads(line) == json.loads(json.dumps({"pattern": [text]}))  # which joins surrogates, too
    assert controls_in(line) == [] and printable(line) == line
    if printable(text) == text and not {*'"\\'} & {*text}:
        assert text in line


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "file", "1 file"),
        (0, "file", "0 files"),
        (2000, "param group", "2,000 param groups"),
        (1, "copy", "1 copy"),
        (3, "copy", "3 copies"),
        (2, "entry", "2 entries"),
        (2, "key", "2 keys"),
    ],
)
def test_a_number_of_things_agrees_with_its_noun(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words


def test_text_without_end_is_cut_with_a_count_and_only_once() -> None:
    """A name of a checkpoint may have millions of characters."""
    text = "name" * 1_000_000
    shown = printable(text)
    assert len(shown) < 20_000 and shown.endswith("... and 3983616 characters")
    assert printable_lines(f"{shown} is one of:\n{text}\nb") == f"{shown} is one of:\n{shown}\nb"
    assert printable("a" * 16_000) == "a" * 16_000

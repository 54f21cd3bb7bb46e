"""What ``--json`` prints: JSON types, and no text without end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from elastic_ckpt.cli.output import Answer, plain, refusal, tell
from elastic_ckpt.core.text import printable
from elastic_ckpt.errors import DamagedError

LONG = "x" * 3_000_000
#: What remains of it, with what was cut.
MOST = 20_000


@dataclass(frozen=True)
class Finding:
    name: str
    lines: tuple[str, ...]


@pytest.mark.parametrize(
    "document",
    [LONG, [LONG], {LONG: 1}, {"a": {LONG}}, Finding(LONG, ()), Finding("", (LONG,)), {"tag": {"of": [{LONG: None}]}}],
    ids=["text", "list", "key", "set", "field", "in a field", "nested"],
)
def test_a_long_text_is_cut_wherever_it_is(document: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tell(Answer(document, ()), as_json=True)
    printed = capsys.readouterr().out
    assert len(printed) < MOST and printable(LONG) in json.dumps(json.loads(printed))


def test_an_error_is_cut_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = DamagedError(f"a problem of {LONG}", LONG, LONG, LONG, parameter=LONG)
    tell(refusal(error, exit_code=0), as_json=True)
    assert len(capsys.readouterr().out) < 8 * MOST


def test_names_that_differ_behind_the_cut_stay_two() -> None:
    names = [LONG, LONG + "a", LONG[:-1] + "b", LONG[:-1] + "c"]
    found = plain({name: number for number, name in enumerate(names)})
    assert sorted(found.values()) == [0, 1, 2, 3]


def test_other_values_stay_as_they_are() -> None:
    document = {"text": "ä\n" * 1000, 1: (1, 2.5, None, True), "set": {"b", "a"}}
    assert plain(document) == {"text": "ä\n" * 1000, "1": [1, 2.5, None, True], "set": ["a", "b"]}
    assert plain([float("inf"), float("nan"), b"x"]) == ["inf", "nan", "b'x'"]

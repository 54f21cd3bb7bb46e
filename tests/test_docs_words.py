"""README, CONTRIBUTING and docs/ use the words of their readers, and none of those in ``docs_words.txt``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.blocks import REPO

LIST = Path(__file__).with_name("docs_words.txt")
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
#: What is not prose: blocks that are shown or printed, comments, code, and where a link leads.
_NOT_PROSE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|`[^`\n]+`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL)


class Word(NamedTuple):
    """A pattern of words that are not used, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


def words() -> Iterator[Word]:
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pattern, instead = line.split("\t")
            yield Word(re.compile(pattern, re.IGNORECASE), instead)


def prose(text: str) -> str:
    """A page without what is not prose; its lines keep their numbers."""
    return _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)


def found_in(text: str) -> list[str]:
    """Each line in which one of the words is, with what to write instead."""
    lines = enumerate(prose(text).splitlines(), 1)
    return [
        f"{number}: {match[0]!r}, rather {word.instead}"
        for number, line in lines
        for word in words()
        if (match := word.pattern.search(line))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_none_of_the_words(page: Path) -> None:
    assert found_in(page.read_text(encoding="utf-8")) == []


def test_code_and_what_is_printed_are_no_prose() -> None:
    text = "Bit by bit.\n```\nanew\n```\n`refused by name` <!-- anew --> [here](anew.md)\nThe list goes on with that.\n"
    assert found_in(text) == ["1: 'Bit by bit', rather bit for bit", "6: 'goes on with', rather continues"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_from_an_index(page: Path) -> None:
    """There is none that has the package: a checkout, or a wheel."""
    assert re.findall(r"pip install \S*elastic_ckpt(?!-)\S*", page.read_text(encoding="utf-8")) == []

"""Pages, messages and help use the words of their readers, and none of those in ``docs_words.txt``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.blocks import REPO

LIST = Path(__file__).with_name("docs_words.txt")
PACKAGE = REPO / "elastic_ckpt"
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
MODULES = sorted(PACKAGE.rglob("*.py"))
#: What is not prose: blocks that are shown or printed, comments, code, and where a link leads.
_NOT_PROSE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|`[^`\n]+`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL)
_FROM_AN_INDEX = r"pip install \S*elastic_ckpt(?!-)\S*"


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
    assert found_in(text) == ["1: 'Bit by bit', rather bit for bit", "6: 'goes on', rather continues"]


def messages(source: str, is_command: bool = False) -> Iterator[tuple[int, str]]:
    """The texts of a module that a user may read, by line; of commands, their help too, which is in docstrings."""
    tree = ast.parse(source)
    texts = {id(part): "" for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        is_help = is_command and isinstance(node, ast.FunctionDef) and node.decorator_list
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and not is_help:
            texts |= {id(node.body[0].value): ""}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.lineno, node.value


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_messages_and_help_have_none_of_the_words(module: Path) -> None:
    is_command = module.parent.name == "cli"
    source = module.read_text(encoding="utf-8")
    found = [(line, word) for line, text in messages(source, is_command) for word in found_in(text.replace("`", ""))]
    assert found == []


def test_messages_are_found_where_they_are_put_together() -> None:
    source = '@command\ndef say(n):\n    """Anew."""\n    return f"{n} begins " f"anew, and goes" + " on", "anew"\n'
    said = [(4, "{} begins anew, and goes"), (4, "anew"), (4, " on")]
    assert sorted(messages(source)) == sorted(said)
    assert sorted(messages(source, is_command=True)) == sorted([(3, "Anew."), *said])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_from_an_index(page: Path) -> None:
    """There is none that has the package: a checkout, or a wheel."""
    assert re.findall(_FROM_AN_INDEX, page.read_text(encoding="utf-8")) == []


def test_no_message_installs_from_an_index() -> None:
    texts = [text for module in MODULES for _, text in messages(module.read_text(encoding="utf-8"))]
    assert [text for text in texts if re.search(_FROM_AN_INDEX, text) or re.match(r"elastic_ckpt\[", text)] == []

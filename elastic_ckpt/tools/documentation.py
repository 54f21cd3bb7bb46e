"""The pages of the documentation, which are installed with the package, and their sections."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path

#: Topics that an error names in place of an unknown one.
_MOST_NEAREST = 5
#: Names that differ more are not near.
_SIMILAR = 0.5
#: A page as a link, an error or a person writes it.
_PAGE = re.compile(r"(?:docs/)?([\w-]*)(?:\.md|\.html)?")
_HEADING = re.compile(r"(#{1,6}) +(.+?)(?: +#+)? *")
_FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_TAG = re.compile(r"^</?\w[^>]*>\n", re.MULTILINE)
#: A note as GitHub and the site show it.
_NOTE = re.compile(r"^> \[!(\w+)\]\n> ", re.MULTILINE)
_PICTURE = re.compile(r"!\[([^]]*)\]\([^)]*\)")
_LINK = re.compile(r"\]\(([\w-]+\.md)?(#[\w-]+)?\)")
#: What the site replaces by the docstring of an object.
_DOCSTRING = re.compile(r"^::: ([\w.]+)\n(?:[ ]+.*\n|\n(?=[ ]))*", re.MULTILINE)
_FENCE = "```"


@dataclass(frozen=True)
class Heading:
    """A heading of a page: where it is, and the anchor that links have for it."""

    line: int
    level: int
    title: str
    anchor: str


class UnknownTopicError(LookupError):
    """There is no such page or section; ``nearest`` has the topics that look like it."""

    def __init__(self, topic: str, nearest: list[str]) -> None:
        super().__init__(topic)
        self.nearest = nearest


def page_titles() -> dict[str, str]:
    """Each page's name, and its title."""
    return {name: next((each.title for each in headings(_source(name))), name) for name in _names()}


def topic_text(topic: str) -> str:
    """A page, or one section of it with its subsections, as Markdown for a terminal.

    A topic is ``page`` or ``page#anchor``. Raises :class:`UnknownTopicError`.
    """
    page, anchor = _parsed(topic)
    if page not in _names():
        raise UnknownTopicError(topic, nearest_topics(topic))
    text = _source(page)
    if anchor:
        found = headings(text)
        at = next((number for number, each in enumerate(found) if each.anchor == anchor), None)
        if at is None:
            raise UnknownTopicError(topic, nearest_topics(topic))
        first = found[at]
        end = next((each.line for each in found[at + 1 :] if each.level <= first.level), None)
        text = "\n".join(text.split("\n")[first.line : end])
    return _for_terminal(text, page)


def nearest_topics(topic: str) -> list[str]:
    """The topics whose names contain an unknown one, or look like it, best first."""
    page, anchor = _parsed(topic)
    wanted = anchor or page
    names: dict[str, str] = {}
    for name in [page] if page in _names() else _names():
        names |= {} if page in _names() else {name: name}
        for each in headings(_source(name)):
            names.setdefault(each.anchor, f"{name}#{each.anchor}")
    containing = sorted((name for name in names if wanted in name), key=len) if wanted else []
    near = get_close_matches(wanted, names, _MOST_NEAREST, _SIMILAR)
    return [names[name] for name in dict.fromkeys((*containing, *near))][:_MOST_NEAREST]


def headings(text: str) -> list[Heading]:
    """The headings of a page, with the anchors that its site gives them."""
    found: list[Heading] = []
    taken: set[str] = set()
    for line, heading in _heading_lines(text):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[2]).replace("`", "")
        anchor = _unused(_slug(title), taken)
        taken.add(anchor)
        found.append(Heading(line, len(heading[1]), title, anchor))
    return found


def _heading_lines(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Lines that are headings, by number; a comment in a block of code looks like one."""
    is_code = False
    for number, line in enumerate(text.split("\n")):
        if line.lstrip().startswith(_FENCE):
            is_code = not is_code
        elif not is_code and (heading := _HEADING.fullmatch(line)):
            yield number, heading


def _slug(title: str) -> str:
    """As Python-Markdown makes it of a title."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _unused(slug: str, taken: set[str]) -> str:
    """As Python-Markdown numbers headings of one title."""
    unused = slug
    number = 0
    while unused in taken:
        number += 1
        unused = f"{slug}_{number}"
    return unused


def _parsed(topic: str) -> tuple[str, str]:
    """The page and the anchor of a topic."""
    page, _, anchor = topic.strip().lower().partition("#")
    known = _PAGE.fullmatch(page)
    return known[1] if known else page, anchor


def _for_terminal(text: str, page: str) -> str:
    """Markdown in which links are topics, and nothing is left of what only the site shows."""

    def as_topic(link: re.Match[str]) -> str:
        name = link[1].removesuffix(".md") if link[1] else page
        return f"]({name}{link[2] or ''})"

    text = _TAG.sub("", _COMMENT.sub("", text))
    text = _NOTE.sub(lambda note: f"> **{note[1].capitalize()}:** ", text)
    text = _PICTURE.sub(r"(picture: \1)", text)
    text = _DOCSTRING.sub(r"- `python -m pydoc \1`\n", text)
    return _LINK.sub(as_topic, text).strip() + "\n"


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _folder().glob("*.md")))  # asks the system: a folder of this package


@cache
def _source(name: str) -> str:
    # asks the system: a page of this package
    text = (_folder() / f"{name}.md").read_text(encoding="utf-8")
    return _FRONT_MATTER.sub("", text)


def _folder() -> Path:
    installed = Path(str(resources.files("elastic_ckpt"))) / "docs"
    # asks the system: a folder of this package
    return installed if installed.is_dir() else Path(__file__).parents[2] / "docs"

"""Pages of the documentation, and their sections by the anchors that links have."""

from __future__ import annotations

import re

import pytest

from elastic_ckpt.tools.documentation import UnknownTopicError, headings, nearest_topics, page_titles, topic_text
from tests.blocks import REPO

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((REPO / "docs").glob("*.md"))}


def test_every_page_has_a_title() -> None:
    titles = page_titles()
    assert list(titles) == sorted(PAGES)
    assert titles["troubleshooting"] == "Troubleshooting" and titles["dcp"] == "torch.distributed.checkpoint"
    for name, title in titles.items():
        assert title != name and topic_text(name).startswith("# "), name


def test_every_link_between_pages_is_a_topic() -> None:
    """So that anchors are those of the site, which checks the same links."""
    count = 0
    for name, text in PAGES.items():
        for page, anchor in re.findall(r"(?<!`)\]\(([\w-]+(?=\.md))?(?:\.md)?(#[\w-]+)\)", text):
            topic = f"{page or name}{anchor}"
            assert topic_text(topic).startswith("#"), topic
            count += 1
    assert count > 100


@pytest.mark.parametrize(
    "topic",
    ["troubleshooting#damagederror", "docs/troubleshooting.md#damagederror", "Troubleshooting.html#DamagedError"],
)
def test_a_section_has_its_subsections_and_ends_where_the_next_begins(topic: str) -> None:
    text = topic_text(topic)
    assert text.startswith("### DamagedError\n")
    assert "\n#### `a file of the checkpoint is missing`\n" in text
    assert "LayoutError\n" not in text


def test_the_last_section_of_a_page_ends_with_it() -> None:
    last = headings(PAGES["troubleshooting"])[-1]
    assert topic_text(f"troubleshooting#{last.anchor}").startswith(f"{'#' * last.level} ")


def test_headings_are_numbered_where_titles_are_the_same_and_are_not_in_code() -> None:
    found = headings("# A `b`\n\n```bash\n# no heading\n```\n\n## [A B](x.md)\n## Ünïcode & co. --x #\n")
    assert [(each.line, each.level, each.title, each.anchor) for each in found] == [
        (0, 1, "A b", "a-b"),
        (6, 2, "A B", "a-b_1"),
        (7, 2, "Ünïcode & co. --x", "unicode-co-x"),
    ]


def test_nothing_is_left_of_what_only_the_site_shows() -> None:
    for name in PAGES:
        text = re.sub(r"^```.*?^```$", "", topic_text(name), flags=re.MULTILINE | re.DOTALL)
        for mark in ("<!--", "\n:::", "<div", "![", "hide: ["):
            assert mark not in text, (name, mark)
    assert "`python -m pydoc elastic_ckpt.install`" in topic_text("api")
    assert "(commands#" in topic_text("index") or "(commands)" in topic_text("index")
    assert "(commands#shared-options)" in topic_text("commands"), "a link within the page"


@pytest.mark.parametrize(
    ("topic", "nearest"),
    [
        ("trubleshooting", "troubleshooting"),
        ("damagederror", "troubleshooting#damagederror"),
        ("troubleshooting#damagederor", "troubleshooting#damagederror"),
        ("shoot", "troubleshooting"),
    ],
)
def test_an_unknown_topic_names_the_nearest_ones(topic: str, nearest: str) -> None:
    with pytest.raises(UnknownTopicError) as caught:
        topic_text(topic)
    assert nearest in caught.value.nearest and len(caught.value.nearest) <= 5


@pytest.mark.parametrize("topic", ["", "#", "xyzzyqq", "../setup", "\x1b[31m"])
def test_what_is_like_no_topic_has_no_nearest_one(topic: str) -> None:
    assert nearest_topics(topic) == []
    with pytest.raises(UnknownTopicError):
        topic_text(topic)

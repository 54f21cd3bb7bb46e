"""The documentation site has every page, and its pages are written for it and for the repository alike."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.blocks import REPO

pytest.importorskip("mkdocs")
#: Blocks of code, by their language; those without one are what commands print.
PRINTED = [("text", "a line"), ("text", "│ a table │"), ("bash", "a command")]
NAV = yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", REPO / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(each)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages(NAV))
    assert len(listed) == len(set(listed))
    written = {path.name for path in (REPO / "docs").glob("*.md")} | set(hooks().PAGES)
    assert set(listed) == written - {"CODE_OF_CONDUCT.md"}


def test_there_are_few_pages() -> None:
    """A new answer goes into the page where a reader looks for it; what is said twice is found wrong once."""
    assert len(list((REPO / "docs").glob("*.md"))) <= 30


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("launchers.md", "[x](../launch/torchrun.sh)", "[x](repository/launch/torchrun.sh)"),
        ("benchmarks.md", "[x](../benchmarks/README.md)", "[x](measuring.md)"),
        ("CHANGELOG.md", "[x](docs/compatibility.md)", "[x](compatibility.md)"),
        ("CODE_OF_CONDUCT.md", "[x](SECURITY.md)", "[x](SECURITY.md)"),
        ("megatron.md", "[x](tensor-parallel.md#rules)", "[x](tensor-parallel.md#rules)"),
        ("index.md", "![x](images/scatter.svg)", "![x](images/scatter.svg)"),
        ("index.md", "[x](https://deepspeed.ai)", "[x](https://deepspeed.ai)"),
    ],
)
def test_links_lead_to_the_same_place_on_the_site(page: str, link: str, on_the_site: str) -> None:
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hooks().on_page_markdown(link, shown, None, None) == on_the_site


def test_what_is_shown_is_what_the_repository_shows() -> None:
    html = (
        "<td><code>--dtype fp32\\|bf16</code></td><p>Undo :func:<code>install</code>.</p><code>" + "x" * 40 + "</code>"
    )
    shown = hooks().on_page_content(html)
    assert "fp32|bf16" in shown and ":func:" not in shown and shown.count('class="short"') == 2


def test_notes_and_tabs_are_those_of_the_theme() -> None:
    """GitHub and a terminal show the same text: a quotation, and blocks below each other."""
    text = "> [!WARNING]\n> Restart\n> the process.\n\n<!-- tabs -->\n**torchrun**\n\n```bash\na\n```\n\n**deepspeed**\n\nb\n\n"
    text += "<!-- end of tabs -->\nAfter."
    shown = hooks().on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri="launchers.md")), None, None)
    assert shown.startswith(
        '!!! warning\n\n    Restart\n    the process.\n\n=== "torchrun"\n\n    ```bash\n    a\n    ```\n'
    )
    assert shown.endswith('=== "deepspeed"\n\n    b\n\nAfter.')


def test_printed_text_breaks_between_words_and_its_tables_do_not() -> None:
    blocks = [f'<div class="language-{kind} highlight"><pre>{text}</pre></div>' for kind, text in PRINTED]
    shown = hooks().on_page_content("\n".join(blocks))
    assert [("printed" in line) for line in shown.splitlines()] == [True, False, False]


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Pictures, fonts and scripts of the site are its own; the badges of the README are no part of it."""
    for path in (REPO / "docs").glob("*.md"):
        assert not re.search(r"!\[[^]]*\]\(https?:", path.read_text(encoding="utf-8")), path.name
    for path in (REPO / "docs" / "images").glob("*.svg"):
        urls = re.findall(r"https?://[^\"' )]+", path.read_text(encoding="utf-8"))
        assert {url for url in urls if "w3.org" not in url} <= {"https://www.textualize.io"}, path.name

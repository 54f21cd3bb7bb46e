"""Hooks of MkDocs: files of the repository that pages link to become files of the site, so that links work on both."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from textwrap import indent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO = Path(__file__).parents[1]
#: Pages outside docs/, by their name on the site.
PAGES = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "measuring.md": "benchmarks/README.md",
}
#: Notes as GitHub writes them, and blocks of which a reader needs one, which GitHub shows below each other.
_NOTE = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n)+)", re.MULTILINE)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^\*\*(.+)\*\*\n", re.MULTILINE)
#: A block of code without a language: what a command prints.
_PRINTED = re.compile(r'<div class="(?:language-text )?highlight">(<pre>.*?</pre>)</div>', re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[\w-]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out what the navigation has room for, and nobody has written yet."""
    for section in config.nav or []:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [page for page in pages if _exists(*page.values())]
    return config


def _exists(name: str) -> bool:
    return name in PAGES or (REPO / "docs" / name).is_file()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie outside docs/."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(REPO / source).read_text(encoding="utf-8")))
    texts = {name: (REPO / "docs" / name).read_text(encoding="utf-8") for name in files.src_uris if _is_page(name)}
    linked = {_target(name, link) for name, text in texts.items() for link, _ in _LINK.findall(text)}
    for path in sorted(path for path in linked if path not in PAGES.values() and not path.startswith("docs/")):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(REPO / path)))
    return files


def _is_page(name: str) -> bool:
    return name.endswith(".md") and name not in PAGES


def _target(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(PAGES.get(page, f"docs/{page}")), link))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository, as links to files of the site; notes and tabs as Material has them."""
    pages = {source: name for name, source in PAGES.items()}

    def on_the_site(match: re.Match[str]) -> str:
        path = _target(page.file.src_uri, match[1])
        name = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}")
        return f"]({name}{match[2] or ''})"

    return _TABS.sub(_tabs, _NOTE.sub(_note, _LINK.sub(on_the_site, markdown)))


def _note(match: re.Match[str]) -> str:
    lines = [line.removeprefix(">").removeprefix(" ") for line in match[2].splitlines()]
    return f"!!! {match[1].lower()}\n\n{indent(chr(10).join(lines), '    ')}\n"


def _tabs(match: re.Match[str]) -> str:
    """Each line in bold between the marks is the title of a tab."""
    _, *parts = _TAB.split(match[1])
    named = zip(parts[::2], parts[1::2], strict=True)
    return "".join(f'=== "{title}"\n\n{indent(text.strip(chr(10)), "    ")}\n\n' for title, text in named)


def on_page_content(html: str, **_: object) -> str:
    """Docstrings without the roles of reStructuredText; bars in tables as GitHub has them; short code unbroken."""
    html = re.sub(r":(?:func|class|meth|mod|attr|data|exc):(?=<code>)", "", html).replace("\\|", "|")
    html = _PRINTED.sub(_printed, html)
    return re.sub(r"<code>(?=[^<\n]{1,28}</code>)", '<code class="short">', html)


def _printed(match: re.Match[str]) -> str:
    """What a command prints, marked if it is text and no table."""
    return match[0] if re.search("[│┃]", match[1]) else f'<div class="printed highlight">{match[1]}</div>'

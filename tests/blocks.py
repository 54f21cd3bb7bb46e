"""Code blocks of README and documentation. ``<!-- not run: REASON -->`` above one says why no test executes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = [path for folder in (".", "docs", "benchmarks") for path in sorted((REPO / folder).glob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its line there, its language and text, and why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block, with lines that end in a backslash joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(*languages: str) -> list[Block]:
    """Blocks in some languages, of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text[: match.start(2)].count("\n") + 1
            found.append(Block(page, line, match[2], match[3], match[1]))
    return [block for block in found if block.language in languages]

"""``elastic-ckpt docs``: the documentation of the installed version, in the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown, TableElement
from rich.measure import Measurement
from rich.table import Table

from elastic_ckpt.cli import app
from elastic_ckpt.cli.output import WIDTH, Answer, AsJson, tell
from elastic_ckpt.core.text import printable
from elastic_ckpt.report import literal, table
from elastic_ckpt.tools.documentation import UnknownTopicError, page_titles, topic_text

_CODE = re.compile(r"^```\w*\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


@app.command(
    "docs",
    epilog="Example: [bold]elastic-ckpt docs faq[/], or elastic-ckpt docs troubleshooting#damagederror",
)
def docs(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="A page, or a section: PAGE#ANCHOR. Without it: the list of pages."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a page of the documentation, or a section of it, in the terminal.

    Errors name the section to open. Links to other topics are in parentheses.
    """
    if topic is None:
        titles = page_titles()
        rows = [(literal(name), literal(title)) for name, title in titles.items()]
        shown = table("elastic-ckpt docs TOPIC", "topic", "title", rows=rows, box=None)
        tell(Answer({"pages": titles}, [shown]), as_json)
        return
    try:
        text = topic_text(topic)
    except UnknownTopicError as error:
        nearest = f"The nearest: {', '.join(error.nearest)}" if error.nearest else "All pages: elastic-ckpt docs"
        problem = f"there is no topic {printable(topic)!r}. {nearest}."
        raise typer.BadParameter(problem, param_hint="TOPIC") from None
    tell(Answer({"topic": topic, "text": text}, parts_of(text)), as_json)


def parts_of(markdown: str) -> Iterator[RenderableType]:
    """A page in parts; lines of code are never broken, so that they can be copied."""
    for number, part in enumerate(_CODE.split(markdown)):
        if number % 2:
            yield textwrap.indent(part, "    ")
        elif part.strip():
            yield Prose(part)
            yield ""


class Prose:
    """Markdown without blocks of code, 80 columns wide where the output is no terminal."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The width that is wanted, whatever there is."""
        return Measurement(1, WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The text as rich lays it out."""
        yield _Page(self.text, hyperlinks=False)


class _FoldedTable(TableElement):
    """A table whose long words continue on the next line; rich cuts them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for made in super().__rich_console__(console, options):
            if isinstance(made, Table):
                for column in made.columns:
                    column.overflow = "fold"
            yield made


class _Page(Markdown):
    """Markdown whose tables keep all of their text."""

    elements = Markdown.elements | {"table_open": _FoldedTable}

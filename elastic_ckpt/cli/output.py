"""Output and exit codes of the commands."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from elastic_ckpt.errors import ConfigError, ElasticCkptError

#: A finding; wrong usage; the checkpoint cannot be read.
EXIT_FOUND, EXIT_USAGE, EXIT_UNREADABLE = 1, 2, 3


class SafeConsole(Console):
    """Prints text of a checkpoint (tags, names, values) with control characters escaped, whoever prints it."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that rich lays out: all strings pass through here, those in tables and trees too."""
        return super().render_str(printable(text), **options)


console = SafeConsole()
error_console = SafeConsole(stderr=True)
#: Columns of a report if the output is no terminal.
_WIDTH = 100


def print_json(what: Any) -> None:
    """Print a record as JSON to standard output."""
    print(json.dumps(plain(what), indent=2, allow_nan=False))


def plain(item: Any) -> Any:
    """A value as JSON types; other objects, infinities and NaN become text."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, Set):
        return sorted(map(str, item))
    if isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
        return [plain(value) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item if item is None or isinstance(item, (bool, int, float, str)) else str(item)[:1000]


def printable(text: str) -> str:
    """Text from a checkpoint, with control characters and invalid ones escaped for a terminal."""
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)


def table(title: str, *columns: str, **options: Any) -> Table:
    """A titled table; headings that begin with ``>`` are of numeric columns. Without headings, it lists facts."""
    made = Table(title=title, title_justify="left", caption_justify="left", show_header=bool(columns), **options)
    for heading in columns:
        is_number = heading.startswith(">")
        made.add_column(heading.removeprefix(">"), justify="right" if is_number else "left", overflow="fold")
    if not columns:
        made.add_column(style="bold", no_wrap=True)
        made.add_column(overflow="fold")
    return made


def print_line(text: str, to: Console = console) -> None:
    """Print text of a checkpoint as it is, on one line whatever the width of the terminal."""
    to.print(escape(text), soft_wrap=True, highlight=False)


def print_wide(parts: Iterable[RenderableType]) -> None:
    """Print a report, as wide as its tables need if the output is no terminal."""
    wide = console if console.is_terminal else SafeConsole(width=max(console.width, _WIDTH))
    for part in parts:
        wide.print(part)


def end_with(found: bool) -> None:
    """Exit with code 1 if something was found."""
    if found:
        raise typer.Exit(EXIT_FOUND)


@contextmanager
def errors_end_the_command(as_json: bool, exit_code: int = EXIT_UNREADABLE) -> Iterator[None]:
    """Print an :class:`ElasticCkptError` instead of a traceback, and exit; with 2 if a config is wrong."""
    try:
        yield
    except ElasticCkptError as error:
        if as_json:
            details = ("problem", "parameter", "file", "expected", "found", "remedy")
            known = {name: value for name in details if (value := getattr(error, name)) is not None}
            print_json({"error": type(error).__name__, **known})
        else:
            _print_error(error)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else exit_code) from error


@contextmanager
def os_errors_end_the_command(remedy: str, exit_code: int = EXIT_USAGE) -> Iterator[None]:
    """Print an :class:`OSError` with what can be done, instead of a traceback."""
    try:
        yield
    except OSError as error:
        _print_error(error, f"; {remedy}")
        raise typer.Exit(exit_code) from error


def _print_error(error: Exception, more: str = "") -> None:
    text = f"[bold red]{type(error).__name__}[/]: {escape(f'{error}{more}')}"
    error_console.print(text, soft_wrap=True, highlight=False)

"""Output and exit codes of the commands."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from elastic_ckpt.errors import ConfigError, ElasticCkptError
from elastic_ckpt.report import size

if TYPE_CHECKING:
    from elastic_ckpt.tools.output_folder import WriteReport

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


def print_written(report: WriteReport, title: str, as_json: bool) -> None:
    """Print what a conversion or an export wrote."""
    if as_json:
        print_json(report)
        return
    facts = table(title)
    facts.add_row("folder", escape(report.folder))
    facts.add_row("written", f"{report.tensors} tensors, {report.files} files, {size(report.nbytes)}")
    facts.add_row("seconds", f"{report.seconds:.1f}")
    for note in report.notes:
        facts.add_row("note", escape(note))
    console.print(facts)


def print_wide(parts: Iterable[RenderableType]) -> None:
    """Print a report, as wide as its tables need if the output is no terminal."""
    wide = console if console.is_terminal else SafeConsole(width=max(console.width, _WIDTH))
    for part in parts:
        wide.print(part)


def end_with(found: bool) -> None:
    """Exit with code 1 if something was found."""
    if found:
        raise typer.Exit(EXIT_FOUND)


def error_as_dict(error: ElasticCkptError) -> Mapping[str, Any]:
    """An error as plain data: problem, parameter, file, expected, found, remedy, as far as known."""
    details = ("problem", "parameter", "file", "expected", "found", "remedy")
    known = {name: value for name in details if (value := getattr(error, name)) is not None}
    return {"error": type(error).__name__, **known}


@contextmanager
def errors_end_the_command(as_json: bool, exit_code: int = EXIT_UNREADABLE) -> Iterator[None]:
    """Print an :class:`ElasticCkptError` instead of a traceback, and exit; with 2 if a config is wrong."""
    try:
        yield
    except ElasticCkptError as error:
        if as_json:
            print_json(error_as_dict(error))
        else:
            error_console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else exit_code) from error


@contextmanager
def os_errors_end_the_command(remedy: str, exit_code: int = EXIT_USAGE) -> Iterator[None]:
    """Print an :class:`OSError` with what can be done, instead of a traceback."""
    try:
        yield
    except OSError as error:
        text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}; {escape(remedy)}"
        error_console.print(text, soft_wrap=True, highlight=False)
        raise typer.Exit(exit_code) from error

"""What the commands print, and how they end."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from elastic_ckpt.errors import ConfigError, ElasticCkptError

#: Something was found; wrong usage; the checkpoint cannot be read.
EXIT_FOUND, EXIT_USAGE, EXIT_UNREADABLE = 1, 2, 3

console = Console()
error_console = Console(stderr=True)
#: Columns of a report that is not printed to a terminal.
_WIDTH = 100


def print_json(what: Any) -> None:
    """A record, as JSON, to standard output."""
    print(json.dumps(_finite(json.loads(json.dumps(what, default=_plain))), indent=2, allow_nan=False))


def _finite(item: Any) -> Any:
    """JSON has no words for infinities and not-a-numbers: they become text."""
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_finite(value) for value in item]
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item


def print_wide(parts: Iterable[RenderableType]) -> None:
    """Print a report; where it goes to no terminal, as wide as its tables need."""
    wide = console if console.is_terminal else Console(width=max(console.width, _WIDTH))
    for part in parts:
        wide.print(part)


def end_with(found: bool) -> None:
    """End the command with exit code 1 if something was found."""
    if found:
        raise typer.Exit(EXIT_FOUND)


def printable(text: str) -> str:
    """Text from a checkpoint, fit for a terminal: control characters and what is no character are escaped."""
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)


def _plain(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    return sorted(map(str, item)) if isinstance(item, set | frozenset) else str(item)


def error_as_dict(error: ElasticCkptError) -> Mapping[str, Any]:
    """An error as plain data: what is known of problem, parameter, file, expected, found, remedy."""
    details = ("problem", "parameter", "file", "expected", "found", "remedy")
    values = {name: getattr(error, name) for name in details}
    return {"error": type(error).__name__, **{name: value for name, value in values.items() if value is not None}}


@contextmanager
def errors_end_the_command(as_json: bool) -> Iterator[None]:
    """Print an :class:`ElasticCkptError` instead of a traceback, and exit with 3, or 2 where a config is wrong."""
    try:
        yield
    except ElasticCkptError as error:
        if as_json:
            print_json(error_as_dict(error))
        else:
            error_console.print(f"[bold red]{type(error).__name__}[/]: {escape(printable(str(error)))}", soft_wrap=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_UNREADABLE) from error

"""What the commands share: options, output and exit codes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.markup import escape

from elastic_ckpt.cli import app
from elastic_ckpt.core.text import shortened_text
from elastic_ckpt.errors import ConfigError, ElasticCkptError
from elastic_ckpt.report import SafeConsole, literal
from elastic_ckpt.sharding.rules import Preset
from elastic_ckpt.tools.opened import config_of, deepspeed_config, seen_together
from elastic_ckpt.tools.remedies import EXPORT, of_command

#: A finding.
EXIT_FOUND = 1
#: Wrong usage.
EXIT_USAGE = 2
#: The checkpoint cannot be read.
EXIT_UNREADABLE = 3

FOLDERS: Any = typer.Argument(
    metavar="DIR...",
    help="The folder passed to [bold]load_checkpoint[/], the folder of one tag, or the output folder of a Trainer. "
    "Several folders, one from each node that saved to its own disk, are read as one.",
)
Folders = Annotated[list[str], FOLDERS]
Tag = Annotated[str | None, typer.Option("--tag", help="Tag of the checkpoint. Default: the latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]
Replicated = Annotated[
    Literal["strict", "first", "mean"] | None,
    typer.Option("--replicated", help='Which of several differing copies to use ("replicated_params").'),
]


console = SafeConsole()
error_console = SafeConsole(stderr=True)
#: Columns of a report that is no wider, if the output is no terminal.
WIDTH = 80
#: More columns than any report has.
_WIDEST = 1_000_000
#: What a call of torch's, which a script may make, would have read.
_ALLOWED = re.compile(r"; add_safe_globals\(\[[^\]]*\]\)")
#: Command -> its flag that leaves optimizer states out, whether it is given as itself, and in words.
_WITHOUT_STATES = {
    "export": ("optimizer", True, "leave out --optimizer"),
    "plan": ("weights_only", False, "--weights-only"),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command has to say."""

    document: Any  # with --json
    parts: Iterable[RenderableType]  # else; strings are lines of text, whatever the width of the terminal
    notes: Iterable[str] = ()  # lines for standard error
    exit_code: int = 0


def refusal(error: ElasticCkptError, exit_code: int = EXIT_UNREADABLE, instead: str = EXPORT) -> Answer:
    """The answer of a command that cannot do it; the exit code is 2 if a config is wrong.

    ``instead``: what the command has in place of a load's argument that leaves optimizer states out.
    """
    if error.remedies:
        error.remedy = of_command(error.remedies, instead)
    if error.found and _ALLOWED.search(error.found):
        error.found = _ALLOWED.sub("", error.found)
    document = error.document
    exit_code = EXIT_USAGE if isinstance(error, ConfigError) else exit_code
    return Answer(document, (), [f"{type(error).__name__}: {error}"], exit_code)


def reads_checkpoint(
    name: str, epilog: str, policy: str | None = None
) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """A command that is called with a ``config``, made of the options that all such commands have after their own.

    If it takes ``deepspeed``, that is the whole DeepSpeed config, empty without ``--config``.

    ``policy``: ``replicated_params`` where neither ``--config`` nor ``--replicated`` is given.
    """

    def add(function: Callable[..., Answer]) -> Callable[..., None]:
        def command(
            *,
            config: Annotated[
                Path | None,
                typer.Option("--config", help='DeepSpeed config; its "elastic_checkpoint" applies as in a load.'),
            ] = None,
            preset: Annotated[
                str | None,
                typer.Option(
                    "--preset",
                    "--tp-preset",
                    help=f"Tensor-parallel rules: {', '.join(Preset.names())}, or a JSON file.",
                ),
            ] = None,
            trust_pickle: Annotated[
                bool, typer.Option("--trust-pickle", help="Allow checkpoint files to run code when they are read.")
            ] = False,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            replicated = own.pop("replicated", None) or (policy if config is None else None)
            overrides = {"tp_preset": preset, "trust_pickle": trust_pickle, "replicated_params": replicated}
            try:
                options = config_of(config, **overrides)
                if "deepspeed" in inspect.signature(function).parameters:
                    own["deepspeed"] = deepspeed_config(config)
                with seen_together(own.get("folders") or os.curdir, options, own.get("tag")):
                    answer = function(options, **own)
            except ElasticCkptError as error:
                flag, default, words = _WITHOUT_STATES.get(name, ("", None, EXPORT))
                answer = refusal(error, instead=words if own.get(flag, default) == default else "")
            tell(answer, as_json)

        _, *mine = inspect.signature(function, eval_str=True).parameters.values()
        *shared, _ = inspect.signature(command, eval_str=True).parameters.values()
        every = (each for each in (*mine, *shared) if each.name != "deepspeed")
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in every]
        functools.update_wrapper(command, function)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return app.command(name, epilog=epilog)(command)

    return add


def tell(answer: Answer, as_json: bool) -> None:
    """Print an answer, where the output is no terminal and ``COLUMNS`` not set as wide as its tables need."""
    if as_json:
        print(json.dumps(plain(answer.document), indent=2, allow_nan=False))
    else:
        wide = SafeConsole()
        has_width = wide.is_terminal or os.environ.get("COLUMNS", "").isdigit()
        for note in answer.notes:
            error_console.print(escape(note), soft_wrap=True, highlight=False)
        for part in answer.parts:
            if isinstance(part, str):
                console.print(escape(part), soft_wrap=True, highlight=False)
            else:
                wide.width = wide.width if has_width else max(WIDTH, SafeConsole(width=_WIDEST).measure(part).maximum)
                wide.print(part)
    if answer.exit_code:
        raise typer.Exit(answer.exit_code)


def plain(item: Any) -> Any:
    """A value as JSON types, of which a very long text is cut as in other output; infinities and NaN become text."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        values: dict[str, Any] = {}
        for key, value in item.items():
            values[_unused(shortened_text(str(key)), values)] = plain(value)
        return values
    if isinstance(item, Set):
        return sorted(shortened_text(str(each)) for each in item)
    if isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
        return [plain(value) for value in item]
    is_number = isinstance(item, (bool, int)) or (isinstance(item, float) and math.isfinite(item))
    return item if item is None or is_number else shortened_text(str(item))


def _unused(key: str, values: Mapping[str, Any]) -> str:
    """A key, or one with a number: two names that differ behind what is shown of them are two entries."""
    numbers = itertools.count(2)
    unused = key
    while unused in values:
        unused = f"{key} ({next(numbers)})"
    return unused


@contextmanager
def os_errors_end_the_command(remedy: str, exit_code: int = EXIT_USAGE) -> Iterator[None]:
    """Print an :class:`OSError` with what can be done, instead of a traceback."""
    try:
        yield
    except OSError as error:
        error_console.print(literal(f"{type(error).__name__}: {error}; {remedy}"), soft_wrap=True, highlight=False)
        raise typer.Exit(exit_code) from error

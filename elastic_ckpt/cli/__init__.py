"""``elastic-ckpt``: its commands.

Exit codes: 0, success; 1, a finding (damage, a difference, a load that would be refused); 2, wrong usage; 3, the
checkpoint, or a part of it, cannot be read, so that it could not be checked.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info

_MODULES = {
    "docs": ("docs",),
    "fetch": ("fetch",),
    "environment": ("disable", "doctor", "enable", "exec"),
    "inspect": ("inspect", "latest", "verify"),
    "plan": ("plan",),
    "tensors": ("convert", "diff", "explain", "export"),
}
#: Each command, and its module.
COMMANDS = dict(sorted((name, module) for module, names in _MODULES.items() for name in names))

#: Types as newer versions of typer show them -> as ``--help`` does.
_TYPES = {"int": "INT", "int range": "INT", "str": "TEXT", "list[str]": "TEXT", "path": "PATH", "bool": ""}
#: A name from which an unknown command differs less than this is what was meant.
_SIMILAR = 0.5
_UsageError: Any = typer.BadParameter.__base__

#: Made before Python looks for cycles again. Plans are millions of small objects without any, and Python's own choice
#: takes a fifth of the time of planning.
_NEW_OBJECTS = 10_000


class _Brief:
    """Short types and usage in ``--help``.

    Contexts and commands are typed ``Any``: they are click's, which newer versions of typer vendor.
    """

    def get_params(self, ctx: Any) -> Any:
        """Arguments and options, whose types are short."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if hasattr(each, "display_type_rich"):
                each.display_type_rich = partial(_short_type, each.display_type_rich)
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``DIR...`` where typer has ``{DIR...}...``."""
        return [re.sub(r"[{}]|(?<=\.{3}\})\.{3}", "", each) for each in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


def _short_type(shown: Any, ctx: Any) -> str:
    text = shown(ctx) or ""
    return _TYPES.get(text.strip("<>"), text)


class BriefCommand(_Brief, TyperCommand):
    """A command whose help has whole paragraphs, whatever the lines of its docstring."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        super().__init__(*args, help=re.sub(r"(?<!\n)\n(?!\n)", " ", help or ""), **more)


class LazyCommands(_Brief, TyperGroup):
    """Imports a command's module when it is run, so that ``--help`` loads neither torch nor DeepSpeed."""

    _as_json = False

    def make_context(self, info_name: Any, args: Any, *more: Any, **extra: Any) -> Any:
        """The context in which a command runs."""
        self._as_json = "--json" in args
        with self._usage_errors():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with self._usage_errors():
            return super().invoke(ctx)

    @contextmanager
    def _usage_errors(self) -> Iterator[None]:
        """Print errors of usage as JSON where ``--json`` is given."""
        try:
            yield
        except _UsageError as error:
            if not self._as_json:
                raise
            print(json.dumps({"error": "UsageError", "problem": error.format_message()}, indent=2))
            raise typer.Exit(_UsageError.exit_code) from error

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command as ``--help`` lists it."""
        return TyperCommand(cmd_name, help=summary(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command to run."""
        if near := get_close_matches(args[0], COMMANDS, 1, _SIMILAR) if args[0] not in COMMANDS else ():
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            try:
                importlib.import_module(f"elastic_ckpt.cli.{COMMANDS[name]}")
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                ctx.fail(f"{name} reads whole tensors, which needs torch: pip install torch")
            info = next(info for info in app.registered_commands if info.name == name)
            info.cls = BriefCommand
            command = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
            if name == "exec":
                rest = importlib.import_module("elastic_ckpt.cli.environment").with_value(rest)
        return name, command, rest


def summary(command: str) -> str:
    """The first line of a command's docstring, which is read without importing its module."""
    # asks the system: a module of this package
    tree = ast.parse((Path(__file__).parent / f"{COMMANDS[command]}.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == command)
    return str(ast.get_docstring(function)).partition("\n")[0]


app = typer.Typer(
    name="elastic-ckpt",
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(version("elastic_ckpt"))
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Inspect, plan, verify, convert, export and compare DeepSpeed checkpoints."""
    gc.set_threshold(_NEW_OBJECTS)

"""``elastic-ckpt``: its commands.

Exit codes: 0, success; 1, a finding (damage, a difference, a load that would be refused); 2, wrong usage; 3, the
checkpoint cannot be read.
"""

from __future__ import annotations

import ast
import gc
import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info

_MODULES = {
    "fetch": ("fetch",),
    "environment": ("disable", "doctor", "enable", "exec"),
    "inspect": ("inspect", "latest", "verify"),
    "plan": ("plan",),
    "tensors": ("convert", "diff", "explain", "export"),
}
#: Each command, and its module.
COMMANDS = dict(sorted((name, module) for module, names in _MODULES.items() for name in names))

#: Made before Python looks for cycles again. Plans are millions of small objects without any, and Python's own choice
#: takes a fifth of the time of planning.
_NEW_OBJECTS = 10_000


class LazyCommands(TyperGroup):
    """Imports a command's module when it is run, so that ``--help`` loads neither torch nor DeepSpeed.

    Contexts and commands are typed ``Any``: they are click's, which newer versions of typer vendor.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command as ``--help`` lists it."""
        return TyperCommand(cmd_name, help=summary(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command to run."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            try:
                importlib.import_module(f"elastic_ckpt.cli.{COMMANDS[name]}")
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                ctx.fail(f"{name} reads whole tensors, which needs torch: pip install torch")
            info = next(info for info in app.registered_commands if info.name == name)
            command = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
        return name, command, rest


def summary(command: str) -> str:
    """The first line of a command's docstring, which is read without importing its module."""
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
    """Look at DeepSpeed checkpoints, plan their load on another topology, verify, convert, export and compare them."""
    gc.set_threshold(_NEW_OBJECTS)

"""``elastic-ckpt``: its commands, and the options that they share.

Exit codes: 0, success; 1, a finding (damage, a difference, a load that would be refused); 2, wrong usage; 3, the
checkpoint cannot be read.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info

#: Command, which is also its module's name -> first line of its help.
COMMANDS = {
    "convert": "Write a universal checkpoint that DeepSpeed loads by itself at another data-parallel degree.",
    "diff": "Compare two checkpoints by logical tensor, whatever their topologies, ZeRO stages and formats.",
    "doctor": "Tell whether elastic_ckpt works with the installed versions of DeepSpeed, torch and Python.",
    "export": "Write consolidated safetensors weights, as Hugging Face Transformers loads them, from any checkpoint.",
    "inspect": "Show what a checkpoint holds, who saved it, and what is odd about it.",
    "latest": "Print the path of the newest whole checkpoint of a folder, whatever its latest file says.",
    "plan": (
        "Plan a load on another topology, without a GPU: what each rank would read and need, and how long that takes."
    ),
    "verify": "Look for missing, foreign and damaged files, and list all that is wrong, one line each.",
}

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with a [bold]latest[/] file, or the folder of one tag.")
]
Tag = Annotated[str | None, typer.Option("--tag", help="Which checkpoint of the folder; default: the latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output, and nothing else there.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help='DeepSpeed config; its "elastic_checkpoint" section counts, as in a load.'),
]
Preset = Annotated[
    str | None, typer.Option("--preset", help='Rules of a code base ("tp_preset"): bloom, gpt-neox, megatron-core ...')
]
Replicated = Annotated[
    str | None, typer.Option("--replicated", help='Copies that differ: strict, first or mean ("replicated_params").')
]
TrustPickle = Annotated[bool, typer.Option("--trust-pickle", help="Let checkpoint files run code while they are read.")]


class LazyCommands(TyperGroup):
    """Imports a command's module when it is run, so that ``--help`` loads neither torch nor DeepSpeed.

    Contexts and commands are typed ``Any``: they are click's, which newer versions of typer vendor.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command as ``--help`` lists it."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command to run."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            importlib.import_module(f"elastic_ckpt.cli.{name}")
            info = next(info for info in app.registered_commands if info.name == name)
            command = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
        return name, command, rest


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

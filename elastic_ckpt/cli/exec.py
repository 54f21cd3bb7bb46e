"""``elastic-ckpt exec``."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Annotated

import typer

from elastic_ckpt.cli import app
from elastic_ckpt.cli.output import os_errors_end_the_command
from elastic_ckpt.config import Mode
from elastic_ckpt.load import startup

_EXAMPLE = "Example: elastic-ckpt exec -- llamafactory-cli train sft.yaml"
#: As shells end where a file is no command, and where there is none.
_EXIT_NOT_EXECUTABLE, _EXIT_NO_COMMAND = 126, 127


@app.command("exec", epilog=_EXAMPLE, context_settings={"allow_interspersed_args": False})
def exec(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command, and its arguments.")],
    mode: Annotated[
        Mode | None, typer.Option("--universal-checkpoint", help="The mode, instead of the DeepSpeed config's.")
    ] = None,
) -> None:
    """Run a command with elastic_ckpt installed in every process below it that imports DeepSpeed.

    For frameworks that start their ranks themselves. Two environment variables do it, PYTHONPATH and ELASTIC_CKPT: it
    reaches neither python -I and -E nor machines to which they are not passed on. The command takes the place of this
    process: signals and exit code are its own.
    """
    for each in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and its successor would
        signal.signal(each, signal.SIG_DFL)
    is_there = os.path.exists(command[0]) if os.path.dirname(command[0]) else shutil.which(command[0], os.F_OK)
    exit_code = _EXIT_NOT_EXECUTABLE if is_there else _EXIT_NO_COMMAND
    with os_errors_end_the_command(f"{command[0]} cannot be run", exit_code):
        try:
            os.execvpe(command[0], command, {**os.environ, **startup.variables(mode)})
        except OSError as error:  # execvpe names the last path that it tried, in bytes
            raise OSError(error.errno, error.strerror, command[0]) from error

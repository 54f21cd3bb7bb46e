"""``elastic-ckpt doctor``, ``enable``, ``disable`` and ``exec``: this Python environment, and processes in it."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Annotated

import typer

from elastic_ckpt import __version__
from elastic_ckpt.cli import app
from elastic_ckpt.cli.output import EXIT_FOUND, Answer, AsJson, os_errors_end_the_command, tell
from elastic_ckpt.config import VARIABLE, Mode
from elastic_ckpt.engines import versions
from elastic_ckpt.engines.accelerator import find_accelerator
from elastic_ckpt.load import installation
from elastic_ckpt.load.installation._elastic_ckpt_flag import FLAGS, MODES
from elastic_ckpt.report import literal, table

_VERDICTS = {-1: "too old", 0: "tested", 1: "not tested"}
#: As shells end where a file is no command.
_EXIT_NOT_EXECUTABLE = 126
#: As shells end where there is none.
_EXIT_NO_COMMAND = 127


def with_value(words: list[str]) -> list[str]:
    """The words of ``exec``, in which ``--universal-checkpoint`` has its hyphen, and the value that it may lack."""
    flag, equals, value = words[0].partition("=") if words else ("", "", "")
    if flag not in FLAGS:
        return words
    if not equals and words[1:2] and words[1] in MODES:
        return [FLAGS[0], *words[1:]]
    return [f"{FLAGS[0]}={value or 'auto'}", *words[1:]]


@app.command("doctor", epilog="Example: elastic-ckpt doctor")
def doctor(as_json: AsJson = False) -> None:
    """Check that the installed versions of DeepSpeed, torch and Python are supported.

    It also shows the version of elastic_ckpt, and the accelerator that DeepSpeed chooses here: on a login node, this is
    often the CPU.

    Exit code 1: elastic_ckpt.install() would fail.
    """
    found: dict[str, tuple[str | None, str, str]] = {}  # version, tested range, verdict
    for each in versions.REQUIREMENTS:
        verdict = "not installed" if each.found is None else _VERDICTS[each.compare(each.found)]
        found[each.name] = (each.found, f"{each.oldest} to {each.newest}", verdict)
    missing = [name for name, (installed, *_) in found.items() if installed is None]
    accelerator = None if missing else find_accelerator()
    is_broken = accelerator is not None and accelerator.is_broken
    ok = all(verdict in ("tested", "not tested") for *_, verdict in found.values()) and not is_broken
    bugs = versions.known_bugs(found["DeepSpeed"][0])
    enabled = installation.enabled()
    variable = os.environ.get(VARIABLE)
    document = {"ok": ok, "version": __version__, "versions": found, "accelerator": accelerator}
    document |= {"known_bugs": bugs, "enabled": enabled, "variable": variable}
    rows: list[tuple[str, ...]] = [("elastic_ckpt", __version__, "", "")]
    rows += [(name, installed or "-", *more) for name, (installed, *more) in found.items()]
    facts = [("accelerator", literal(accelerator or ""))]
    facts += [("known bug", literal(bug)) for bug in bugs]
    if missing:
        works = "all commands" if "torch" not in missing else "all commands except convert, diff and export"
        facts += [("works", f"{works}; an engine needs {' and '.join(missing)}: {literal(versions.INSTALL)}")]
    facts += [("enabled", "\n".join(map(literal, enabled)) or "no (elastic-ckpt enable)")]
    if variable is not None:
        facts += [(VARIABLE, literal(f"{variable}{', which turns it off' * (variable == '0')}"))]
    tables = table("Versions", "", "found", "tested", "", rows=rows), table("Environment", rows=facts)
    tell(Answer(document, tables, exit_code=0 if ok else EXIT_FOUND), as_json)


@app.command("enable", epilog="Example: elastic-ckpt enable")
def enable() -> None:
    """Install elastic_ckpt in every process of this Python environment that imports DeepSpeed.

    This is for frameworks that start their ranks themselves. It writes a .pth file to site-packages, which costs other
    processes less than a millisecond. ELASTIC_CKPT=0 turns it off for one run; ELASTIC_CKPT=require (or auto, off) sets
    the mode. elastic-ckpt disable removes the file.
    """
    with os_errors_end_the_command("to do without: elastic-ckpt exec -- COMMAND"):
        print(f"enabled by {installation.enable()}")


@app.command("disable", epilog="Example: elastic-ckpt disable")
def disable() -> None:
    """Undo elastic-ckpt enable: remove its .pth file from this Python environment."""
    with os_errors_end_the_command("for one run: ELASTIC_CKPT=0"):
        removed = installation.disable()
    print("\n".join(f"removed {file}" for file in removed) or "was not enabled")


@app.command(
    "exec",
    epilog="Example: elastic-ckpt exec -- llamafactory-cli train sft.yaml",
    context_settings={"allow_interspersed_args": False},
)
def exec(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments.")],
    mode: Annotated[
        Mode | None, typer.Option("--universal-checkpoint", help="Overrides the mode of the DeepSpeed config.")
    ] = None,
) -> None:
    """Run a command with elastic_ckpt installed in every process that it starts and that imports DeepSpeed.

    This is for frameworks that start their ranks themselves. It sets PYTHONPATH and ELASTIC_CKPT, so it does not reach
    python -I or -E, or machines to which these variables are not passed. The command replaces this process, and
    receives its signals.
    """
    for each in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and its successor would
        signal.signal(each, signal.SIG_DFL)
    # asks the system: the command to run
    is_there = os.path.exists(command[0]) if os.path.dirname(command[0]) else shutil.which(command[0], os.F_OK)
    exit_code = _EXIT_NOT_EXECUTABLE if is_there else _EXIT_NO_COMMAND
    with os_errors_end_the_command(f"{command[0]} cannot be run", exit_code):
        try:
            os.execvpe(command[0], command, {**os.environ, **installation.variables(mode)})
        except OSError as error:  # execvpe names the last path that it tried, in bytes
            raise OSError(error.errno, error.strerror, command[0]) from error

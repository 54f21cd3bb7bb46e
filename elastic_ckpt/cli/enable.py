"""``elastic-ckpt enable``."""

from __future__ import annotations

from elastic_ckpt.cli import app
from elastic_ckpt.cli.output import os_errors_end_the_command
from elastic_ckpt.load import startup

_EXAMPLE = "Example: elastic-ckpt enable"


@app.command("enable", epilog=_EXAMPLE)
def enable() -> None:
    """Install elastic_ckpt in every process of this Python environment that imports DeepSpeed, until disable.

    For frameworks that start their ranks themselves: a .pth file in site-packages, which costs processes without
    DeepSpeed less than a millisecond. ELASTIC_CKPT=0 turns it off for one run; ELASTIC_CKPT=require (auto, off) sets
    the mode.
    """
    with os_errors_end_the_command("to do without: elastic-ckpt exec -- COMMAND"):
        print(f"enabled by {startup.enable()}")

"""``elastic-ckpt disable``."""

from __future__ import annotations

from elastic_ckpt.cli import app
from elastic_ckpt.cli.output import os_errors_end_the_command
from elastic_ckpt.load import startup

_EXAMPLE = "Example: elastic-ckpt disable"


@app.command("disable", epilog=_EXAMPLE)
def disable() -> None:
    """Undo enable, wherever this Python finds its .pth file."""
    with os_errors_end_the_command("for one run: ELASTIC_CKPT=0"):
        removed = startup.disable()
    print("\n".join(f"removed {file}" for file in removed) or "was not enabled")

"""Folders in folders, deeper than a path may be long."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def nested(folder: Path, depth: int, name: str = "d") -> Iterator[None]:
    """So many folders, each in the one before, below a folder while the body runs.

    Python's ``shutil.rmtree``, by which pytest cleans up, cannot remove them.
    """
    try:
        _nest(folder, depth, name)
        yield
    finally:
        subprocess.run(["rm", "-rf", "--", str(folder / name)], check=True)


def _nest(folder: Path, depth: int, name: str) -> None:
    inside = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inside)
        inner = os.open(name, os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = inner
    os.close(inside)

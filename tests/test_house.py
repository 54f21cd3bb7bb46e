"""The shape of the package: what importing it costs, and how big its files may grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import elastic_ckpt

PACKAGE = Path(elastic_ckpt.__file__).parent


def test_importing_the_package_loads_neither_torch_nor_deepspeed() -> None:
    script = "import sys, elastic_ckpt; sys.exit(bool({'torch', 'deepspeed', 'pydantic'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(elastic_ckpt, name) is not None for name in elastic_ckpt.__all__)
    assert not hasattr(elastic_ckpt, "no_such_name")


def test_no_file_outgrows_its_room() -> None:
    too_long = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in too_long.items() if lines > 400} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 8

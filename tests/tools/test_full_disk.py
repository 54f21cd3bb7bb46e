"""A disk that fills up at any byte of what is written: an error that says so, and nothing that stays."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.opened import open_folder
from tests.formats.dcp_folders import save as save_dcp
from tests.formats.dcp_folders import state_dicts


@contextmanager
def disk(place: Path, kib: int) -> Iterator[Path]:
    """A file system of some size; skips where none can be mounted."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, which takes the rights of root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # the files of a failed torch.save stay open


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model, optim = state_dicts()
    return save_dcp(tmp_path / "source", {"model": model, "optim": optim})


def to_dcp(source: Path, out: Path) -> Any:
    return convert_to_dcp(open_folder(str(source), None, ElasticConfig()), out, progress=False)


def to_safetensors(source: Path, out: Path) -> Any:
    return elastic_ckpt.export(source, out, optimizer=True, progress=False)


WRITERS = {"dcp": to_dcp, "safetensors": to_safetensors}


@pytest.mark.parametrize("how", WRITERS)
def test_a_disk_that_fills_up_is_named(
    how: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = written = 0
    for kib in range(4, 72, 8):
        with disk(tmp_path / "disk", kib) as place:
            try:
                WRITERS[how](source, place / "out")
            except ElasticCkptError as error:
                assert "No space left on device" in str(error) and str(place) in str(error)
                assert list(place.iterdir()) == []
                failed += 1
            else:
                written += 1
    assert failed and written
    assert "Traceback" not in capfd.readouterr().err

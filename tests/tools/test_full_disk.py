"""A disk that fills up at any byte of what is written: an error that says so, and the same command goes on from there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.tools import export as exporting
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.conversion.pickling import save
from elastic_ckpt.tools.opened import open_folder
from tests.formats.test_dcp import save as save_dcp
from tests.formats.test_dcp import state_dicts


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


def to_dcp(threads: int) -> Callable[[Path, Path], Any]:
    return lambda source, out: convert_to_dcp(
        open_folder(str(source), None, ElasticConfig()), out, threads, progress=False
    )


def to_torch(source: Path, out: Path) -> Any:
    return elastic_ckpt.export(source, out, format="torch", optimizer=True)


WRITERS = {"dcp": to_dcp(1), "dcp, threads": to_dcp(4), "torch": to_torch}


@pytest.mark.parametrize("how", WRITERS)
def test_a_disk_that_fills_up_is_named(
    how: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporting, "_SPARE", -1 << 30)  # which notices it before anything is written
    failed = written = 0
    for kib in range(4, 72, 8):
        with disk(tmp_path / "disk", kib) as place:
            try:
                WRITERS[how](source, place / "out")
            except ElasticCkptError as error:
                assert "No space left on device" in str(error) and str(place) in str(error)
                assert not (place / "out").exists()
                failed += 1
            else:
                written += 1
    assert failed and written
    assert "Traceback" not in capfd.readouterr().err


def test_what_torch_cannot_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 64) as place, pytest.raises(OSError, match="No space left on device") as error:
        save({"a": torch.zeros(100_000)}, place / "a.pt")
    assert error.value.filename == str(place / "a.pt")
    with pytest.raises(OSError, match=r"(?i)is a directory|cannot be opened|does not exist"):
        save({"a": 1}, tmp_path)

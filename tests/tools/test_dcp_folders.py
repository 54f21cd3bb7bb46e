"""``inspect``, ``verify`` and ``diff`` of folders of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.comparison import compare
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from tests.formats.dcp_folders import save, state_dicts

CONFIG = ElasticConfig()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, optim = state_dicts()
    return save(tmp_path / "saved", {"model": model, "optim": optim})


def test_inspect_shows_tensors_files_and_no_topology(folder: Path) -> None:
    found = inspect_folder(str(folder), None, CONFIG)
    assert (found["source"]["format"], found["run"]["global_steps"], found["ok"]) == ("dcp", 1, True)
    assert found["topology"] == "1 file of torch.distributed.checkpoint"


def test_verify_reads_every_byte_and_finds_a_turned_bit(folder: Path) -> None:
    fine = verify(str(folder), None, CONFIG, full=True)
    assert (
        not fine.findings and fine.files == 2 and fine.nbytes == sum(path.stat().st_size for path in folder.iterdir())
    )
    metadata = open_folder(str(folder), None, CONFIG).checkpoint.metadata
    path = Path(metadata.files[0].path)
    raw = bytearray(path.read_bytes())
    raw[metadata.files[0].records.offsets[0]] ^= 1
    path.write_bytes(raw)
    assert [finding.kind for finding in verify(str(folder), None, CONFIG, full=True).findings] == ["checksum"]


def test_verify_finds_files_that_are_missing_or_short(folder: Path) -> None:
    (path,) = folder.glob("*.distcp")
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    assert [finding.kind for finding in verify(str(folder), None, CONFIG).findings] == ["damaged"]
    path.unlink()
    (finding,) = verify(str(folder), None, CONFIG).findings
    assert "missing" in finding.message and finding.file == str(path)


def test_diff_finds_the_element_that_differs(tmp_path: Path, folder: Path) -> None:
    model, optim = state_dicts()
    model["first.weight"] = model["first.weight"].clone()
    model["first.weight"][4, 1] += 1
    other = save(tmp_path / "other", {"net": model, "adam": optim})
    sides = [open_folder(str(each), None, CONFIG) for each in (folder, other)]
    (found,) = compare(*sides, threads=1, progress=False).differences
    assert (found.name, found.key, found.at, found.differing) == ("first.weight", "fp32", (4, 1), 1)


def test_a_folder_of_no_kind_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "something.pt")
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code != 0 and "no DeepSpeed checkpoint here" in result.output

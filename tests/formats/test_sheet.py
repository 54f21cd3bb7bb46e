"""Reading resume sheets: whatever is in the file, it is a sheet, none, or an error that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.resume_sheet import MOST_SHEET_NBYTES, SHEET, ResumeSheet
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.sheet import read_sheet
from elastic_ckpt.storage.local import look_again, pinned

FACTS = {"step": 4, "world_size": 2, "global_batch": 12, "precision": "fp32"}


def test_a_sheet_comes_back_and_pins_nothing(tmp_path: Path) -> None:
    assert read_sheet(str(tmp_path)) is None
    sheet = ResumeSheet(**FACTS, losses=[float("nan"), 1], groups=[{"lr": 1, "nesterov": False, "betas": [0.9, 1]}])
    with pinned():
        for _ in range(2):
            (tmp_path / SHEET).write_text(json.dumps(sheet.model_dump()))
            assert repr(read_sheet(str(tmp_path))) == repr(sheet)
        (tmp_path / SHEET).unlink()
        look_again()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (MOST_SHEET_NBYTES + 1),
        json.dumps(FACTS | {"step": "4"}).encode(),
        json.dumps(FACTS | {"format": 2}).encode(),
        json.dumps(FACTS | {"losses": [1.0] * 1000}).encode(),
        json.dumps(FACTS | {"groups": [{"lr": {}}]}).encode(),
    ],
    ids=range(11),
)
def test_what_is_no_sheet_is_an_error_that_names_the_file(text: bytes, tmp_path: Path) -> None:
    (tmp_path / SHEET).write_bytes(text)
    with pytest.raises(DamagedError, match="resume sheet") as caught:
        read_sheet(str(tmp_path))
    assert caught.value.file == str(tmp_path / SHEET)


def test_neither_a_pipe_nor_a_folder_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SHEET)
    with pytest.raises(DamagedError, match="cannot be read"):
        read_sheet(str(tmp_path))


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("sheet")
    (folder / SHEET).write_bytes(text)
    with pytest.raises(DamagedError):
        read_sheet(str(folder))

"""What DeepSpeed's checkpoint writers do to files, and which of them are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.native import refuse_mixture, refuse_writers
from elastic_ckpt.formats.pickled import open_file, open_pickled

MODEL = "mp_rank_00_model_states.pt"
_BLOCK = 4096


def model_states(
    step: int, stage: int = 0, writer: str | None = "python", ranks: int = 2, shift: float = 0.0, alone: bool = False
) -> Any:
    options = {"type": writer, "data_parallel": None if alone else "replica"}
    config = {"checkpoint": {"writer": writer and options}, "zero_optimization": {"stage": stage}}
    return {
        "module": {f"layer{n}": torch.arange(900.0) + shift for n in range(3)},
        "global_steps": step,
        "global_samples": 12 * step,
        "skipped_steps": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": config,
    }


def refuse(folder: Path) -> None:
    found = look_at(str(folder.parent), folder.name)
    assert found is not None
    refuse_writers(found, trust_pickle=False)


def test_copies_of_one_save_are_taken(tmp_path: Path) -> None:
    for suffix in ("-0.2", "-1.2", "-0.1"):
        torch.save(model_states(4), tmp_path / f"{MODEL}{suffix}")
    refuse(tmp_path)


def test_a_copy_of_an_older_save_is_refused(tmp_path: Path) -> None:
    torch.save(model_states(4), tmp_path / f"{MODEL}-0.2")
    torch.save(model_states(3), tmp_path / f"{MODEL}-0.1")
    with pytest.raises(DamagedError, match="two saves are mixed in one folder") as refused:
        refuse(tmp_path)
    assert refused.value.file == str(tmp_path / f"{MODEL}-0.1")


def test_legacy_archives_are_taken_if_each_writers_is_whole(tmp_path: Path) -> None:
    for suffix in ("-0.2", "-1.2"):
        torch.save(model_states(4), tmp_path / f"{MODEL}{suffix}", _use_new_zipfile_serialization=False)
    refuse(tmp_path)


def mixed(path: Path, name: str = MODEL, **of_model: Any) -> Path:
    """A file with the pickle of one rank, and in a tensor's record bytes of another one."""
    file = path / name
    torch.save(model_states(4, **of_model), file)
    data, pattern = bytearray(file.read_bytes()), torch.arange(900.0).numpy().tobytes()
    at = data.index(pattern)
    data[at + 8 : at + 16] = b"\x01" * 8
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_mixture_of_several_ranks_bytes_is_refused(stage: int, tmp_path: Path) -> None:
    file = mixed(tmp_path, stage=stage)
    with pytest.raises(DamagedError, match="this file is a mixture: several ranks wrote it at the same time"):
        refuse_mixture(open_pickled(str(file)))


@pytest.mark.parametrize(
    "of_model", [{"stage": 3}, {"writer": None}, {"ranks": 1}, {"alone": True}, {"name": f"{MODEL}-1.2"}]
)
def test_files_of_one_rank_are_not_read_whole(of_model: dict[str, Any], tmp_path: Path) -> None:
    refuse_mixture(open_pickled(str(mixed(tmp_path, **of_model))))


def test_a_whole_file_of_several_ranks_is_taken(tmp_path: Path) -> None:
    torch.save(model_states(4), tmp_path / MODEL)
    refuse_mixture(open_pickled(str(tmp_path / MODEL)))


def test_a_legacy_file_of_several_ranks_is_refused(tmp_path: Path) -> None:
    torch.save(model_states(4, stage=1), tmp_path / MODEL, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="several ranks may have written this legacy"):
        refuse_mixture(open_pickled(str(tmp_path / MODEL)))


def written_over(path: Path, old: Any, new: Any) -> None:
    """Save as ``FastFileWriter`` does: whole blocks from the start, without truncation, and the rest appended."""
    torch.save(new, path)
    data = path.read_bytes()
    torch.save(old, path)
    blocks = len(data) // _BLOCK * _BLOCK
    with path.open("r+b") as stream:
        stream.write(data[:blocks])
        stream.seek(0, 2)
        stream.write(data[blocks:])


@pytest.mark.parametrize("new", [model_states(4, shift=1.0), {"global_steps": 4, "small": torch.ones(3)}])
def test_a_file_written_over_an_older_one_is_refused(new: Any, tmp_path: Path) -> None:
    path = tmp_path / MODEL
    written_over(path, model_states(3), new)
    with pytest.raises(DamagedError, match="this file may have been written over an older one"):
        open_file(str(path), trust_pickle=False)


@pytest.mark.parametrize("zipped", [True, False])
def test_other_files_have_nothing_inside_them(zipped: bool, tmp_path: Path) -> None:
    torch.save(model_states(4), tmp_path / MODEL, _use_new_zipfile_serialization=zipped)
    open_file(str(tmp_path / MODEL), trust_pickle=False)
    (tmp_path / "short").write_bytes(b"PK")
    (tmp_path / "truncated").write_bytes((tmp_path / MODEL).read_bytes()[:-100])
    for name in ("short", "truncated"):
        with pytest.raises(DamagedError, match="truncated or unreadable"):
            open_file(str(tmp_path / name), trust_pickle=False)

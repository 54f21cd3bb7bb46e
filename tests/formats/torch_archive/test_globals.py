"""What a pickle may name: enums as every Python writes them, and no more of getattr than that."""

from __future__ import annotations

import os
import shutil
import sys
from enum import IntEnum
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from elastic_ckpt.errors import UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled


class AsPython3112Writes:
    """An object whose pickle is ``getattr(owner, name)``, as an enum member's is in Python 3.11.0 to 3.11.3."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.owner, self.name)


def test_an_enum_member_pickled_by_name_is_read(tmp_path: Path) -> None:
    torch.save({"zero_stage": AsPython3112Writes(ZeroStageEnum, "gradients")}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    assert int(file.section("zero_stage")) == 2
    assert materialise(file, file.section("zero_stage")) is ZeroStageEnum.gradients


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.Size, "numel"), (ZeroStageEnum, "__class__"), ("text", "upper"), (PosixPath, "cwd"), (Path(), "touch")],
)
def test_getattr_of_anything_else_is_refused(owner: Any, name: str, tmp_path: Path) -> None:
    torch.save({"x": AsPython3112Writes(owner, name)}, tmp_path / "file.pt")
    with pytest.raises(Exception, match=r"safe globals|unreadable") as caught:
        open_pickled(str(tmp_path / "file.pt"))
    assert type(caught.value).__name__ in ("UnsafePickleError", "DamagedError")


class Made:
    """An object that a pickle makes by calling something."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.made = call, arguments

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # until Python 3.12, and of 3.13
@pytest.mark.parametrize("kind", [PosixPath, PurePosixPath])
def test_paths_are_read(kind: type, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kind("/checkpoints", "step=3.ckpt")
    monkeypatch.setitem(sys.modules, "pathlib._local", sys.modules["pathlib"])
    monkeypatch.setattr(kind, "__module__", module)
    torch.save({"callback": {"last": path}}, tmp_path / "file.pt")
    monkeypatch.undo()
    assert module.encode() in (tmp_path / "file.pt").read_bytes()
    read = open_pickled(str(tmp_path / "file.pt")).section("callback")["last"]
    assert type(read) is kind and read == path


@pytest.mark.parametrize("call", [os.mkdir, getattr(Path, "mkdir"), shutil.rmtree])  # noqa: B009 - of the class
def test_nothing_is_done_with_a_path(call: Any, tmp_path: Path) -> None:
    target = tmp_path / "there"
    torch.save({"x": Made(call, target)}, tmp_path / "file.pt")
    with pytest.raises(UnsafePickleError):
        open_pickled(str(tmp_path / "file.pt"))
    assert not target.exists() and tmp_path.exists()


def test_a_dtype_is_no_danger_where_its_tensors_cannot_be_read(tmp_path: Path) -> None:
    torch.save({"x": torch.uint4}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    assert materialise(file, file.section("x")) is torch.uint4
    if hasattr(torch, "float4_e2m1fn_x2"):  # of torch 2.8
        torch.save({"x": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "file.pt")
        with pytest.raises(UnsupportedError, match=r"a tensor of torch\.float4_e2m1fn_x2"):
            open_pickled(str(tmp_path / "file.pt"))


class Private(IntEnum):
    ONE = 1


def test_an_enum_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    torch.save({"x": AsPython3112Writes(Private, "ONE")}, tmp_path / "file.pt")
    with pytest.raises(UnsafePickleError, match="Private"):
        open_pickled(str(tmp_path / "file.pt"))


def test_ours_count_whatever_else_the_process_allows(tmp_path: Path) -> None:
    """Megatron Core registers numpy's own functions, which cannot be mixed with stand-ins for the others."""
    path = tmp_path / "file.pt"
    values = np.arange(5, dtype=np.int64)
    torch.save({"x": values, "y": Private.ONE}, path)
    theirs = [np.dtype, np.ndarray, np._core.multiarray._reconstruct, Private]
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(theirs)
    try:
        for _ in range(3):
            read = open_pickled(str(path))
            assert (materialise(read, read.section("x")) == values).all()
            assert materialise(read, read.section("y")) is Private.ONE
        assert set(map(id, theirs)) <= set(map(id, torch.serialization.get_safe_globals())), "theirs were taken away"
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)

"""What DeepSpeed's loader gets of a checkpoint's files: objects, whatever its checkpoint engine, and never a pickle."""

from __future__ import annotations

import io
import os
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.engines.compat import replaced_loads


class OfSomebody:
    """A checkpoint engine that nobody here knows."""

    def load(self, path: str, map_location: Any = None) -> Any:
        raise AssertionError(f"{path} is unpickled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
        torch.save({"in": name}, tmp_path / name / "file.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "run" / "file.pt")
    return tmp_path


def test_no_checkpoint_engine_opens_a_file(folder: Path) -> None:
    engine = SimpleNamespace(checkpoint_engine=OfSomebody())
    path = folder / "run" / "file.pt"
    with replaced_loads(engine, str(folder / "run"), lambda path: ["read", path]):
        assert engine.checkpoint_engine.load(path, map_location="cpu") == ["read", str(path)]
        assert engine.checkpoint_engine.load(str(folder / "elsewhere")) == ["read", str(folder / "elsewhere")]
    with pytest.raises(AssertionError, match="is unpickled"):
        engine.checkpoint_engine.load(str(path))


def test_torch_load_is_replaced_for_files_of_the_checkpoint_alone(folder: Path) -> None:
    engine, before, seen = SimpleNamespace(checkpoint_engine=OfSomebody()), torch.load, []
    path, other = folder / "run" / "file.pt", folder / "elsewhere" / "file.pt"
    with pytest.raises(ZeroDivisionError), replaced_loads(engine, str(folder / "run"), seen.append):
        assert torch.load(path, weights_only=False) is None
        assert torch.load(os.path.relpath(path)) is torch.load(folder / "link.pt") is None
        assert torch.load(other) == {"in": "elsewhere"}
        assert torch.load(io.BytesIO(other.read_bytes())) == {"in": "elsewhere"}
        thread = Thread(target=lambda: seen.append(torch.load(path)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert seen == [str(path), os.path.relpath(path), str(folder / "link.pt"), {"in": "run"}]
    assert torch.load is before and not vars(engine.checkpoint_engine)

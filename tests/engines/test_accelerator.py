"""The accelerator that DeepSpeed chooses: the real one, and others by a DeepSpeed that only says its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ckpt.engines import accelerator
from elastic_ckpt.engines.accelerator import Accelerator, find_accelerator

CHOSEN = """
print("a log line")

class Chosen:
    def device_name(self):
        return "cuda"

    def device_count(self):
        return 3

def get_accelerator():
    return Chosen()
"""
DEVICES = "class cuda:\n    get_device_name = ['H200', 'H200', 'H100'].__getitem__\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a DeepSpeed, and of a torch, that are found first."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "torch.py").write_text(DEVICES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "deepspeed"


def test_deepspeed_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert find_accelerator() == Accelerator("cpu") and str(find_accelerator()) == "cpu"


def test_devices_are_counted_by_name(fake: Path) -> None:
    (fake / "accelerator.py").write_text(CHOSEN)
    assert str(find_accelerator()) == "cuda, 2 x H200, 1 x H100"


def test_devices_may_have_no_names(fake: Path) -> None:
    (fake / "accelerator.py").write_text(CHOSEN)
    (fake.parent / "torch.py").write_text("")
    assert str(find_accelerator()) == "cuda, 3 x device"


def test_a_deepspeed_that_fails_is_broken(fake: Path) -> None:
    (fake / "accelerator.py").write_text("raise ImportError('libcudart.so\x1b[31m is missing')")
    found = find_accelerator()
    assert found.is_broken and str(found) == (
        r"not known: DeepSpeed fails with ImportError: libcudart.so\x1b[31m is missing"
    )
    (fake / "accelerator.py").write_text("import os; os._exit(9)")
    assert str(find_accelerator()) == "not known: DeepSpeed fails with exit status 9"


def test_a_deepspeed_that_hangs_is_not_waited_for(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake / "accelerator.py").write_text("import signal; signal.pause()")
    monkeypatch.setattr(accelerator, "_TIMEOUT", 0)
    found = find_accelerator()
    assert not found.is_broken and "not imported within 0 s" in str(found)

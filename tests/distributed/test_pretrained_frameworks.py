"""Frameworks start from pretrained weights under ZeRO-3 by elastic_ckpt, and train as they do without it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.distributed.conftest import Launch
from tests.distributed.pretrained_folders import write


def test_frameworks_train_as_without(launch: Launch, tmp_path: Path) -> None:
    folder, frameworks = tmp_path / "llama", ["trainer", "accelerate", "peft", "adapter"]
    frameworks += ["trl"] if find_spec("trl") else []
    write("llama", folder)
    arguments = {"folder": str(folder), "scratch": str(tmp_path), "frameworks": frameworks}
    found = launch(2, "pretrained_framework_jobs.train", arguments)
    assert [each.framework for each in found] == frameworks * 2
    for each in found:
        assert each.loads == [str(folder)], (each.framework, each.said)
        assert not each.differences, each.framework

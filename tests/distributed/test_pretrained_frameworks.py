"""Frameworks start from pretrained weights under ZeRO-3 by elastic_ckpt, and train as they do without it."""

from __future__ import annotations

from importlib.util import find_spec

from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.pretrained_jobs import Hooked

LLAMA = Save("llama", 1, "pretrained_folders.save")
FRAMEWORKS = ["trainer", "accelerate", "peft", "adapter", *(["trl"] if find_spec("trl") else [])]


@cells([Cell(name, LLAMA, "pretrained_framework_jobs.train", 2, {"framework": name}) for name in FRAMEWORKS])
def test_frameworks_train_as_without(cell: Cell, facts: list[Hooked], saves: Saves) -> None:
    for each in facts:
        assert each.loads == [str(saves.folder(LLAMA))], each.said
        assert each.differences == {}
    assert len(facts) == cell.ranks

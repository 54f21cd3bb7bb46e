"""QLoRA by Hugging Face's Trainer: adapters over a quantized base go on with the same losses on as many ranks or more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import Launch

for _package in ("bitsandbytes", "peft", "accelerate"):
    pytest.importorskip(_package)

#: By which losses may differ, whose sum over ranks is another order of additions.
ROUNDING = 1e-5


@pytest.mark.parametrize("stage", [1, 2])
def test_adapters_go_on_as_the_saved_run_did(stage: int, tmp_path: Path, launch: Launch) -> None:
    base = str(tmp_path / "base")
    folder = str(tmp_path / "run")
    launch(2, "qlora_jobs.train", {"stage": stage, "folder": folder, "base": base})
    for ranks in (2, 3):
        case = {"stage": stage, "source": folder, "scratch": str(tmp_path / f"on{ranks}"), "base": base}
        loads = launch(ranks, "qlora_jobs.train", case)
        assert len(loads) == ranks
        for load in loads:
            assert load.format == "native" and load.differences == {}, (load.where, load.differences)
            assert load.loss_gap <= ROUNDING, (load.where, load.loss_gap)

"""``fabric.load`` of Lightning Fabric's DeepSpeedStrategy, whose loop steps the optimizer and not the engine."""

from __future__ import annotations

import pytest

from tests.integration.comparing import assert_restored, assert_trains_on
from tests.integration.conftest import Run

SCRIPT = "fabric_loop.py"


@pytest.mark.parametrize(("stage", "ranks"), [("2", 2), ("2", 3), ("3", 2), ("3", 3)])
def test_load_resumes_exactly(stage: str, ranks: int, saved: Run, run: Run) -> None:
    before = saved(SCRIPT, "--stage", stage)
    folder = before.output / "step=3.ckpt"
    resumed = run(ranks, SCRIPT, "--stage", stage, "--resume_from", str(folder), elastic=True)
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    assert resumed.log.count("elastic_ckpt: checkpoint restored") == 1
    assert_trains_on(before, resumed)

"""``accelerator.load_state`` on another number of ranks, with two lines in the script."""

from __future__ import annotations

import pytest

from tests.integration.comparing import REFUSAL, assert_reported_once, assert_restored, assert_trains_on, rounding
from tests.integration.conftest import Run

SCRIPT = "accelerate_loop.py"


@pytest.mark.parametrize(("stage", "ranks"), [("2", 2), ("2", 3), ("3", 1), ("3", 2), ("3", 3)])
def test_load_state_restores_exactly(stage: str, ranks: int, saved: Run, run: Run) -> None:
    before = saved(SCRIPT, "--stage", stage)
    folder = before.output / "step_3"
    assert (folder / "latest").read_text() == "pytorch_model"
    resumed = run(ranks, SCRIPT, "--stage", stage, "--resume_from", str(folder), "--elastic")
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    assert_reported_once(resumed, 2, ranks)
    assert_trains_on(before, resumed, rel=rounding(ranks))


def test_without_elastic_ckpt_load_state_fails(saved: Run, run: Run) -> None:
    before = saved(SCRIPT, "--stage", "2")
    with pytest.raises(AssertionError, match=REFUSAL):
        run(3, SCRIPT, "--stage", "2", "--resume_from", str(before.output / "step_3"))

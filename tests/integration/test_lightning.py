"""``Trainer.fit(ckpt_path=...)`` of PyTorch Lightning's DeepSpeedStrategy on another number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.integration.comparing import (
    REFUSAL,
    assert_reported_once,
    assert_restored,
    assert_same_tensors,
    assert_trains_on,
    rounding,
)
from tests.integration.conftest import Run

SCRIPT = "lightning_fit.py"


@pytest.mark.parametrize(("saved_stage", "stage", "ranks"), [("2", "2", 1), ("3", "3", 3), ("3", "2", 4)])
def test_fit_resumes_exactly(saved_stage: str, stage: str, ranks: int, saved: Run, run: Run) -> None:
    before = saved(SCRIPT, "--stage", saved_stage)
    folder = before.output / "step=3.ckpt"
    resumed = run(ranks, SCRIPT, "--stage", stage, "--ckpt_path", str(folder), elastic=True)
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    assert_reported_once(resumed, 2, ranks)
    assert_trains_on(before, resumed, rel=rounding(ranks))


@pytest.mark.parametrize(
    ("what", "stage", "precision", "ranks"), [("validate", "3", "32-true", 3), ("test", "2", "bf16-true", 1)]
)
def test_evaluation_takes_the_weights_without_an_optimizer(
    what: str, stage: str, precision: str, ranks: int, saved: Run, run: Run
) -> None:
    before = saved(SCRIPT, "--stage", "3")
    arguments = ("--stage", stage, "--precision", precision, "--evaluate", what)
    evaluated = run(ranks, SCRIPT, *arguments, "--ckpt_path", str(before.output / "step=3.ckpt"), elastic=True)
    held = evaluated.holds("loaded")
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    masters = before.holds("saved-3")["masters"]
    assert_same_tensors({name: master.to(dtype) for name, master in masters.items()}, held["weights"])
    assert_reported_once(evaluated, 2, ranks)


def test_without_elastic_ckpt_fit_fails(saved: Run, run: Run) -> None:
    before = saved(SCRIPT, "--stage", "3")
    with pytest.raises(AssertionError, match=REFUSAL):
        run(3, SCRIPT, "--stage", "3", "--ckpt_path", str(before.output / "step=3.ckpt"))

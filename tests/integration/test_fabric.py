"""``fabric.load`` of Lightning Fabric's DeepSpeedStrategy, whose loop steps the optimizer and not the engine."""

from __future__ import annotations

import pytest
import torch

from elastic_ckpt import find_latest
from tests.integration.comparing import assert_restored, assert_trains_on, rounding
from tests.integration.conftest import Run

SCRIPT = "fabric_loop.py"


Z2, Z3, LORA = ("--stage", "2"), ("--stage", "3"), "--lora"


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [(Z2, 2), (Z2, 3), (Z3, 2), (Z3, 3), ((*Z2, LORA), 3), ((*Z3, LORA), 2)],
    ids=lambda value: " ".join(value).replace("--", "") if isinstance(value, tuple) else f"{value} ranks",
)
def test_load_resumes_exactly(arguments: tuple[str, ...], ranks: int, saved: Run, run: Run) -> None:
    before = saved(SCRIPT, *arguments)
    folder = before.output / "step=3.ckpt"
    resumed = run(ranks, SCRIPT, *arguments, "--resume_from", str(folder), elastic=True)
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    report = resumed.holds("loaded")["report"]
    assert "step 3, counters at 0" in report and "samples consumed" not in report
    assert "global batch" not in resumed.log
    assert ("saved without frozen parameters" in " ".join(report.replace("│", "").split())) == (LORA in arguments)
    assert resumed.log.count("elastic_ckpt: checkpoint restored") == 1
    assert_trains_on(before, resumed, rel=rounding(ranks))


def test_saves_under_elastic_ckpt_are_no_mixture_and_the_newest_is_found(saved: Run, run: Run) -> None:
    first = saved(SCRIPT, *Z3)
    resumed = run(3, SCRIPT, *Z3, "--resume_from", str(first.output / "step=3.ckpt"), elastic=True)
    assert find_latest(str(resumed.output)) == str(resumed.output / "step=6.ckpt")
    last = run(2, SCRIPT, *Z3, "--resume_from", str(resumed.output / "step=6.ckpt"), elastic=True)
    assert_restored(resumed.holds("saved-6"), last.holds("loaded"), step=6)
    assert "older save" not in last.log


def test_a_remedy_is_in_the_words_of_fabric_and_works(saved: Run, run: Run) -> None:
    folder = str(saved(SCRIPT, *Z2).output / "step=3.ckpt")
    arguments = (*Z2, "--layers", "3", "--resume_from", folder)
    with pytest.raises(AssertionError, match=r"load_module_strict=False is fabric\.load\(path, state, strict=False\)"):
        run(3, SCRIPT, *arguments, elastic=True)
    resumed = run(3, SCRIPT, *arguments, "--not_strict", elastic=True)
    before, after = (job.holds(moment) for job, moment in ((saved(SCRIPT, *Z2), "saved-3"), (resumed, "loaded")))
    assert all(torch.equal(after["masters"][name], master) for name, master in before["masters"].items())

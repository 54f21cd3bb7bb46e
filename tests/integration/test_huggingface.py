"""Trainer, with and without PEFT and 8-bit Adam, resumes on another number of ranks; nothing in the script changes."""

from __future__ import annotations

import pytest

from tests.integration.comparing import (
    REFUSAL,
    assert_reported_once,
    assert_restored,
    assert_same_tensors,
    assert_trains_on,
    rounding,
)
from tests.integration.conftest import Run

SCRIPT = "trainer.py"
Z2, Z3 = ("--stage", "2"), ("--stage", "3")
OF_DEEPSPEED = "--deepspeed_scheduler"
LORA = "--lora"
EIGHT_BIT = ("--optim", "adamw_bnb_8bit")
ADAFACTOR = ("--optim", "adafactor")
TO_RESUME = "--resume_from_checkpoint"


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (Z2, 3),
        (Z2, 1),
        ((*Z3, OF_DEEPSPEED), 4),
        ((*Z3, OF_DEEPSPEED), 1),
        *(((*stage, LORA), ranks) for stage in (Z2, Z3) for ranks in (2, 3)),
        ((*Z2, LORA), 1),
        # 92160 elements with weight decay: 180 whole blocks of 256 on each of 2 ranks, 120 on each of 3
        ((*Z2, *EIGHT_BIT), 3),
        ((*Z2, *ADAFACTOR), 2),  # whose RMS differs between ranks; on others, it clips updates by other norms
    ],
    ids=lambda value: " ".join(value).replace("--", "") if isinstance(value, tuple) else f"{value} ranks",
)
def test_trainer_resumes_exactly_on(arguments: tuple[str, ...], ranks: int, saved: Run, run: Run) -> None:
    before = saved(SCRIPT, *arguments)
    resumed = run(ranks, SCRIPT, *arguments, TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    held = before.holds("saved-3")
    assert held["eight_bit"] == (EIGHT_BIT[1] in arguments)
    if LORA in arguments:
        names = {name for name in held["weights"] if "lora" not in name}
        assert names and not names & held["masters"].keys(), "the base is frozen"
    assert_restored(held, resumed.holds("loaded"))
    assert_reported_once(resumed, 2, ranks)
    assert_trains_on(before, resumed, rel=rounding(ranks))


#: Norms and biases, which the Trainer puts into a param group of their own; DeepSpeed drops one that is empty.
SMALL = r"ln_|\.bias$|norm"
#: What each run trains, and the number of param groups that it has.
OTHER_GROUPS = {
    "freeze, then unfreeze": (("--frozen", SMALL), 1, (), 2),
    "LoRA, then the norms too": ((LORA,), 1, (LORA, "--trained", "norm"), 2),
    "all, then without norms and biases": ((), 2, ("--frozen", SMALL), 1),
}


@pytest.mark.parametrize("case", OTHER_GROUPS)
def test_the_schedule_of_the_trainer_goes_on_in_other_param_groups(case: str, saved: Run, run: Run) -> None:
    was, before_groups, now, groups = OTHER_GROUPS[case]
    before = saved(SCRIPT, *Z2, *was)
    resumed = run(3, SCRIPT, *Z2, *now, TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    assert len(before.holds("saved-3")["groups"]) == before_groups
    schedule = {str(step): 1e-2 * (6 - step) / 4 for step in (3, 4, 5)}  # linear, after two steps of warm-up
    assert resumed.result["rates"] == {step: [pytest.approx(rate)] * groups for step, rate in schedule.items()}
    held, loaded = before.holds("saved-3"), resumed.holds("loaded")
    common = held["masters"].keys() & loaded["masters"].keys()
    assert common and len(common) == min(len(held["masters"]), len(loaded["masters"]))
    assert_same_tensors(*({name: each["masters"][name] for name in common} for each in (held, loaded)))
    assert len(loaded["scheduler"]["base_lrs"]) == groups


def test_eight_bit_states_of_cut_blocks_move_by_one_quantization_at_most(saved: Run, run: Run) -> None:
    arguments = (*Z3, *EIGHT_BIT)
    before = saved(SCRIPT, *arguments)
    resumed = run(3, SCRIPT, *arguments, TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    held, loaded = before.holds("saved-3"), resumed.holds("loaded")
    assert held["eight_bit"]
    assert_restored(held, loaded, exact_states=False)
    assert "requantized, values changed by at most 0.703 %" in " ".join(loaded["report"].replace("│", "").split())
    assert_reported_once(resumed, 2, 3)
    assert_trains_on(before, resumed, rel=1e-4)


def test_eight_bit_states_of_aligned_partitions_are_exact(run: Run) -> None:
    arguments = (*Z3, *EIGHT_BIT, "--align_partitions")
    before = run(2, SCRIPT, *arguments, elastic=True)
    resumed = run(3, SCRIPT, *arguments, TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    assert before.holds("saved-3")["eight_bit"]
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    assert_trains_on(before, resumed)


def test_the_best_model_may_be_one_that_other_ranks_saved(run: Run) -> None:
    """Its step count is no multiple of the micro-batches of a step, which Accelerate does not count."""
    arguments = (*Z2, "--load_best_model_at_end", "--gradient_accumulation_steps", "2")
    before = run(2, SCRIPT, *arguments)
    resumed = run(3, SCRIPT, *arguments, TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    assert resumed.result["best"] == str(before.output / "checkpoint-3")
    held, best = before.holds("saved-3"), resumed.holds("best")
    for kind in ("masters", "weights", "states"):
        assert_same_tensors(held[kind], best[kind])
    assert_reported_once(resumed, 2, 3, loads=2)


@pytest.mark.parametrize("arguments", [Z2, (*Z3, OF_DEEPSPEED)], ids=["ZeRO-2", "ZeRO-3"])
def test_without_elastic_ckpt_the_same_resume_fails(arguments: tuple[str, ...], saved: Run, run: Run) -> None:
    before = saved(SCRIPT, *arguments)
    with pytest.raises(AssertionError, match=REFUSAL):
        run(3, SCRIPT, *arguments, TO_RESUME, str(before.output / "checkpoint-3"))

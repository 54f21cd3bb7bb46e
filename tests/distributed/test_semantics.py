"""Arguments, modes and reports mean what they say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

Z1, Z3 = Save(Setup(1)), Save(Setup(3))
DIARY = Save(Setup(1, optimizer="diary"))
Z3_FLAT = Setup(3, zero=SUB_GROUPS)
#: What a load is told, and what differs from DeepSpeed's own loader after it.
ARGUMENTS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"load_optimizer_states": False}, set()),
    ({"load_module_only": True}, set()),
    # but for the lr, with which the live schedule begins anew
    ({"load_lr_scheduler_states": False}, {"groups", "losses"}),
    ({"tag": "step4", "load_module_strict": False}, set()),
]


def by_both(setup: Setup, arguments: dict[str, Any], differing: set[str]) -> Cell:
    """Loads at the saved topology, by DeepSpeed's own loader and by ours."""
    # DeepSpeed's own ZeRO-3 load wants a pristine engine (docstring of load_checkpoint).
    case = {"arguments": arguments, "trained": setup.stage < 3}
    if setup.stage == 3 and arguments == {"load_module_only": True}:
        # Alone, it leaves DeepSpeed 0.19.8's ZeRO-3 weights as they were, without a word.
        case["deepspeed_arguments"] = {"load_module_only": True, "load_optimizer_states": False}
    return crossing(Save(setup), setup, 2, "same_as_deepspeed", differing, str(arguments), **case)


@cells(
    [
        by_both(setup, arguments, differing)
        for setup in (Setup(1), Setup(2, "bf16"), Setup(3, "bf16"))
        for arguments, differing in ARGUMENTS
    ]
)
def test_every_argument_does_what_deepspeeds_own_loader_does(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.format == "native" and load.differences.keys() == cell.expected, (load.where, load.differences)


@cells(
    [
        crossing(Save(Setup(stage, "bf16"), converted=True), Setup(4 - stage, "bf16"), 3, "weights_only")
        for stage in (1, 3)
    ]
)
def test_without_states_masters_of_universal_checkpoints_are_not_rounded(cell: Cell, facts: list[Loaded]) -> None:
    """As DeepSpeed's own loader does; those of native ones it rounds through the weights."""
    Resumes("universal").check(facts)


@cells([crossing(DIARY, DIARY.setup, 2, "refusal_jobs.left_on_by_mistake")])
def test_a_load_that_only_deepspeed_can_do_is_left_to_it_even_with_load_universal(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.report is None and found.report_of_custom is None
        assert found.path.endswith("model_states.pt") and found.client_state["note"] == "hello"
        assert found.still_universal is True
        assert found.differences == [{}, {}]
        assert "hidden.weight" in found.given_to_custom_load_fn[0]
        assert found.nothing == [(None, None), (None, None)]


def in_mode(mode: str) -> Setup:
    return Setup(1, config=(("elastic_checkpoint", {"mode": mode}),))


def emptied(copy: Path) -> None:
    shutil.rmtree(copy)
    copy.mkdir()


#: What was saved, what happens to a copy of it, the live engine and how it is asked, and the error.
REFUSED: dict[str, tuple[Save, Any, dict[str, Any], Refuses]] = {
    "an optimizer that only DeepSpeed knows": (Z1, None, {"setup": DIARY.setup}, Refuses("MismatchError", ("Wanderer",))),
    "required of an empty folder": (Z1, emptied, {"setup": in_mode("require")}, Refuses("NotFoundError")),
    "required with custom_load_fn": (Z1, None, {"setup": in_mode("require"), "custom_load_fn": True}, Refuses("UnsupportedError")),
}  # fmt: skip


@cells(
    [
        Cell(name, save, "refusal_jobs.refuse", 2, case, change, expected=expected, fits=(Z1, {"setup": Z1.setup}))
        for name, (save, change, case, expected) in REFUSED.items()
    ]
)
def test_what_is_ours_to_load_or_required_of_us_is_not_left_to_deepspeed(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(
    [
        crossing(Z1, in_mode("require"), 2, expected=Resumes(loss_gap=1e-5), note="require"),
        crossing(Z1, in_mode("off"), 2, expected=Resumes("left to DeepSpeed", loss_gap=1e-5), note="off"),
    ]
)
def test_the_mode_says_who_loads(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


NEVER_STEPPED = [Save(setup, more={"steps": 0}) for setup in (Setup(1), Setup(3))]


@cells(
    [
        crossing(save, target, 3, "never_stepped")
        for save, target in (
            (NEVER_STEPPED[0], Setup(3)),
            (NEVER_STEPPED[1], Setup(2)),
            (NEVER_STEPPED[1], Setup(3)),
        )
    ]
)
def test_a_checkpoint_from_before_the_first_step_starts_fresh(cell: Cell, facts: list[Loaded]) -> None:
    """States that the engine has by now are cleared, and it trains as a new run does."""
    Resumes().check(facts)
    for load in facts:
        assert any("before the first step" in outcome.reason for outcome in load.report.outcomes)


@cells([crossing(save, target, 3, "not_strict") for save, target in ((Z1, Setup(3)), (Z3, Setup(1)), (Z3, Z3_FLAT))])
def test_not_strict_restores_what_matches_and_names_the_rest(cell: Cell, facts: list[Any]) -> None:
    for load in facts:
        assert load.fresh == ("new_buffer", "newcomer")
        assert load.ignored == ("never_used",)
        assert load.differences == {}, load.where


HEAD_FIRST = {"model": "HeadFirstLM", "names": {"embedding.weight": "head.weight"}, "continue": True}


@cells([crossing(save, target, 3, "changed", **HEAD_FIRST) for save, target in ((Z1, Setup(3)), (Z3, Setup(2)))])
def test_a_tied_pair_registered_in_another_order_is_the_same_parameter(cell: Cell, facts: list[Loaded]) -> None:
    Resumes(loss_gap=1e-5).check(facts)
    for load in facts:
        assert any("head.weight" in note for note in load.report.notes)


ACCUMULATE = (("gradient_accumulation_steps", 2), ("train_micro_batch_size_per_gpu", 3))


@cells(
    [
        crossing(Z1, target, 2, "refusal_jobs.pending", note=note)
        for target, note in (
            (Setup(1, config=ACCUMULATE), "accumulating"),
            (Setup(3, config=ACCUMULATE), "accumulating"),
            (Setup(3), "behind a backward pass"),
        )
    ]
)
def test_gradients_that_wait_for_a_step_are_refused(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert "MismatchError" in found.refused.kinds and len(found.refused.texts) == 1
        assert found.differences == {}, "loaded after the step"


@cells(
    [
        crossing(Save(source), target, 3, "save_again")
        for source, target in (
            (Setup(1), Setup(3)),
            (Setup(3, "bf16"), Setup(2, "bf16")),
            (Setup(2, "bf16"), Setup(3, "bf16")),
        )
    ]
)
def test_saving_after_an_elastic_load_gives_what_deepspeed_loads_alone(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {}, load.where


@cells([crossing(Z3, Setup(stage), 2) for stage in (3, 1)])
def test_at_the_same_degree_each_rank_finds_its_own_client_state(cell: Cell, facts: list[Loaded]) -> None:
    """ZeRO-3 saves a file for each rank: random states of all ranks come back, into another stage too."""
    Resumes(loss_gap=1e-5).check(facts)
    assert [load.client_state["rng"] for load in facts] == [[0, 2, 3], [1, 2, 3]]


BIG = [Save(setup, more={"model": "BigLM", "truth": False}) for setup in (Setup(1), Setup(3))]


@cells([crossing(save, target, 3, "frugal") for save in BIG for target in (Setup(1), Setup(3))])
def test_each_file_is_opened_once_and_each_rank_reads_what_it_owns(cell: Cell, facts: list[Any]) -> None:
    for load in facts:
        assert load.ranks == 3 and load.is_own
        assert load.opened == load.files, load.where
        assert load.read == pytest.approx(load.owned, rel=1e-3), load.where
        assert load.asked <= 1.02 * load.owned + 400_000 + 300_000 * load.files, load.where
        assert load.as_json["global_steps"] == 4 and "restored" in load.text
        report = load.written
        assert [work["rank"] for work in report["ranks"]] == [0, 1, 2]
        assert all(work["read"]["nbytes"] > 0 and "read" in work["seconds"] for work in report["ranks"])
        restored = {item["role"]: len(item["names"]) for item in report["outcomes"] if item["what"] == "restored"}
        assert restored.items() >= {"fp32": 9, "exp_avg": 9, "exp_avg_sq": 9, "buffer": 2, "param groups": 2}.items()

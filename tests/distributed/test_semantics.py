"""Arguments, modes and reports mean what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import SUB_GROUPS, Launch
from tests.distributed.model import Setup

ARGUMENTS = [
    {},
    {"load_optimizer_states": False},
    {"load_module_only": True},
    {"load_lr_scheduler_states": False},  # but for the lr, with which the live schedule begins anew
    {"tag": "step4", "load_module_strict": False},
]


def crossings(native: Path, *pairs: tuple[Setup, Setup]) -> list[dict[str, Any]]:
    """Cases of sources, saved on two ranks, and targets."""
    return [{"setup": target, "folder": str(native / f"{source.name}-dp2")} for source, target in pairs]


@pytest.mark.parametrize(
    "setup", [Setup(1), Setup(2, precision="bf16"), Setup(3, precision="bf16")], ids=lambda setup: setup.name
)
def test_every_argument_does_what_deepspeeds_own_loader_does(setup: Setup, launch: Launch, native: Path) -> None:
    folder = str(native / f"{setup.name}-dp2")
    # DeepSpeed's own ZeRO-3 load wants a pristine engine (docstring of load_checkpoint).
    cases: list[dict[str, Any]] = [
        {"setup": setup, "folder": folder, "arguments": arguments, "trained": setup.stage < 3}
        for arguments in ARGUMENTS
    ]
    if setup.stage == 3:
        # Alone, load_module_only leaves DeepSpeed 0.19.8's ZeRO-3 weights as they were, without a word.
        only_module = next(case for case in cases if case["arguments"] == {"load_module_only": True})
        only_module["deepspeed_arguments"] = {"load_module_only": True, "load_optimizer_states": False}
    for load in launch(2, "same_as_deepspeed", cases):
        is_anew = "load_lr_scheduler_states" in load.case["arguments"]
        assert load.format == "native" and load.differences.keys() == ({"groups", "losses"} if is_anew else set()), (
            load.where
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_without_states_masters_of_universal_checkpoints_are_not_rounded(
    stage: int, launch: Launch, universal: Path
) -> None:
    """As DeepSpeed's own loader does; those of native ones it rounds through the weights."""
    source = Setup(stage, precision="bf16")
    case = {"setup": Setup(4 - stage, precision="bf16"), "folder": str(universal / f"{source.name}-dp2")}
    for load in launch(3, "weights_only", [case]):
        assert load.format == "universal" and load.differences == {}, load.where


def test_a_load_that_only_deepspeed_can_do_is_left_to_it_even_with_load_universal(
    launch: Launch, native: Path, tmp_path: Path
) -> None:
    diary = Setup(1, optimizer="diary")
    launch(2, "save", {"folder": str(tmp_path), "setups": [diary]})
    (tmp_path / "empty").mkdir()
    arguments = {
        "setup": diary,
        "folder": str(tmp_path / f"{diary.name}-dp2"),
        "nothing": [str(tmp_path / "empty"), str(tmp_path / "nowhere")],
        "other": str(native / f"{Setup(1).name}-dp2"),
    }
    for found in launch(2, "refusal_jobs.left_on_by_mistake", arguments):
        assert found.report is None and found.report_of_custom is None
        assert found.path.endswith("model_states.pt") and found.client_state["note"] == "hello"
        assert found.still_universal is True
        assert found.differences == [{}, {}]
        assert "hidden.weight" in found.given_to_custom_load_fn[0]
        assert found.nothing == [(None, None), (None, None)]
        (text,) = found.refused.texts
        assert "MismatchError" in found.refused.kinds and "Wanderer" in text


def test_the_mode_says_who_loads(launch: Launch, native: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    modes = {mode: Setup(1, config=(("elastic_checkpoint", {"mode": mode}),)) for mode in ("require", "off")}
    folders = {"folder": str(native / f"{Setup(1).name}-dp2"), "empty": str(tmp_path / "empty")}
    for found in launch(2, "refusal_jobs.modes", {**modes, **folders}):
        assert "NotFoundError" in found.empty.kinds and len(found.empty.texts) == 1
        assert "UnsupportedError" in found.custom.kinds and len(found.custom.texts) == 1
        assert found.required is not None
        assert found.off is None


def test_a_checkpoint_from_before_the_first_step_starts_fresh(launch: Launch, tmp_path: Path) -> None:
    """States that the engine has by now are cleared, and it trains as a new run does."""
    setups = [Setup(1), Setup(3)]
    launch(2, "save", {"folder": str(tmp_path), "setups": setups, "steps": 0})
    cases = crossings(tmp_path, (Setup(1), Setup(3)), (Setup(3), Setup(2)), (Setup(3), Setup(3)))
    for load in launch(3, "never_stepped", cases):
        assert load.differences == {} and load.loss_gap == 0, load.where
        assert any("before the first step" in outcome.reason for outcome in load.report.outcomes)


def test_not_strict_restores_what_matches_and_names_the_rest(launch: Launch, native: Path) -> None:
    cases = crossings(
        native, (Setup(1), Setup(3)), (Setup(3), Setup(1)), (Setup(3), Setup(3, zero=SUB_GROUPS))
    )  # fmt: skip
    for load in launch(3, "not_strict", cases):
        assert load.fresh == ("new_buffer", "newcomer")
        assert load.ignored == ("never_used",)
        assert load.differences == {}, load.where


def test_a_tied_pair_registered_in_another_order_is_the_same_parameter(launch: Launch, native: Path) -> None:
    more = {"model": "HeadFirstLM", "names": {"embedding.weight": "head.weight"}, "continue": True}
    cases = crossings(native, (Setup(1), Setup(3)), (Setup(3), Setup(2)))
    for load in launch(3, "changed", [{**case, **more} for case in cases]):
        assert load.differences == {} and load.loss_gap <= 1e-5, load.where
        assert any("head.weight" in note for note in load.report.notes)


def test_gradients_that_wait_for_a_step_are_refused(launch: Launch, native: Path) -> None:
    accumulate = (("gradient_accumulation_steps", 2), ("train_micro_batch_size_per_gpu", 3))
    setups = [Setup(1, config=accumulate), Setup(3, config=accumulate), Setup(3)]
    for found in launch(2, "refusal_jobs.pending", crossings(native, *((Setup(1), setup) for setup in setups))):
        assert "MismatchError" in found.refused.kinds and len(found.refused.texts) == 1
        assert found.differences == {}, "loaded after the step"


def test_saving_after_an_elastic_load_gives_what_deepspeed_loads_alone(
    launch: Launch, native: Path, tmp_path: Path
) -> None:
    bf16 = [Setup(stage, "bf16") for stage in range(4)]
    cases = crossings(native, (Setup(1), Setup(3)), (bf16[3], bf16[2]), (bf16[2], bf16[3]))
    for load in launch(3, "save_again", {"cases": cases, "folder": str(tmp_path)}):
        assert load.differences == {}, load.where


def test_at_the_same_degree_each_rank_finds_its_own_client_state(launch: Launch, native: Path) -> None:
    """ZeRO-3 saves a file for each rank: random states of all ranks come back, into another stage too."""
    source = {"folder": str(native / f"{Setup(3).name}-dp2"), "format": "native"}
    loads = launch(2, "load", {"targets": [{"setup": Setup(stage), "sources": [source]} for stage in (3, 1)]})
    assert [load.client_state["rng"] for load in loads] == [[0, 2, 3], [0, 2, 3], [1, 2, 3], [1, 2, 3]]


def test_each_file_is_opened_once_and_each_rank_reads_what_it_owns(launch: Launch, tmp_path: Path) -> None:
    setups = [Setup(1), Setup(3)]
    launch(2, "save", {"folder": str(tmp_path), "setups": setups, "model": "BigLM", "truth": False})
    cases = crossings(tmp_path, *((source, target) for source in setups for target in (Setup(1), Setup(3))))
    written = tmp_path / "report.json"
    section = {"report": str(written)}
    cases[-1]["setup"] = Setup(3, config=(("elastic_checkpoint", section),))
    for load in launch(3, "frugal", cases):
        assert load.ranks == 3 and load.is_own
        assert load.opened == load.files, load.where
        assert load.read == pytest.approx(load.owned, rel=1e-3), load.where
        assert load.asked <= 1.02 * load.owned + 400_000 + 300_000 * load.files, load.where
        assert load.as_json["global_steps"] == 4 and "restored" in load.text
    report = json.loads(written.read_text(encoding="utf-8"))
    assert [work["rank"] for work in report["ranks"]] == [0, 1, 2]
    assert all(work["read"]["nbytes"] > 0 and work["seconds"]["read"] > 0 for work in report["ranks"])
    restored = {item["role"]: len(item["names"]) for item in report["outcomes"] if item["what"] == "restored"}
    assert restored.items() >= {"fp32": 9, "exp_avg": 9, "exp_avg_sq": 9, "buffer": 2, "param groups": 2}.items()

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
    {"load_lr_scheduler_states": False},
    {"tag": "step4", "load_module_strict": False},
]


@pytest.mark.parametrize(
    "setup", [Setup(1), Setup(2, precision="bf16"), Setup(3, precision="bf16")], ids=lambda setup: setup.name
)
def test_every_argument_does_what_deepspeeds_own_loader_does(setup: Setup, launch: Launch, native: Path) -> None:
    folder = str(native / f"{setup.name}-dp2")
    # DeepSpeed's own ZeRO-3 load wants a pristine engine (docstring of load_checkpoint).
    cases: list[dict[str, Any]] = [
        {"setup": setup.as_json(), "folder": folder, "arguments": arguments, "trained": setup.stage < 3}
        for arguments in ARGUMENTS
    ]
    if setup.stage == 3:
        # Alone, load_module_only leaves DeepSpeed 0.19.8's ZeRO-3 weights as they were, without a word.
        only_module = next(case for case in cases if case["arguments"] == {"load_module_only": True})
        only_module["deepspeed_arguments"] = {"load_module_only": True, "load_optimizer_states": False}
    launch(2, "same_as_deepspeed", {"cases": cases})


def test_what_only_deepspeed_can_load_is_left_to_it(launch: Launch, native: Path, tmp_path: Path) -> None:
    diary, plain = Setup(1, optimizer="diary"), Setup(1)
    launch(2, "save", {"folder": str(tmp_path), "setups": [diary.as_json()]})
    (tmp_path / "empty").mkdir()
    modes = {mode: Setup(1, config=(("elastic_checkpoint", {"mode": mode}),)).as_json() for mode in ("require", "off")}
    launch(
        2,
        "refusal_jobs.delegate",
        {
            "plain": str(native / f"{plain.name}-dp2"),
            "diary": str(tmp_path / f"{diary.name}-dp2"),
            "empty": str(tmp_path / "empty"),
            "diary_setup": diary.as_json(),
            "require_setup": modes["require"],
            "off_setup": modes["off"],
        },
    )


def test_a_checkpoint_from_before_the_first_step_starts_fresh(launch: Launch, tmp_path: Path) -> None:
    setups = [Setup(1), Setup(3)]
    launch(2, "save", {"folder": str(tmp_path), "setups": [setup.as_json() for setup in setups], "steps": 0})
    cases = [
        {"setup": target.as_json(), "folder": str(tmp_path / f"{source.name}-dp2")}
        for source, target in [(setups[0], Setup(3)), (setups[1], Setup(2)), (setups[1], Setup(3))]
    ]
    launch(3, "never_stepped", {"cases": cases})


def test_not_strict_restores_what_matches_and_names_the_rest(launch: Launch, native: Path) -> None:
    cases = [
        {"setup": target.as_json(), "folder": str(native / f"{source.name}-dp2")}
        for source, target in [(Setup(1), Setup(3)), (Setup(3), Setup(1)), (Setup(3), Setup(3, zero=SUB_GROUPS))]
    ]
    launch(3, "not_strict", {"cases": cases})


def test_a_tied_pair_registered_in_another_order_is_the_same_parameter(launch: Launch, native: Path) -> None:
    cases = [
        {"setup": target.as_json(), "folder": str(native / f"{source.name}-dp2")}
        for source, target in [(Setup(1), Setup(3)), (Setup(3), Setup(2))]
    ]
    launch(3, "head_first", {"cases": cases})


def test_gradients_that_wait_for_a_step_are_refused(launch: Launch, native: Path) -> None:
    accumulate = (("gradient_accumulation_steps", 2), ("train_micro_batch_size_per_gpu", 3))
    setups = [Setup(1, config=accumulate), Setup(3, config=accumulate), Setup(3)]
    cases = [{"setup": setup.as_json(), "folder": str(native / "z1-fp32-adamw-dp2")} for setup in setups]
    launch(2, "refusal_jobs.pending", {"cases": cases})


def test_saving_after_an_elastic_load_gives_what_deepspeed_loads_alone(
    launch: Launch, native: Path, tmp_path: Path
) -> None:
    cases = [
        {"setup": target.as_json(), "folder": str(native / f"{source.name}-dp2")}
        for source, target in [
            (Setup(1), Setup(3)),
            (Setup(3, "bf16"), Setup(2, "bf16")),
            (Setup(2, "bf16"), Setup(3, "bf16")),
        ]
    ]
    launch(3, "save_again", {"cases": cases, "folder": str(tmp_path)})


def test_at_the_same_degree_each_rank_finds_its_own_client_state(launch: Launch, native: Path) -> None:
    """ZeRO-3 saves a file for each rank: random states of all ranks come back, into another stage too."""
    source = {"folder": str(native / f"{Setup(3).name}-dp2"), "format": "native"}
    launch(2, "load", {"targets": [{"setup": Setup(stage).as_json(), "sources": [source]} for stage in (3, 1)]})


def test_each_file_is_opened_once_and_each_rank_reads_what_it_owns(launch: Launch, tmp_path: Path) -> None:
    setups = [Setup(1), Setup(3)]
    as_json = [setup.as_json() for setup in setups]
    launch(2, "save_untruthful", {"folder": str(tmp_path), "setups": as_json, "model": "BigLM"})
    cases = [
        {"setup": target.as_json(), "folder": str(tmp_path / f"{source.name}-dp2")}
        for source in setups
        for target in (Setup(1), Setup(3))
    ]
    written = tmp_path / "report.json"
    cases[-1]["setup"]["config"] = (("elastic_checkpoint", {"report_path": str(written), "report": False}),)
    launch(3, "frugal", {"cases": cases})
    report = json.loads(written.read_text(encoding="utf-8"))
    assert [work["rank"] for work in report["ranks"]] == [0, 1, 2]
    assert all(work["nbytes_read"] > 0 and work["seconds"]["read"] > 0 for work in report["ranks"])
    restored = {item["role"]: len(item["names"]) for item in report["outcomes"] if item["what"] == "restored"}
    assert restored.items() >= {"fp32": 9, "exp_avg": 9, "exp_avg_sq": 9, "buffer": 2, "param groups": 2}.items()

"""Models and param groups that changed since the save: frozen parts, names, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Convert, Launch
from tests.distributed.model import Setup

BASE = [
    "back.weight",
    "embedding.weight",
    "gain",
    "hidden.bias",
    "hidden.weight",
    "never_used",
    "norm.bias",
    "norm.weight",
]
RENAME = [["^hidden\\.(.*)", "inner.\\1"], ["^norm\\.", "scale."], ["^trace$", "track"]]
NEW_NAMES = {
    "hidden.weight": "inner.weight",
    "hidden.bias": "inner.bias",
    "norm.weight": "scale.weight",
    "norm.bias": "scale.bias",
    "trace": "track",
}
PERSISTENT_NOTHING = ("stage3_param_persistence_threshold", 0)
DECAY = {"lr": 5e-3, "weight_decay": 0.1, "initial_lr": 1e-2, "betas": (0.9, 0.999)}
PLAIN = {"lr": 1.5e-3, "weight_decay": 0.0, "initial_lr": 3e-3, "betas": (0.8, 0.95)}


def with_options(setup: Setup, **options: Any) -> Setup:
    return Setup(
        setup.stage, setup.precision, setup.optimizer, setup.zero, setup.groups, (("elastic_checkpoint", options),)
    )


def case(folder: Path, source: Setup, target: Setup, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder / f"{source.name}-dp2"), "setup": target, **more}


@pytest.fixture(scope="module")
def frozen(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saves of models with frozen parts: half of it, a LoRA's base, and a LoRA without its base."""
    folders = {}
    for name, arguments in {
        "half": {"model": "HalfFrozenLM"},
        "lora": {"model": "LoraLM"},
        "bare": {"model": "LoraLM", "exclude_frozen": True},
    }.items():
        folders[name] = tmp_path_factory.mktemp(name)
        setups = [Setup(0), Setup(1), Setup(2, "bf16"), Setup(3), Setup(3, "bf16")]
        launch(2, "save", {"folder": str(folders[name]), "setups": setups, **arguments})
    return folders


@pytest.fixture(scope="module")
def frozen_universal(
    frozen: dict[str, Path], convert: Convert, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same as universal checkpoints, from ZeRO-1 and 3."""
    folders = {name: tmp_path_factory.mktemp(f"universal_{name}") for name in frozen}
    for name, folder in folders.items():
        convert(frozen[name], folder, [f"{Setup(1).name}-dp2", f"{Setup(3).name}-dp2"])
    return folders


def test_a_frozen_base_comes_back_under_what_trains(
    launch: Launch, frozen: dict[str, Path], frozen_universal: dict[str, Path]
) -> None:
    for degree, stages in ((1, (3,)), (3, (0, 2))):
        cases = [
            case(frozen[kind], source, target, model=model, **{"continue": True})
            for kind, model in (("half", "HalfFrozenLM"), ("lora", "LoraLM"))
            for source in (Setup(0), Setup(1), Setup(3))
            for target in map(Setup, stages)
        ]
        cases += [
            case(frozen_universal[kind], source, target, model=model, **{"continue": True})
            for kind, model in (("half", "HalfFrozenLM"), ("lora", "LoraLM"))
            for source, target in ((Setup(1), Setup(3)), (Setup(3), Setup(2)), (Setup(3), Setup(0)))
        ]
        cases.append(case(frozen["lora"], Setup(2, "bf16"), Setup(3, "bf16"), model="LoraLM"))
        cases.append(case(frozen["lora"], Setup(3, "bf16"), Setup(2, "bf16"), model="LoraLM"))
        for load in launch(degree, "changed", cases):
            assert load.differences == {} and "frozen parameters" in load.text, load.where
            assert load.loss_gap <= 1e-5, load.where


def test_a_frozen_base_comes_back_where_each_node_keeps_a_second_partition(
    launch: Launch, frozen: dict[str, Path]
) -> None:
    # hpZ: forward passes gather from the second partition, which DeepSpeed fills when it builds the engine
    hpz = [Setup(3, zero=(("zero_hpz_partition_size", 2), *more)) for more in ((), (PERSISTENT_NOTHING,))]
    cases = [case(frozen["lora"], Setup(1), target, model="LoraLM", **{"continue": True}) for target in hpz]
    for load in launch(4, "changed", cases):
        assert load.differences == {} and "frozen parameters" in load.text, load.where
        assert load.loss_gap <= 1e-5, load.where


def test_a_base_that_was_left_out_of_the_save_stays_as_the_model_has_it(
    launch: Launch, frozen: dict[str, Path], frozen_universal: dict[str, Path]
) -> None:
    # DeepSpeed leaves out what is frozen by its first name, and below ZeRO-3 keeps the second name of the tied one
    all_but_tied = [name for name in BASE if name != "embedding.weight"]
    left_out = {0: all_but_tied, 1: all_but_tied, 3: BASE}
    cases = [
        case(frozen["bare"], Setup(stage), target, model="LoraLM", fresh=names)
        for stage, names in left_out.items()
        for target in (Setup(0), Setup(1), Setup(3))
    ]
    cases += [
        case(frozen_universal["bare"], source, target, model="LoraLM", fresh=left_out[source.stage])
        for source, target in ((Setup(1), Setup(3)), (Setup(3), Setup(2)), (Setup(3), Setup(0)))
    ]
    for load in launch(3, "changed", cases):
        assert load.differences == {}, load.where
        assert "frozen parameters " + ", ".join(load.case["fresh"]) in load.text
        assert "exclude_frozen_parameters=True" in load.text
        assert "initialized by this run, not loaded" in load.text
        assert set(load.report.initialized) == set(load.case["fresh"])


def test_what_trains_now_and_was_frozen_starts_with_fresh_states(launch: Launch, frozen: dict[str, Path]) -> None:
    fresh = {"stateless": ["embedding.weight"]}
    cases = [
        case(frozen["half"], source, target, **fresh)
        for source in (Setup(0), Setup(1), Setup(3))
        for target in (Setup(0), Setup(1), Setup(3))
    ]
    cases.append(case(frozen["half"], Setup(3, "bf16"), Setup(1, "bf16"), trained=True, **fresh))
    for load in launch(3, "changed", cases):
        assert load.differences == {}, load.where
        assert "optimizer states embedding.weight: it was frozen at save time" in load.text


def test_what_trained_and_is_frozen_now_keeps_its_weights(launch: Launch, native: Path) -> None:
    cases = [
        case(native, source, target, model="HalfFrozenLM")
        for source in (Setup(1), Setup(3))
        for target in (Setup(0), Setup(1), Setup(3))
    ]
    cases.append(case(native, Setup(3, "bf16"), Setup(1, "bf16"), model="HalfFrozenLM", trained=True))
    for load in launch(3, "changed", cases):
        assert load.differences == {}, load.where
        assert "skipped" in load.text and "optimizer states embedding.weight: frozen now" in load.text


def test_renamed_parameters_and_buffers_are_found(launch: Launch, native: Path) -> None:
    renamed = {"model": "RenamedLM", "names": NEW_NAMES, "continue": True}
    cases = [
        case(native, source, with_options(target, rename=RENAME), **renamed)
        for source in (Setup(1), Setup(3))
        for target in (Setup(0), Setup(2), Setup(3))
    ]
    for load in launch(3, "changed", cases):
        assert load.differences == {} and load.loss_gap <= 1e-5, load.where


def test_rebuilt_groups_take_hyperparameters_and_rates_by_membership(launch: Launch, native: Path) -> None:
    expected = {"reversed": [PLAIN, DECAY], "split": [DECAY, DECAY, PLAIN]}
    cases = [
        case(native, source, Setup(stage, groups=kind), groups=groups, **{"continue": True})
        for source in (Setup(1), Setup(3))
        for stage in (0, 1, 3)
        for kind, groups in expected.items()
    ]
    for load in launch(3, "changed", cases):
        assert load.differences == {} and load.loss_gap <= 1e-5, load.where


def test_groups_that_mix_different_hyperparameters_need_a_word_from_the_user(launch: Launch, native: Path) -> None:
    refused = [case(native, Setup(1), Setup(stage, groups="mixed")) for stage in (0, 1, 3)]
    for found in launch(2, "refusal_jobs.refuse", refused):
        (text,) = found.texts
        assert "MismatchError" in found.kinds and found.changed == set()
        for words in ("back.weight", "weight_decay", "0.1", "0.0", '"param_groups": "keep_live"'):
            assert words in text
    live = [DECAY, PLAIN]  # their own, whose lr the schedule halves after three steps
    kept = [with_options(Setup(stage, groups="mixed"), param_groups="keep_live") for stage in (0, 1, 3)]
    for load in launch(3, "changed", [case(native, Setup(1), target, groups=live) for target in kept]):
        assert load.differences == {}, load.where
        stay = "hyperparameters of the live group stay, but for what the restored lr scheduler sets"
        assert f"param groups 0, 1: {stay}" in load.text

"""What must not be loaded is refused on every rank with the same words, and the engine stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import damage
from tests.distributed.conftest import ROUND_ROBIN, Launch
from tests.distributed.model import Setup

Z1, Z3 = "z1-fp32-adamw-dp2", "z3-fp32-adamw-dp2"
RANK1 = damage.OPTIMIZER.format(1)
RANK2 = damage.OPTIMIZER.format(2)
MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def others(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the same shapes: with other data, a step shorter, legacy-elastic, of another optimizer, without ZeRO."""
    folders = {}
    plain = [Setup(1).as_json(), Setup(3).as_json()]
    legacy = [Setup(1, zero=(("elastic_checkpoint", True),)).as_json()]
    for name, arguments in {
        "other data": {"setups": plain, "first": 30},
        "shorter": {"setups": plain, "steps": 3},
        "legacy": {"setups": legacy, "steps": 2},
        "sgd": {"setups": [Setup(1, optimizer=name).as_json() for name in ("sgd", "diary")]},
        "whole": {"setups": [Setup(0).as_json()]},
    }.items():
        folder = tmp_path_factory.mktemp("other")
        launch(2, "save", {"folder": str(folder), **arguments})
        folders[name] = folder
    folders["stripped"] = tmp_path_factory.mktemp("stripped") / "ckpt"
    shutil.copytree(folders["whole"] / "z0-fp32-adamw-dp2", folders["stripped"])
    damage.edit(MODEL, lambda tree: tree.update(optimizer=None))(folders["stripped"])
    return folders


def test_damage_is_named_on_all_ranks_and_nothing_changes(
    launch: Launch, native: Path, universal: Path, others: dict[str, Path], tmp_path: Path
) -> None:
    rank1 = Path("step4") / RANK1
    strange = damage.edit(RANK1, damage.add_strange_state)
    strange0 = damage.edit(damage.OPTIMIZER.format(0), damage.add_strange_state)

    def state_everywhere(copy: Path) -> None:
        strange(copy)
        strange0(copy)

    damages: list[tuple[str, str, Any, str, list[str]]] = [
        ("missing shard", Z1, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "remedy:"]),
        ("missing zero3 shard", Z3, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "2 files"]),
        ("missing first shard", Z3, damage.remove(damage.OPTIMIZER.format(0)), "DamagedError", [damage.OPTIMIZER.format(0)]),
        ("missing model states", Z1, damage.remove(MODEL), "DamagedError", [MODEL]),
        ("missing model states of a rank", Z3, damage.remove(MODEL3), "DamagedError", [MODEL3, "missing"]),
        ("truncated shard", Z1, damage.truncate(RANK1, 0.6), "DamagedError", ["truncated", RANK1]),
        ("truncated at the end", Z3, damage.truncate(RANK1, 0.999), "DamagedError", ["truncated", RANK1]),
        ("empty file", Z1, damage.truncate(MODEL, 0), "DamagedError", ["truncated", MODEL]),
        ("noise for a pickle", Z1, damage.rewrite_pickle(RANK1), "DamagedError", [RANK1]),
        ("code in a pickle", Z1, damage.edit(MODEL, damage.plant_bomb), "UnsafePickleError", [MODEL, "print", "trust_pickle"]),
        ("shard of another run", Z1, damage.replace_by(RANK1, others["other data"] / Z1 / rank1), "DamagedError", [RANK1, "not those of the weights"]),
        ("shard of another step", Z1, damage.replace_by(RANK1, others["shorter"] / Z1 / rank1), "DamagedError", [RANK1, "another save", "step"]),
        ("zero3 shard of another step", Z3, damage.replace_by(RANK1, others["shorter"] / Z3 / rank1), "DamagedError", [RANK1, "another save"]),
        ("model states of another step", Z3, damage.replace_by(MODEL3, others["shorter"] / Z3 / "step4" / MODEL3), "DamagedError", [MODEL3, "counters"]),
        ("shard of an older, bigger job", Z1, damage.replace_by(RANK2, native / "z1-fp32-adamw-dp3" / "step4" / RANK2), "DamagedError", [RANK2, "partition"]),
        ("no latest", Z1, damage.remove_latest, "NotFoundError", ["latest", "step4", "tag='step4'"]),
        ("strange state", Z1, state_everywhere, "UnsupportedError", ["curvature", "(3, 2)"]),
        ("strange state in one shard", Z1, strange, "DamagedError", [RANK1, "optimizer states"]),
        ("a master dropped", Z1, damage.edit(RANK1, damage.drop_master), "DamagedError", [RANK1, "number of flat tensors"]),
        ("another shape in the file", Z1, damage.edit(MODEL, damage.change_shape), "MismatchError", ["hidden.weight", "(29, 13)", "(13, 29)"]),
        ("a parameter forgotten", Z3, damage.edit("zero_pp_rank_0_mp_rank_00_model_states.pt", damage.forget_parameter), "DamagedError", ["param_shapes"]),
        ("no counters", Z1, damage.edit(MODEL, damage.no_counters), "DamagedError", ["global_steps", MODEL]),
    ]  # fmt: skip
    cases: list[dict[str, Any]] = []
    for number, (name, source, apply, error, says) in enumerate(damages):
        copy = tmp_path / f"{number}"
        shutil.copytree(native / source, copy)
        apply(copy)
        cases.append({"name": name, "folder": str(copy), "error": error, "says": says})
    mixed = tmp_path / "mixed"
    shutil.copytree(native / Z3, mixed)
    for rank in (0, 1):
        damage.replace_by(
            damage.OPTIMIZER.format(rank), others["shorter"] / Z3 / "step4" / damage.OPTIMIZER.format(rank)
        )(mixed)
    says = ["different steps", "optimizer step 4", "optimizer step 3", "check_shards"]
    cases.append({"name": "all shards of another step", "folder": str(mixed), "error": "DamagedError", "says": says})
    cases += universal_cases(universal, native, tmp_path)
    cases += live_cases(native, others)
    for setup in (Setup(2), Setup(3)):
        launch(3, "refusal_jobs.refuse", {"setup": setup.as_json(), "cases": cases})


def universal_cases(universal: Path, native: Path, tmp_path: Path) -> list[dict[str, Any]]:
    cases = []
    damages: list[tuple[str, str, float | None, str, list[str]]] = [
        ("state file gone", "zero/hidden.weight/exp_avg.pt", None, "DamagedError", ["hidden.weight", "exp_avg"]),
        ("state file truncated", "zero/back.weight/fp32.pt", 0.5, "DamagedError", ["back.weight"]),
        ("step gone", "zero/back.weight/step.pt", None, "MismatchError", ["back.weight", "step"]),
    ]
    for number, (name, path, kept, error, says) in enumerate(damages):
        copy = tmp_path / f"universal{number}"
        shutil.copytree(universal / Z1, copy)
        file = copy / "step4_universal" / path
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
        cases.append({"name": name, "folder": str(copy), "error": error, "says": says})
    return cases + round_robin_cases(universal, tmp_path)


def round_robin_cases(universal: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """DeepSpeed's converter scrambles these; the saved config tells, and where it does not, the values do."""
    scrambled = universal / f"{Setup(2, zero=ROUND_ROBIN).name}-dp2"
    unknown = tmp_path / "unknown config"
    shutil.copytree(scrambled, unknown)
    damage.edit(MODEL, lambda tree: tree.update(ds_config="/home/user/zero2.json"))(unknown)
    return [
        {"name": "round robin", "folder": str(scrambled), "error": "UnsupportedError", "says": ["round_robin"]},
        {"name": "unknown", "folder": str(unknown), "error": "DamagedError", "says": ["masters", "check_shards"]},
    ]


def live_cases(native: Path, others: dict[str, Path]) -> list[dict[str, Any]]:
    whole = str(native / Z1)

    def case(name: str, error: str, says: list[str], **more: Any) -> dict[str, Any]:
        return {"name": name, "folder": whole, "error": error, "says": says, **more}

    def config(**section: Any) -> dict[str, Any]:
        return Setup(1, config=(("elastic_checkpoint", section),)).as_json()

    def batch(**sizes: int) -> dict[str, Any]:
        section = ("elastic_checkpoint", {"on_batch_size_change": "error"})
        return Setup(1, config=(*sizes.items(), section)).as_json()

    return [
        case("wider model", "MismatchError", ["shape", "hidden", "29", "31"], model="WiderLM"),
        case("wider model, not strict", "MismatchError", ["31"], model="WiderLM", arguments={"load_module_strict": False}),
        case("a parameter more", "MismatchError", ["newcomer", "load_module_strict=False"], model="RicherLM"),
        case("a parameter fewer", "MismatchError", ["never_used", "load_module_strict=False"], model="PoorerLM"),
        case("untied now", "MismatchError", ["head.weight", "embedding.weight", "tied"], model="UntiedLM"),
        case("unknown config key", "ConfigError", ["trust_pickel", "trust_pickle"], setup=config(trust_pickel=True)),
        case("bad config value", "ConfigError", ["mode"], setup=config(mode="always")),
        case("a tag that is not there", "NotFoundError", ["step9", "step4"], arguments={"tag": "step9"}),
        case("another optimizer", "MismatchError", ["SGD", "exp_avg_sq"], setup=Setup(1, optimizer="sgd").as_json()),
        case("states of another optimizer", "MismatchError", ["momentum_buffer"], folder=str(others["sgd"] / "z1-fp32-sgd-dp2")),
        case("Adam for AdamW", "MismatchError", ["weight decay", "AdamW"], setup=Setup(1, optimizer="adam").as_json()),
        case("nameless states", "MismatchError", ["without names", "[4, 4]", "[8]"], folder=str(others["whole"] / "z0-fp32-adamw-dp2"), setup=Setup(1, groups="one").as_json()),
        case("whole, but no optimizer", "DamagedError", ["optim_states", "missing"], folder=str(others["stripped"])),
        case("batch size", "MismatchError", ["12 samples", "is 24", '"train_batch_size": 12', "on_batch_size_change"], setup=batch(train_batch_size=24, train_micro_batch_size_per_gpu=8)),
        case("micro-batches", "MismatchError", ["1 micro-batches", "2 of 2"], setup=batch(train_micro_batch_size_per_gpu=2)),
        case("two renamed to one", "MismatchError", ["hidden.weight", "back.weight", "same.weight"], setup=config(rename=[["^(hidden|back).weight", "same.weight"]])),
        case("bad pattern", "ConfigError", ["rename", "(unclosed"], setup=config(rename=[["(unclosed", ""]])),
        case("bad replacement", "ConfigError", ["rename", "invalid group reference"], setup=config(rename=[["a", "\\2"]])),
        case("another variant", "MismatchError", ["max_exp_avg_sq"], setup=Setup(1, optimizer="adamw_amsgrad").as_json()),
        case("legacy elastic", "UnsupportedError", ["elastic_checkpoint"], folder=str(others["legacy"] / "z1-fp32-adamw-elastic_checkpoint-dp2")),
        case("custom_load_fn at another topology", "UnsupportedError", ["custom_load_fn"], arguments={"custom_load_fn": 1}),
    ]  # fmt: skip


def test_what_deepspeeds_own_loader_would_get_wrong_is_not_left_to_it(
    launch: Launch, native: Path, others: dict[str, Path]
) -> None:
    """At the saved topology, by an optimizer that only DeepSpeed knows: it gives masters and states by position."""
    diary, adamw = str(others["sgd"] / "z1-fp32-diary-dp2"), str(native / Z1)

    def case(name: str, folder: str, setup: Setup, **more: Any) -> dict[str, Any]:
        values = {"name": name, "folder": folder, "setup": setup.as_json(), "error": "UnsupportedError"}
        return {**values, "says": [setup.optimizer], **more}

    renaming = (("elastic_checkpoint", {"rename": [["^hidden", "hidden"]]}),)
    launch(
        2,
        "refusal_jobs.refuse",
        {
            "cases": [
                case("groups in another order", diary, Setup(1, optimizer="diary", groups="reversed")),
                case("round robin now", diary, Setup(1, optimizer="diary", zero=ROUND_ROBIN)),
                case("another precision", diary, Setup(1, "bf16", optimizer="diary")),
                case("renames", diary, Setup(1, optimizer="diary", config=renaming)),
                case("not strict", diary, Setup(1, optimizer="diary"), arguments={"load_module_strict": False}),
                case("states of AdamW", adamw, Setup(1, optimizer="radam"), error="MismatchError", says=["RAdam"]),
            ]
        },
    )


def test_a_disk_that_fails_while_reading_is_an_error_on_all_ranks(launch: Launch, native: Path) -> None:
    launch(2, "refusal_jobs.break_reading", {"setup": Setup(2).as_json(), "folder": str(native / Z1)})


def test_ranks_that_ask_for_different_things_get_the_same_error(launch: Launch, native: Path) -> None:
    launch(2, "refusal_jobs.diverge", {"setup": Setup(2).as_json(), "folder": str(native / Z1)}, timeout=100)


def test_a_scheduler_that_fails_on_one_rank_is_taken_back_on_all(launch: Launch, native: Path) -> None:
    launch(2, "refusal_jobs.bad_scheduler", {"setup": Setup(2).as_json(), "folder": str(native / Z3)})


def test_weights_alone_load_under_any_optimizer(launch: Launch, native: Path) -> None:
    launch(3, "weights_alone", {"setup": Setup(3, optimizer="sgd").as_json(), "folder": str(native / Z1)})

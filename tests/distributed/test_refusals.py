"""What must not be loaded is refused on every rank with the same words, and the engine stays as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest

from tests.distributed import damage
from tests.distributed.conftest import ROUND_ROBIN, Launch
from tests.distributed.facts import Refused
from tests.distributed.model import Setup

Z1, Z3 = "z1-fp32-adamw-dp2", "z3-fp32-adamw-dp2"
RANK0, RANK1 = map(damage.OPTIMIZER.format, range(2))
MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
Words = list[str]


@pytest.fixture(scope="module")
def others(launch: Launch, native: Path, universal: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the same shapes: with other data, a step shorter, legacy-elastic, of another optimizer, without ZeRO."""
    folders = {"native": native, "universal": universal}
    plain = [Setup(1), Setup(3)]
    for name, arguments in {
        "other data": {"setups": plain, "first": 30},
        "shorter": {"setups": plain, "steps": 3},
        "legacy": {"setups": [Setup(1, zero=(("elastic_checkpoint", True),))], "steps": 2},
        "another optimizer": {"setups": [Setup(1, optimizer=name) for name in ("sgd", "diary")]},
        "whole": {"setups": [Setup(0)]},
    }.items():
        folders[name] = tmp_path_factory.mktemp("other")
        launch(2, "save", {"folder": str(folders[name]), **arguments})
    return folders


class FromRun(NamedTuple):
    """Damage: files of another run of the same shapes in place of this one's."""

    run: str
    source: str
    files: tuple[str, ...]

    def apply(self, copy: Path, others: dict[str, Path]) -> None:
        for file in self.files:
            damage.replace_by(file, others[self.run] / self.source / "step4" / file)(copy)


def in_each(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda copy: [change(copy) for change in changes] and None


STRANGE0, STRANGE1 = (damage.edit(file, damage.add_strange_state) for file in (RANK0, RANK1))
UNKNOWN_CONFIG = damage.edit(MODEL, lambda tree: tree.update(ds_config="/home/user/zero2.json"))
SCRAMBLED = f"{Setup(2, zero=ROUND_ROBIN).name}-dp2"
#: Run and checkpoint, what happens to a copy of it, the kind of error, and what it says.
DAMAGED: dict[str, tuple[str, str, Any, str, Words]] = {
    "missing shard": ("native", Z1, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "remedy:"]),
    "missing zero3 shard": ("native", Z3, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "2 files"]),
    "missing first shard": ("native", Z3, damage.remove(RANK0), "DamagedError", [RANK0]),
    "missing model states": ("native", Z1, damage.remove(MODEL), "DamagedError", [MODEL]),
    "missing model states of a rank": ("native", Z3, damage.remove(MODEL3), "DamagedError", [MODEL3, "missing"]),
    "truncated shard": ("native", Z1, damage.truncate(RANK1, 0.6), "DamagedError", ["truncated", RANK1]),
    "truncated at the end": ("native", Z3, damage.truncate(RANK1, 0.999), "DamagedError", ["truncated", RANK1]),
    "empty file": ("native", Z1, damage.truncate(MODEL, 0), "DamagedError", ["truncated", MODEL]),
    "a pipe for a shard": ("native", Z1, damage.put(RANK1, os.mkfifo), "DamagedError", [RANK1, "a named pipe"]),
    "a pipe for latest": ("native", Z1, damage.put("latest", os.mkfifo), "DamagedError", ["latest", "a named pipe"]),
    "a loop of links": ("native", Z3, damage.put(MODEL3, lambda path: path.symlink_to(path.name)), "DamagedError", [MODEL3, "Too many levels"]),
    "universal: a folder for a file": ("universal", Z1, damage.put("zero/back.weight/exp_avg.pt", Path.mkdir), "DamagedError", ["exp_avg.pt", "a folder"]),
    "noise for a pickle": ("native", Z1, damage.rewrite_pickle(RANK1), "DamagedError", [RANK1]),
    "code in a pickle": ("native", Z1, damage.edit(MODEL, damage.plant_bomb), "UnsafePickleError", [MODEL, "print", "trust_pickle"]),
    "shard of another run": ("native", Z1, FromRun("other data", Z1, (RANK1,)), "MixedSavesError", [RANK1, "not those of the weights"]),
    "shard of another step": ("native", Z1, FromRun("shorter", Z1, (RANK1,)), "DamagedError", [RANK1, "another save", "step"]),
    "zero3 shard of another step": ("native", Z3, FromRun("shorter", Z3, (RANK1,)), "DamagedError", [RANK1, "another save"]),
    "model states of another step": ("native", Z3, FromRun("shorter", Z3, (MODEL3,)), "DamagedError", [MODEL3, "counters"]),
    "all shards of another step": ("native", Z3, FromRun("shorter", Z3, (RANK0, RANK1,)), "DamagedError", ["different steps", "optimizer step 4", "optimizer step 3", '"verify": "bytes"']),
    "shard of a bigger job": ("native", Z1, FromRun("native", "z1-fp32-adamw-dp3", (RANK1,)), "DamagedError", [RANK1, "partition"]),
    "zero3 shards swapped": ("native", Z3, damage.swap(RANK0, RANK1), "DamagedError", ["changed places", RANK0, RANK1, '"verify": "bytes"']),
    "zero3 shard copied over another": ("native", Z3, damage.copy_over(RANK0, RANK1), "DamagedError", [f"expected:  an archive that was saved as {RANK1}", f"saved as {RANK0}"]),
    "shards swapped": ("native", Z1, damage.swap(RANK0, RANK1), "DamagedError", ["changed places", RANK0, RANK1]),
    "universal: states swapped": ("universal", Z1, damage.swap("zero/back.weight/exp_avg.pt", "zero/back.weight/exp_avg_sq.pt"), "DamagedError", ["changed places", "exp_avg_sq.pt"]),
    "strange state": ("native", Z1, in_each(STRANGE0, STRANGE1), "UnsupportedError", ["curvature", "(3, 2)"]),
    "strange state in one shard": ("native", Z1, STRANGE1, "DamagedError", [RANK1, "optimizer states"]),
    "a master dropped": ("native", Z1, damage.edit(RANK1, damage.drop_master), "DamagedError", [RANK1, "group_paddings"]),
    "another shape in the file": ("native", Z1, damage.edit(MODEL, damage.change_shape), "MismatchError", ["hidden.weight", "(29, 13)", "(13, 29)"]),
    "a parameter forgotten": ("native", Z3, damage.edit("zero_pp_rank_0_mp_rank_00_model_states.pt", damage.forget_parameter), "DamagedError", ["param_shapes"]),
    "no counters": ("native", Z1, damage.edit(MODEL, damage.no_counters), "DamagedError", ["global_steps", MODEL]),
    "no optimizer anywhere": ("whole", "z0-fp32-adamw-dp2", damage.edit(MODEL, lambda tree: tree.update(optimizer=None)), "DamagedError", ["optim_states", "missing"]),
    "universal: state file gone": ("universal", Z1, damage.remove("zero/hidden.weight/exp_avg.pt"), "DamagedError", ["hidden.weight", "exp_avg"]),
    "universal: state file truncated": ("universal", Z1, damage.truncate("zero/back.weight/fp32.pt", 0.5), "DamagedError", ["back.weight"]),
    "universal: step gone": ("universal", Z1, damage.remove("zero/back.weight/step.pt"), "DamagedError", ["back.weight", "step"]),
    # DeepSpeed's converter scrambles these; the saved config tells, and where it does not, the values do
    "universal: round robin": ("universal", SCRAMBLED, in_each(), "UnsupportedError", ["round_robin"]),
    "universal: unknown config": ("universal", SCRAMBLED, UNKNOWN_CONFIG, "DamagedError", ["masters", '"verify": "bytes"']),
}  # fmt: skip


def elastic(**section: Any) -> Setup:
    return Setup(1, config=(("elastic_checkpoint", section),))


def batch(**sizes: int) -> Setup:
    return Setup(1, config=(*sizes.items(), ("elastic_checkpoint", {"on_change": "error"})))


#: Run and checkpoint, the live engine and how it is asked, the kind of error, and what it says.
UNFIT: dict[str, tuple[str, str, dict[str, Any], str, Words]] = {
    "wider model": ("native", Z1, {"model": "WiderLM"}, "MismatchError", ["shape", "hidden", "29", "31"]),
    "wider model, not strict": ("native", Z1, {"model": "WiderLM", "arguments": {"load_module_strict": False}}, "MismatchError", ["31"]),
    "a parameter more": ("native", Z1, {"model": "RicherLM"}, "MismatchError", ["newcomer", "load_module_strict=False"]),
    "a parameter fewer": ("native", Z1, {"model": "PoorerLM"}, "MismatchError", ["never_used", "load_module_strict=False"]),
    "untied now": ("native", Z1, {"model": "UntiedLM"}, "MismatchError", ["head.weight", "embedding.weight", "tied"]),
    "unknown config key": ("native", Z1, {"setup": elastic(trust_pickel=True)}, "ConfigError", ["trust_pickel", "trust_pickle"]),
    "bad config value": ("native", Z1, {"setup": elastic(mode="always")}, "ConfigError", ["mode"]),
    "a tag that is not there": ("native", Z1, {"arguments": {"tag": "step9"}}, "NotFoundError", ["step9", "step4"]),
    "another optimizer": ("native", Z1, {"setup": Setup(1, optimizer="sgd")}, "MismatchError", ["SGD", "exp_avg_sq"]),
    "states of another optimizer": ("another optimizer", "z1-fp32-sgd-dp2", {}, "MismatchError", ["momentum_buffer"]),
    "Adam for AdamW": ("native", Z1, {"setup": Setup(1, optimizer="adam")}, "MismatchError", ["weight decay", "AdamW"]),
    "nameless states": ("whole", "z0-fp32-adamw-dp2", {"setup": Setup(1, groups="one")}, "MismatchError", ["without names", "[4, 4]", "[8]"]),
    "batch size": ("native", Z1, {"setup": batch(train_batch_size=24, train_micro_batch_size_per_gpu=8)}, "MismatchError", ["global batch: 12 -> 24 samples", '"train_batch_size": 12', "on_change"]),
    "micro-batches": ("native", Z1, {"setup": batch(train_micro_batch_size_per_gpu=2)}, "MismatchError", ["gradient_accumulation_steps: 1 -> 2, micro-batch: 6 -> 2"]),
    "two renamed to one": ("native", Z1, {"setup": elastic(rename=[["^(hidden|back).weight", "same.weight"]])}, "MismatchError", ["hidden.weight", "back.weight", "same.weight"]),
    "bad pattern": ("native", Z1, {"setup": elastic(rename=[["(unclosed", ""]])}, "ConfigError", ["rename", "(unclosed"]),
    "bad replacement": ("native", Z1, {"setup": elastic(rename=[["a", "\\2"]])}, "ConfigError", ["rename", "invalid group reference"]),
    "another variant": ("native", Z1, {"setup": Setup(1, optimizer="adamw_amsgrad")}, "MismatchError", ["max_exp_avg_sq"]),
    "legacy elastic": ("legacy", "z1-fp32-adamw-elastic_checkpoint-dp2", {}, "UnsupportedError", ["elastic_checkpoint"]),
    "custom_load_fn at another topology": ("native", Z1, {"custom_load_fn": True}, "UnsupportedError", ["custom_load_fn"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(
    launch: Launch, others: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Refused]]:
    """By name: how a ZeRO-2 and a ZeRO-3 engine of three ranks, or the one that a case asks for, refuses it."""
    cases = []
    for name, (run, source, apply, *_) in DAMAGED.items():
        copy = tmp_path_factory.mktemp("damaged") / "copy"
        shutil.copytree(others[run] / source, copy)
        apply.apply(copy, others) if isinstance(apply, FromRun) else apply(copy)
        cases.append({"name": name, "folder": str(copy)})
    for name, (run, source, live, *_) in UNFIT.items():
        cases.append({"name": name, "folder": str(others[run] / source), **live})
    found: dict[str, list[Refused]] = {}
    for setup in (Setup(2), Setup(3)):
        for refused in launch(3, "refusal_jobs.refuse", [{"setup": setup, **case} for case in cases]):
            found.setdefault(refused.case["name"], []).append(refused)
    return found


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named_on_all_ranks_and_nothing_changes(name: str, refusals: dict[str, list[Refused]]) -> None:
    *_, error, words = DAMAGED[name]
    for refused in refusals[name]:
        (text,) = refused.texts
        assert error in refused.kinds, text
        assert [word for word in words if word not in text] == [], text
        assert refused.changed == set()


@pytest.mark.parametrize("name", UNFIT)
def test_an_engine_that_does_not_fit_is_refused_on_all_ranks_and_stays_as_it_was(
    name: str, refusals: dict[str, list[Refused]]
) -> None:
    *_, error, words = UNFIT[name]
    for refused in refusals[name]:
        (text,) = refused.texts
        assert error in refused.kinds, text
        assert [word for word in words if word not in text] == [], text
        assert refused.changed == set()


DIARY = {"setup": Setup(1, optimizer="diary")}
#: What an optimizer that only DeepSpeed knows asks for at the saved topology; the kind of error, and what it names.
LEFT: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "groups in another order": ("another optimizer", "diary", {"setup": Setup(1, optimizer="diary", groups="reversed")}, "UnsupportedError", "diary"),
    "round robin now": ("another optimizer", "diary", {"setup": Setup(1, optimizer="diary", zero=ROUND_ROBIN)}, "UnsupportedError", "diary"),
    "another precision": ("another optimizer", "diary", {"setup": Setup(1, "bf16", optimizer="diary")}, "UnsupportedError", "diary"),
    "renames": ("another optimizer", "diary", {"setup": Setup(1, optimizer="diary", config=elastic(rename=[["^hidden", "hidden"]]).config)}, "UnsupportedError", "diary"),
    "not strict": ("another optimizer", "diary", {**DIARY, "model": "BufferedLM", "arguments": {"load_module_strict": False}}, "UnsupportedError", "diary"),
    "states of AdamW": ("native", "adamw", {"setup": Setup(1, optimizer="radam")}, "MismatchError", "RAdam"),
}  # fmt: skip


@pytest.fixture(scope="module")
def left(launch: Launch, others: dict[str, Path]) -> dict[str, Refused]:
    """By name, all cases of :data:`LEFT` on two ranks."""
    cases = [
        {"name": name, "folder": str(others[run] / f"z1-fp32-{saved}-dp2"), **live}
        for name, (run, saved, live, *_) in LEFT.items()
    ]
    return {refused.case["name"]: refused for refused in launch(2, "refusal_jobs.refuse", cases)}


@pytest.mark.parametrize("name", LEFT)
def test_what_deepspeeds_own_loader_would_get_wrong_is_not_left_to_it(name: str, left: dict[str, Refused]) -> None:
    """It gives masters and states by position."""
    *_, error, named = LEFT[name]
    (text,) = left[name].texts
    assert error in left[name].kinds and named in text
    assert left[name].changed == set()


def test_a_disk_that_fails_while_reading_is_an_error_on_all_ranks(launch: Launch, native: Path) -> None:
    arguments = {"setup": Setup(2), "folder": str(native / Z1)}
    for found in launch(2, "refusal_jobs.break_reading", arguments):
        (text,) = found.refused.texts
        assert "PartialLoadError" in found.refused.kinds
        assert "must not be trained or saved" in text and "Input/output error" in text
        assert found.differences == {}, "loaded again"


def test_an_engine_that_lacks_a_private_name_is_refused_before_anything_is_written(
    launch: Launch, native: Path
) -> None:
    """Names that only the commit touches."""
    names = {
        Setup(1): "optimizer.__class__.update_lp_params",
        Setup(2): "optimizer.__class__._restore_from_bit16_weights",
        Setup(3): "optimizer.parameter_offload.persistent_parameters",
    }
    folder, required = str(native / Z1), {"mode": "require"}
    cases = [
        {"setup": replace(setup, config=(("elastic_checkpoint", required),)), "folder": folder, "name": name}
        for setup, name in names.items()
    ]
    for found in launch(2, "refusal_jobs.without_a_name", cases):
        (text,) = found.refused.texts
        assert "UnsupportedError" in found.refused.kinds, text
        assert "lacks private names" in text and found.refused.case["name"].rpartition(".")[2] in text
        assert f"DeepSpeed {deepspeed.__version__}" in text
        assert found.refused.changed == set() and found.differences == {}


def test_ranks_that_ask_for_different_things_get_the_same_error(launch: Launch, native: Path) -> None:
    arguments = {"setup": Setup(2), "folder": str(native / Z1)}
    found = launch(2, "refusal_jobs.diverge", arguments, timeout=100)
    asked = ["load_dir", "load_dir", "tag", "tag", "load_module_only", "mode"]
    for refused, name in zip(found, asked, strict=True):
        (text,) = refused.texts
        assert "ConfigError" in refused.kinds, text
        assert name in text and "rank 1" in text
        assert refused.changed == set()


def test_a_scheduler_that_fails_on_one_rank_is_taken_back_on_all(launch: Launch, native: Path) -> None:
    (found,) = launch(2, "refusal_jobs.bad_scheduler", {"setup": Setup(2), "folder": str(native / Z3)})
    (text,) = found.refused.texts
    assert "MismatchError" in found.refused.kinds and "load_lr_scheduler_states=False" in text
    assert "could not load the saved state" in text and "a key that this scheduler wants" in text
    assert found.refused.changed == set()
    assert found.step == 4, "without load_lr_scheduler_states it loads"


def test_weights_alone_load_under_any_optimizer(launch: Launch, native: Path) -> None:
    for load in launch(3, "weights_only", [{"setup": Setup(3, optimizer="sgd"), "folder": str(native / Z1)}]):
        assert load.differences == {}, load.where

"""What must not be loaded is refused on every rank with the same words, and the engine stays as it was."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.conftest import ROUND_ROBIN
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup

pytestmark = pytest.mark.core

RANK0, RANK1 = map(damage.OPTIMIZER.format, range(2))
MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
Z1, Z3 = Save(Setup(1)), Save(Setup(3))
UNIVERSAL = Save(Setup(1), converted=True)
#: Which DeepSpeed's converter scrambles.
SCRAMBLED = Save(Setup(2, zero=ROUND_ROBIN), converted=True)
#: Runs of the same shapes: with other data, a step shorter, of more ranks.
OTHER_DATA = Save(Setup(1), more={"first": 30})
SHORTER1, SHORTER3 = (Save(Setup(stage), more={"steps": 3}) for stage in (1, 3))
LEGACY = Save(Setup(1, zero=(("elastic_checkpoint", True),)), more={"steps": 2})
SGD, DIARY = (Save(Setup(1, optimizer=name)) for name in ("sgd", "diary"))
WHOLE = Save(Setup(0))


STRANGE0, STRANGE1 = (damage.edit(file, damage.add_strange_state) for file in (RANK0, RANK1))
UNKNOWN_CONFIG = damage.edit(MODEL, lambda tree: tree.update(ds_config="/home/user/zero2.json"))
#: What was saved, what happens to a copy of it (with which other run), the kind of error, and what it says.
DAMAGED: dict[str, tuple[Save | tuple[Save, Save], Any, str, list[str]]] = {
    "missing shard": (Z1, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "remedy:"]),
    "missing zero3 shard": (Z3, damage.remove(RANK1), "DamagedError", [RANK1, "missing", "2 files"]),
    "missing first shard": (Z3, damage.remove(RANK0), "DamagedError", [RANK0]),
    "missing model states": (Z1, damage.remove(MODEL), "DamagedError", [MODEL]),
    "missing model states of a rank": (Z3, damage.remove(MODEL3), "DamagedError", [MODEL3, "missing"]),
    "truncated shard": (Z1, damage.truncate(RANK1, 0.6), "DamagedError", ["truncated", RANK1]),
    "truncated at the end": (Z3, damage.truncate(RANK1, 0.999), "DamagedError", ["truncated", RANK1]),
    "empty file": (Z1, damage.truncate(MODEL, 0), "DamagedError", ["truncated", MODEL]),
    "a pipe for a shard": (Z1, damage.put(RANK1, os.mkfifo), "DamagedError", [RANK1, "a named pipe"]),
    "a pipe for latest": (Z1, damage.put("latest", os.mkfifo), "DamagedError", ["latest", "a named pipe"]),
    "a loop of links": (Z3, damage.put(MODEL3, lambda path: path.symlink_to(path.name)), "DamagedError", [MODEL3, "Too many levels"]),
    "universal: a folder for a file": (UNIVERSAL, damage.put("zero/back.weight/exp_avg.pt", Path.mkdir), "DamagedError", ["exp_avg.pt", "a folder"]),
    "noise for a pickle": (Z1, damage.rewrite_pickle(RANK1), "DamagedError", [RANK1]),
    "code in a pickle": (Z1, damage.edit(MODEL, damage.plant_bomb), "UnsafePickleError", [MODEL, "print", "trust_pickle"]),
    "shard of another run": ((Z1, OTHER_DATA), damage.of_other(RANK1), "MixedSavesError", [RANK1, "not those of the weights"]),
    "shard of another step": ((Z1, SHORTER1), damage.of_other(RANK1), "DamagedError", [RANK1, "another save", "step"]),
    "zero3 shard of another step": ((Z3, SHORTER3), damage.of_other(RANK1), "DamagedError", [RANK1, "another save"]),
    "model states of another step": ((Z3, SHORTER3), damage.of_other(MODEL3), "DamagedError", [MODEL3, "counters"]),
    "all shards of another step": ((Z3, SHORTER3), damage.of_other(RANK0, RANK1), "DamagedError", ["different steps", "optimizer step 4", "optimizer step 3", '"verify": "bytes"']),
    "shard of a bigger job": ((Z1, Save(Setup(1), 3)), damage.of_other(RANK1), "DamagedError", [RANK1, "partition"]),
    "zero3 shards swapped": (Z3, damage.swap(RANK0, RANK1), "DamagedError", ["changed places", RANK0, RANK1, '"verify": "bytes"']),
    "zero3 shard copied over another": (Z3, damage.copy_over(RANK0, RANK1), "DamagedError", [f"expected:  an archive that was saved as {RANK1}", f"saved as {RANK0}"]),
    "shards swapped": (Z1, damage.swap(RANK0, RANK1), "DamagedError", ["changed places", RANK0, RANK1]),
    "universal: states swapped": (UNIVERSAL, damage.swap("zero/back.weight/exp_avg.pt", "zero/back.weight/exp_avg_sq.pt"), "DamagedError", ["changed places", "exp_avg_sq.pt"]),
    "strange state": (Z1, damage.in_turn(STRANGE0, STRANGE1), "UnsupportedError", ["curvature", "(3, 2)"]),
    "strange state in one shard": (Z1, STRANGE1, "DamagedError", [RANK1, "optimizer states"]),
    "a master dropped": (Z1, damage.edit(RANK1, damage.drop_master), "DamagedError", [RANK1, "group_paddings"]),
    "another shape in the file": (Z1, damage.edit(MODEL, damage.change_shape), "DamagedError", [MODEL, "hidden.weight", "(29, 13)", "(13, 29)"]),
    "a parameter forgotten": (Z3, damage.edit("zero_pp_rank_0_mp_rank_00_model_states.pt", damage.forget_parameter), "DamagedError", ["param_shapes"]),
    "a weight that is no tensor": (WHOLE, damage.edit(MODEL, lambda tree: tree["module"].update({"hidden.weight": 5})), "DamagedError", [MODEL, "hidden.weight", "a tensor"]),
    "no counters": (Z1, damage.edit(MODEL, damage.no_counters), "DamagedError", ["global_steps", MODEL]),
    "no optimizer anywhere": (WHOLE, damage.edit(MODEL, lambda tree: tree.update(optimizer=None)), "DamagedError", ["optim_states", "missing"]),
    "universal: state file gone": (UNIVERSAL, damage.remove("zero/hidden.weight/exp_avg.pt"), "DamagedError", ["hidden.weight", "exp_avg"]),
    "universal: state file truncated": (UNIVERSAL, damage.truncate("zero/back.weight/fp32.pt", 0.5), "DamagedError", ["back.weight"]),
    "universal: step gone": (UNIVERSAL, damage.remove("zero/back.weight/step.pt"), "DamagedError", ["back.weight", "step"]),
    # DeepSpeed's converter scrambles these; the saved config tells, and where it does not, the values do
    "universal: round robin": (SCRAMBLED, damage.in_turn(), "UnsupportedError", ["round_robin"]),
    "universal: unknown config": (SCRAMBLED, UNKNOWN_CONFIG, "DamagedError", ["masters", '"verify": "bytes"']),
}  # fmt: skip


def elastic(**section: Any) -> Setup:
    return Setup(1, config=(("elastic_checkpoint", section),))


def required(setup: Setup) -> Setup:
    return replace(setup, config=(("elastic_checkpoint", {"mode": "require"}),))


def batch(**sizes: int) -> Setup:
    return Setup(1, config=(*sizes.items(), ("elastic_checkpoint", {"on_change": "error"})))


#: What was saved, the live engine and how it is asked, the kind of error, and what it says.
UNFIT: dict[str, tuple[Save, dict[str, Any], str, list[str]]] = {
    "wider model": (Z1, {"model": "WiderLM"}, "MismatchError", ["shape", "hidden", "29", "31"]),
    "wider model, not strict": (Z1, {"model": "WiderLM", "arguments": {"load_module_strict": False}}, "MismatchError", ["31"]),
    "a parameter more": (Z1, {"model": "RicherLM"}, "MismatchError", ["newcomer", "load_module_strict=False"]),
    "a parameter fewer": (Z1, {"model": "PoorerLM"}, "MismatchError", ["never_used", "load_module_strict=False"]),
    "untied now": (Z1, {"model": "UntiedLM"}, "MismatchError", ["head.weight", "embedding.weight", "tied"]),
    "unknown config key": (Z1, {"setup": elastic(trust_pickel=True)}, "ConfigError", ["trust_pickel", "trust_pickle"]),
    "bad config value": (Z1, {"setup": elastic(mode="always")}, "ConfigError", ["mode"]),
    "a tag that is not there": (Z1, {"arguments": {"tag": "step9"}}, "NotFoundError", ["step9", "step4"]),
    "another optimizer": (Z1, {"setup": Setup(1, optimizer="sgd")}, "MismatchError", ["SGD", "exp_avg_sq"]),
    "states of another optimizer": (SGD, {}, "MismatchError", ["momentum_buffer"]),
    "Adam for AdamW": (Z1, {"setup": Setup(1, optimizer="adam")}, "MismatchError", ["weight decay", "AdamW"]),
    "nameless states": (WHOLE, {"setup": Setup(1, groups="one")}, "MismatchError", ["without names", "[4, 4]", "[8]"]),
    "batch size": (Z1, {"setup": batch(train_batch_size=24, train_micro_batch_size_per_gpu=8)}, "MismatchError", ["global batch: 12 -> 24 samples", '"train_batch_size": 12', "on_change"]),
    "micro-batches": (Z1, {"setup": batch(train_micro_batch_size_per_gpu=2)}, "MismatchError", ["gradient_accumulation_steps: 1 -> 2, micro-batch: 6 -> 2"]),
    "two renamed to one": (Z1, {"setup": elastic(rename=[["^(hidden|back).weight", "same.weight"]])}, "MismatchError", ["hidden.weight", "back.weight", "same.weight"]),
    "bad pattern": (Z1, {"setup": elastic(rename=[["(unclosed", ""]])}, "ConfigError", ["rename", "(unclosed"]),
    "bad replacement": (Z1, {"setup": elastic(rename=[["a", "\\2"]])}, "ConfigError", ["rename", "invalid group reference"]),
    "another variant": (Z1, {"setup": Setup(1, optimizer="adamw_amsgrad")}, "MismatchError", ["max_exp_avg_sq"]),
    "legacy elastic": (LEGACY, {}, "UnsupportedError", ["elastic_checkpoint"]),
    "custom_load_fn at another topology": (Z1, {"custom_load_fn": True}, "UnsupportedError", ["custom_load_fn"]),
}  # fmt: skip


def refused(
    name: str, saved: Save | tuple[Save, Save], ranks: int, case: dict[str, Any], expected: Any, change: Any = None
) -> Cell:
    """A load that must fail; into an engine as it was saved from it does not, but for two that none can load."""
    save, *others = saved if isinstance(saved, tuple) else (saved,)
    loadable = {SCRAMBLED.key: UNIVERSAL, LEGACY.key: Z1}.get(save.key, save)
    fits = (loadable, {"setup": loadable.setup})
    return Cell(name, save, "refusal_jobs.refuse", ranks, case, change, tuple(others), expected, fits)


#: Each by an engine in ZeRO-2 and one in ZeRO-3, or by the one that the case names.
CELLS = [
    refused(f"{name}, ZeRO-{stage}", save, 3, {"setup": Setup(stage)}, Refuses(error, tuple(words)), change)
    for name, (save, change, error, words) in DAMAGED.items()
    for stage in (2, 3)
] + [
    refused(f"{name}, ZeRO-{stage}", save, 3, {"setup": Setup(stage), **live}, Refuses(error, tuple(words)))
    for name, (save, live, error, words) in UNFIT.items()
    for stage in ((2,) if "setup" in live else (2, 3))
]


@cells(CELLS)
def test_what_must_not_be_loaded_is_named_on_all_ranks_and_nothing_changes(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


#: What an optimizer that only DeepSpeed knows asks for at the saved topology; the kind of error, and what it names.
LEFT: dict[str, tuple[Save, dict[str, Any], str, list[str]]] = {
    "groups in another order": (DIARY, {"setup": Setup(1, optimizer="diary", groups="reversed")}, "UnsupportedError", ["diary"]),
    "round robin now": (DIARY, {"setup": Setup(1, optimizer="diary", zero=ROUND_ROBIN)}, "UnsupportedError", ["diary"]),
    "another precision": (DIARY, {"setup": Setup(1, "bf16", optimizer="diary")}, "UnsupportedError", ["diary"]),
    "renames": (DIARY, {"setup": Setup(1, optimizer="diary", config=elastic(rename=[["^hidden", "hidden"]]).config)}, "UnsupportedError", ["diary"]),
    "not strict": (DIARY, {"setup": DIARY.setup, "model": "BufferedLM", "arguments": {"load_module_strict": False}}, "UnsupportedError", ["diary"]),
    "states of AdamW": (Z1, {"setup": Setup(1, optimizer="radam")}, "MismatchError", ["RAdam"]),
}  # fmt: skip


@cells(
    [refused(name, save, 2, case, Refuses(error, tuple(words))) for name, (save, case, error, words) in LEFT.items()]
)
def test_what_deepspeeds_own_loader_would_get_wrong_is_not_left_to_it(cell: Cell, facts: list[Refused]) -> None:
    """It gives masters and states by position."""
    cell.expected.check(facts)


def alone(name: str, job: str, save: Save, ranks: int = 2, **case: Any) -> list[Cell]:
    """A table of one."""
    return [Cell(name, save, job, ranks, case)]


@cells(alone("ZeRO-2", "refusal_jobs.break_reading", Z1, setup=Setup(2)))
def test_a_disk_that_fails_while_reading_is_an_error_on_all_ranks(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        (text,) = found.refused.texts
        assert "PartialLoadError" in found.refused.kinds
        assert "must not be trained or saved" in text and "Input/output error" in text
        assert found.differences == {}, "loaded again"


#: By engine, a private name that only the commit touches.
COMMITTED = {
    Setup(1): "optimizer.__class__.update_lp_params",
    Setup(2): "optimizer.__class__._restore_from_bit16_weights",
    Setup(3): "optimizer.parameter_offload.persistent_parameters",
}


@cells(
    [
        Cell(name, Z1, "refusal_jobs.without_a_name", 2, {"setup": required(setup), "owner_and_name": name})
        for setup, name in COMMITTED.items()
    ]
)
def test_an_engine_that_lacks_a_private_name_is_refused_before_anything_is_written(
    cell: Cell, facts: list[Any]
) -> None:
    (found,) = facts
    (text,) = found.refused.texts
    assert "UnsupportedError" in found.refused.kinds, text
    assert "lacks private names" in text and cell.name.rpartition(".")[2] in text
    assert f"DeepSpeed {deepspeed.__version__}" in text
    assert found.refused.changed == set() and found.differences == {}


@cells(alone("ZeRO-2", "refusal_jobs.diverge", Z1, setup=Setup(2)))
def test_ranks_that_ask_for_different_things_get_the_same_error(cell: Cell, facts: list[Refused]) -> None:
    asked = ["load_dir", "load_dir", "tag", "tag", "load_module_only", "mode"]
    for refusal, name in zip(facts, asked, strict=True):
        (text,) = refusal.texts
        assert "ConfigError" in refusal.kinds, text
        assert name in text and "rank 1" in text
        assert refusal.changed == set()


@cells(alone("ZeRO-2", "refusal_jobs.bad_scheduler", Z3, setup=Setup(2)))
def test_a_scheduler_that_fails_on_one_rank_is_taken_back_on_all(cell: Cell, facts: list[Any]) -> None:
    (found,) = facts
    (text,) = found.refused.texts
    assert "MismatchError" in found.refused.kinds and "load_lr_scheduler_states=False" in text
    assert "could not load the saved state" in text and "a key that this scheduler wants" in text
    assert found.refused.changed == set()
    assert found.step == 4, "without load_lr_scheduler_states it loads"


@cells(alone("SGD", "weights_only", Z1, ranks=3, setup=Setup(3, optimizer="sgd")))
def test_weights_alone_load_under_any_optimizer(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {}, load.where

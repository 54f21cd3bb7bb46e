"""Nothing that worked stops working: every configuration that users have, loaded at the topology that saved it.

Each is saved by DeepSpeed alone, and loaded by DeepSpeed alone and with elastic_ckpt installed. Where DeepSpeed's own
loader works, so must ours; where it restores something wrong, that is written down here, and ours may be right.

Not to be had on a CPU: ``zero_quantized_weights``, Lion and Lamb from the config, the ``fast`` checkpoint writer.
DeepSpeed 0.19.8 has no ``sparse_gradients`` and no ``curriculum_learning`` at the top level of the config any more.
Optimizers whose ops take long to build are met elsewhere: FusedAdam, and Muon with it (``test_optimizers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.conftest import SUB_GROUPS, Launch
from tests.distributed.odd_models import ODDITIES
from tests.distributed.unchanged_jobs import ODD_STATES

#: Why DeepSpeed's own loader runs.
DISKS, TWIN_FLOW = "each node has files of its own", "partly offloaded"
DIARY = "a layout that cannot be resharded"

CPU = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD = {"offload_param": {"device": "cpu"}, **CPU}
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}
NOT_ZIPPED = {"checkpoint": {"checkpoint_serialization": False}}
FP32_STATES = "bf16_masters_fp32_states"
OVERFLOWING = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
SCHEDULERS = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3},
}
LINEAR = {"schedule_type": "fixed_linear"}
CURRICULUM = {
    "enabled": True,
    "data_cluster_path": "clusters",
    "curriculum_metrics": {
        "seqlen": {
            **LINEAR,
            "clustering_type": "single_cluster",
            "difficulty_type": "value",
            "min_difficulty": 8,
            "max_difficulty": 16,
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
        }
    },
}
SAMPLING = {"data_sampling": {"enabled": True, "num_workers": 0, "curriculum_learning": CURRICULUM}}
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        **LINEAR,
        "min_value": 2,
        "max_value": 8,
        "schedule_config": {"require_steps": 6, "seq_per_step": 2},
    },
}
ROUTING = {"data_routing": {"enabled": True, "random_ltd": RANDOM_LTD}}
WITHOUT_STATES: dict[str, Any] = {"load_optimizer_states": False}
LOADS = [WITHOUT_STATES, {"load_module_only": True}, {"load_lr_scheduler_states": False}]
#: DeepSpeed's own gives groups the saved lr, from which a schedule that is not restored goes on; ours begins anew.
ANEW = [f"{part} {LOADS[2]}" for part in ("groups", "losses")]
NOT_STRICT = [{"load_module_strict": False}]

Cell = dict[str, Any]


def cells(name: str, stages: Sequence[int], precision: str = "fp32", **more: Any) -> list[Cell]:
    """A configuration at some ZeRO stages.

    Args:
        name: of the cells, with the stage behind it.
        stages: ZeRO stages.
        precision: a key of :data:`tests.distributed.model.PRECISIONS`.
        more: what differs from the plain case below.
    """
    plain = {
        # zero: entries of zero_optimization; config: top-level entries
        "zero": {},
        "config": {},
        "model": "TinyLM",
        "oddities": [],
        "optimizer": "adamw",
        "groups": "several",
        # init: built under zero.Init; sp: sequence-parallel degree; pending: micro-batches that wait for a step
        "init": False,
        "sp": 1,
        "pending": 0,
        "client": "plain",
        "exclude_frozen": False,
        # own_disk: each rank stands for a node, whose folder has the same name or ("named") another; loads: arguments; data: with a data loader; path: Path and tag=4
        "own_disk": False,
        "loads": [{}],
        "data": False,
        "path": False,
        # scheduler: of the user's own, with this kind of state
        "scheduler": "",
        # trained: steps before the load
        "trained": 0,
        # what DeepSpeed's own loader gets wrong; what ours does too; where they differ as they are known to
        "wrong": [],
        "wrong_too": [],
        "differ": [],
        # why DeepSpeed's own loader runs; empty: ours does
        "left": "",
    }
    return [{"name": f"{name}-z{stage}", "stage": stage, "precision": precision, **plain, **more} for stage in stages]


#: Oddities of a model that meet each other.
TOGETHER = [
    ["tie", "alias"],
    ["tie", "alias_of_a_tree", "buffers"],
    ["buffer_of_a_frozen_parameter", "alias_of_a_tree"],
    ["buffer_of_a_tree", "alias_of_a_tree"],
    ["frozen_tie", "shared_buffer", "alias_of_a_tree"],
    ["tie_of_three", "parameter_list", "alias_of_a_tree", "alias_before"],
    ["empty", "empty_tie", "empty_frozen", "alias"],
    ["empty_frozen_tie", "empty_buffers", "parameter_list", "alias_of_a_tree"],
]
ALL = (0, 1, 2, 3)
LOW_STATES = {"wrong": ["states", "losses"], "differ": ["states", "losses"]}  # which DeepSpeed rounds to the masters
TWO_RANKS = [
    *cells("fp32", [0, 2, 3]),
    *cells("bf16", ALL, "bf16"),
    *cells("fp16", [0, 2], "fp16"),
    *cells("overflow", [0, 1, 3], "fp16", config={"fp16": OVERFLOWING}),
    *cells("bf16-optimizer", [1], "bf16_fp32acc"),
    *cells("autocast", [0, 2, 3], config={"torch_autocast": AUTOCAST}),
    *cells("bf16-masters", [1, 3], "bf16_masters"),
    *cells("bf16-masters-fp32-states", [2, 3], FP32_STATES, optimizer="cpuadam", zero=CPU, **LOW_STATES),
    *cells("fp16-masters", [1, 3], "fp16_masters", optimizer="cpuadam", zero=CPU, **LOW_STATES),
    *cells("prescale", [0, 1], config={"prescale_gradients": True}),
    *cells("predivide", [0], config={"gradient_predivide_factor": 2.0}),
    *cells("predivide", [2], config={"gradient_predivide_factor": 2.0}, zero={"reduce_scatter": False}),
    *cells("prescale-predivide", [1], config={"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    *cells("clipping", [2], "bf16", config={"gradient_clipping": 0.1}),
    *cells("communication-dtype", [0, 2, 3], "bf16", config={"communication_data_type": "fp32"}),
    *cells("sparse-gradients", [0], model="SparseLM", optimizer="sparse"),
    *cells("accumulate", [0, 1, 3], config={"gradient_accumulation_steps": 2}),
    *cells("accumulating", [0, 2, 3], config={"gradient_accumulation_steps": 2}, pending=1),
    *cells("offload-optimizer", [1, 2], "bf16", zero=CPU),
    *cells("offload-param", [3], "bf16", zero=OFFLOAD),
    *cells("zero-init", [3], "bf16", init=True),
    *cells("zero-init-offload", [3], "bf16", init=True, zero=OFFLOAD),
    *cells("sub-groups", [3], "bf16", zero=dict(SUB_GROUPS)),
    *cells("gather-16bit", [3], "bf16", zero={"stage3_gather_16bit_weights_on_model_save": True}),
    *cells("no-prefetch", [3], "bf16", zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
    *cells("round-robin", [1, 2], "bf16", zero={"round_robin_gradients": True}),
    *cells("not-contiguous", [1, 2], zero={"contiguous_gradients": False}),
    *cells("overlap", [2], "bf16", zero={"overlap_comm": True, "reduce_bucket_size": 100}),
    *cells("ignore-unused", [1, 2], zero={"ignore_unused_parameters": True}),
    # which DeepSpeed saves and cannot load
    *cells("elastic-checkpoint", [1], "bf16", zero={"elastic_checkpoint": True}, wrong=["load"], wrong_too=["load"]),
    # whose masters DeepSpeed then takes from the low-precision weights: less than what was saved
    *cells(
        "not-from-fp32",
        [1, 2],
        "bf16",
        zero={"load_from_fp32_weights": False},
        wrong=["masters", "losses"],
        differ=["masters", "losses"],
    ),
    *cells("not-from-fp32", [3], "bf16", zero={"load_from_fp32_weights": False}),
    *cells("half-frozen", [0, 2, 3], "bf16", model="HalfFrozenLM"),
    *cells("lora", [1, 3], model="LoraLM"),
    *cells("lora-excluded", ALL, model="LoraLM", exclude_frozen=True, loads=NOT_STRICT),
    # what is empty cannot be trained in ZeRO-3
    *(
        cell
        for number, names in enumerate([*([each] for each in ODDITIES), *TOGETHER])
        for cell in cells("-".join(names), [number % (3 if "empty" in str(names) else 4)], oddities=names)
    ),
    *cells("rewind", [0, 1], "bf16", trained=2),
    *cells("rewind-buffer-of-a-parameter", [3], trained=2, oddities=["buffer_of_a_frozen_parameter"]),
    *cells("renamed-entry", [0], model="HookedLM", groups="split", left="neither parameters nor buffers"),
    *cells("renamed-entry-not-strict", [0], "bf16", model="HookedLM", left="neither parameters", loads=NOT_STRICT),
    *cells("path-and-number", [1, 3], path=True),
    *cells("tag-validation", [1], config={"checkpoint": {"tag_validation": "Fail"}}),
    *cells("parallel-write", [1, 3], config={"checkpoint": {"parallel_write": {"pipeline_stage": True}}}),
    *cells("node-local", [0, 1, 3], config=NODE_LOCAL),
    *cells("own-disk", ALL, "bf16", config=NODE_LOCAL, own_disk=True, left=DISKS),
    *cells("own-folder", [1, 3], config=NODE_LOCAL, own_disk="named", left=DISKS),
    *cells(
        "own-disk-lora",
        [0, 1, 3],
        config=NODE_LOCAL,
        own_disk=True,
        model="LoraLM",
        exclude_frozen=True,
        loads=NOT_STRICT,
        left=DISKS,
    ),
    *cells("not-zipped", ALL, "bf16", config=NOT_ZIPPED),
    *cells("not-zipped-fp16", [0, 1, 3], "fp16", config=NOT_ZIPPED),
    *cells("not-zipped-bf16-optimizer", [1], "bf16_fp32acc", config=NOT_ZIPPED),
    *cells("not-zipped-offload", [2, 3], "bf16", zero=CPU, config=NOT_ZIPPED),
    *cells("not-zipped-arguments", [1, 2], "bf16", loads=LOADS, differ=ANEW, config=NOT_ZIPPED),
    *cells(
        "not-zipped-lora",
        [0, 1, 3],
        model="LoraLM",
        exclude_frozen=True,
        loads=NOT_STRICT,
        config=NOT_ZIPPED,
    ),
    # DeepSpeed's loader of this writer cannot read what DeepSpeed puts into every file; ours can
    *cells("writer-python", [3], config={"checkpoint": {"writer": {"type": "python"}}}, wrong=["load"]),
    *(
        cell
        for stage, (name, params) in zip((1, 2, 3, 0, 1), SCHEDULERS.items(), strict=True)
        for cell in cells(name, [stage], config={"optimizer": ADAMW, "scheduler": {"type": name, "params": params}})
    ),
    *(
        cell
        for number, kind in enumerate(ODD_STATES)
        for cell in cells(f"scheduler-{kind}", [number % 4], scheduler=kind)
    ),
    *cells("config-AdamW", [0, 2, 3], "bf16", config={"optimizer": ADAMW}),
    *cells("config-SGD", [1], "bf16", config={"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}),
    *cells("unknown-optimizer", [1, 3], optimizer="diary", left=DIARY),
    *cells(
        "twin-flow",
        [3],
        "bf16",
        optimizer="cpuadam",
        zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 150},
        left=TWIN_FLOW,
    ),
    *cells("random-ltd", [1, 3], config={"data_efficiency": {"enabled": True, **ROUTING}}),
    # below ZeRO-3 the first rank's is saved alone
    *cells(
        "curriculum",
        [1],
        config={"data_efficiency": {"enabled": True, **SAMPLING}},
        data=True,
        wrong=["sampler"],
        wrong_too=["sampler"],
    ),
    *cells("curriculum", [3], config={"data_efficiency": {"enabled": True, **SAMPLING}}, data=True),
    *cells("arguments", [1, 2], "bf16", loads=LOADS, differ=ANEW),
    # DeepSpeed leaves masters behind that undo the weights at the next step
    *cells(
        "arguments",
        [0],
        "bf16",
        loads=LOADS,
        differ=[*ANEW, *(f"{part} {WITHOUT_STATES}" for part in ("masters", "losses"))],
    ),
    # and loads nothing at all
    *cells(
        "arguments",
        [3],
        "bf16",
        loads=LOADS,
        differ=[*ANEW, *(f"{part} {LOADS[1]}" for part in ("masters", "weights", "losses"))],
    ),
    # a class of the user's own is code that a file wants to run: the user must say so
    *cells("class-in-client-state", [1], client="class", wrong_too=["load"]),
    *cells(
        "class-in-client-state-trusted",
        [1, 3],
        client="class",
        config={"elastic_checkpoint": {"trust_pickle": True}},
    ),
]
FOUR_RANKS = [
    *cells("hpz", [3], "bf16", zero={"zero_hpz_partition_size": 2}),
    *cells("hpz-fp32", [3], zero={"zero_hpz_partition_size": 2}),
    *cells("sequence-parallel", [0, 1, 2, 3], "bf16", sp=2, config={"train_micro_batch_size_per_gpu": 6}),
]
CELLS = {cell["name"]: cell for cell in TWO_RANKS + FOUR_RANKS}


@pytest.fixture(scope="module")
def results(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was found in each cell, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for ranks, some in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        folder = tmp_path_factory.mktemp("unchanged")
        (of_all,) = launch(ranks, "unchanged_jobs.matrix", {"cells": some, "folder": str(folder)})
        found |= of_all
    return found


def test_every_cell_has_a_name_of_its_own() -> None:
    assert len(CELLS) == len(TWO_RANKS) + len(FOUR_RANKS)


@pytest.mark.parametrize("name", CELLS)
def test_what_deepspeed_loads_alone_loads_with_elastic_ckpt_too(name: str, results: dict[str, dict[str, Any]]) -> None:
    cell, found = CELLS[name], results[name]
    assert _now(found["a"]) == sorted(cell["wrong"]), found["a"]
    assert _now(found["b"]) == sorted(cell["wrong_too"]), found["b"]
    assert _now(found["between"]) == sorted(cell["differ"]), found["between"]
    lines = [line for line in found["lines"] if "DeepSpeed's own loader" in line]
    assert not any("DeepSpeed's own loader" in line for others in found["others"] for line in others), found["others"]
    if cell["left"]:
        assert found["by"] == "DeepSpeed"
        assert len(lines) == len(cell["loads"]) and all(cell["left"] in line for line in lines), found["lines"]
    elif "load" not in cell["wrong_too"]:
        assert found["by"] == "ours" and not lines, found["lines"]


def _now(parts: dict[str, str]) -> list[str]:
    """The parts that are wrong, but for what steps after the load leave, which is wrong only where losses are, too."""
    later = [part for part in parts if " later" in part]
    assert not later or any(part.startswith("losses") for part in parts), parts
    return sorted(parts.keys() - set(later))


def test_what_is_refused_for_its_code_says_how_to_trust_it(results: dict[str, dict[str, Any]]) -> None:
    text = results["class-in-client-state-z1"]["b"]["load"]
    assert "UnsafePickleError" in text and "Schedule" in text and '"trust_pickle": true' in text

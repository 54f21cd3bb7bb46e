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

from tests.distributed.cells import Cell, cells
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.odd_models import ODDITIES
from tests.distributed.unchanged_configurations import (
    ADAMW,
    ANEW,
    AUTOCAST,
    CPU,
    DIARY,
    DISKS,
    FP32_STATES,
    LOADS,
    NODE_LOCAL,
    NOT_STRICT,
    NOT_ZIPPED,
    OFFLOAD,
    OVERFLOWING,
    ROUTING,
    SAMPLING,
    SCHEDULERS,
    WITHOUT_STATES,
    Configuration,
    configurations,
)
from tests.distributed.unchanged_jobs import ODD_STATES

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
    *configurations("fp32", [0, 2, 3]),
    *configurations("bf16", ALL, "bf16"),
    *configurations("fp16", [0, 2], "fp16"),
    *configurations("overflow", [0, 1, 3], "fp16", config={"fp16": OVERFLOWING}),
    *configurations("bf16-optimizer", [1], "bf16_fp32acc"),
    *configurations("autocast", [0, 2, 3], config={"torch_autocast": AUTOCAST}),
    *configurations("bf16-masters", [1, 3], "bf16_masters"),
    *configurations("bf16-masters-fp32-states", [2, 3], FP32_STATES, optimizer="cpuadam", zero=CPU, **LOW_STATES),
    *configurations("fp16-masters", [1, 3], "fp16_masters", optimizer="cpuadam", zero=CPU, **LOW_STATES),
    *configurations("prescale", [0, 1], config={"prescale_gradients": True}),
    *configurations("predivide", [0], config={"gradient_predivide_factor": 2.0}),
    *configurations("predivide", [2], config={"gradient_predivide_factor": 2.0}, zero={"reduce_scatter": False}),
    *configurations("prescale-predivide", [1], config={"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    *configurations("clipping", [2], "bf16", config={"gradient_clipping": 0.1}),
    *configurations("communication-dtype", [0, 2, 3], "bf16", config={"communication_data_type": "fp32"}),
    *configurations("sparse-gradients", [0], model="SparseLM", optimizer="sparse"),
    *configurations("accumulate", [0, 1, 3], config={"gradient_accumulation_steps": 2}),
    *configurations("accumulating", [0, 2, 3], config={"gradient_accumulation_steps": 2}, pending=1),
    *configurations("offload-optimizer", [1, 2], "bf16", zero=CPU),
    *configurations("offload-param", [3], "bf16", zero=OFFLOAD),
    *configurations("zero-init", [3], "bf16", init=True),
    *configurations("zero-init-offload", [3], "bf16", init=True, zero=OFFLOAD),
    *configurations("sub-groups", [3], "bf16", zero=dict(SUB_GROUPS)),
    *configurations("gather-16bit", [3], "bf16", zero={"stage3_gather_16bit_weights_on_model_save": True}),
    *configurations(
        "no-prefetch", [3], "bf16", zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    ),
    *configurations("round-robin", [1, 2], "bf16", zero={"round_robin_gradients": True}),
    *configurations("not-contiguous", [1, 2], zero={"contiguous_gradients": False}),
    *configurations("overlap", [2], "bf16", zero={"overlap_comm": True, "reduce_bucket_size": 100}),
    *configurations("ignore-unused", [1, 2], zero={"ignore_unused_parameters": True}),
    # which DeepSpeed saves and cannot load
    *configurations(
        "elastic-checkpoint", [1], "bf16", zero={"elastic_checkpoint": True}, wrong=["load"], wrong_too=["load"]
    ),
    # whose masters DeepSpeed then takes from the low-precision weights: less than what was saved
    *configurations(
        "not-from-fp32",
        [1, 2],
        "bf16",
        zero={"load_from_fp32_weights": False},
        wrong=["masters", "losses"],
        differ=["masters", "losses"],
    ),
    *configurations("not-from-fp32", [3], "bf16", zero={"load_from_fp32_weights": False}),
    *configurations("half-frozen", [0, 2, 3], "bf16", model="HalfFrozenLM"),
    *configurations("lora", [1, 3], model="LoraLM"),
    *configurations("lora-excluded", ALL, model="LoraLM", exclude_frozen=True, loads=NOT_STRICT),
    # what is empty cannot be trained in ZeRO-3
    *(
        each
        for number, names in enumerate([*([each] for each in ODDITIES), *TOGETHER])
        for each in configurations("-".join(names), [number % (3 if "empty" in str(names) else 4)], oddities=names)
    ),
    *configurations("rewind", [0, 1], "bf16", trained=2),
    *configurations("rewind-buffer-of-a-parameter", [3], trained=2, oddities=["buffer_of_a_frozen_parameter"]),
    *configurations("renamed-entry", [0], model="HookedLM", groups="split", left="neither parameters nor buffers"),
    *configurations(
        "renamed-entry-not-strict", [0], "bf16", model="HookedLM", left="neither parameters", loads=NOT_STRICT
    ),
    *configurations("path-and-number", [1, 3], path=True),
    *configurations("tag-validation", [1], config={"checkpoint": {"tag_validation": "Fail"}}),
    *configurations("parallel-write", [1, 3], config={"checkpoint": {"parallel_write": {"pipeline_stage": True}}}),
    *configurations("node-local", [0, 1, 3], config=NODE_LOCAL),
    *configurations("own-disk", ALL, "bf16", config=NODE_LOCAL, own_disk=True, left=DISKS),
    *configurations("own-folder", [1, 3], config=NODE_LOCAL, own_disk="named", left=DISKS),
    *configurations(
        "own-disk-lora",
        [0, 1, 3],
        config=NODE_LOCAL,
        own_disk=True,
        model="LoraLM",
        exclude_frozen=True,
        loads=NOT_STRICT,
        left=DISKS,
    ),
    *configurations("not-zipped", ALL, "bf16", config=NOT_ZIPPED),
    *configurations("not-zipped-fp16", [0, 1, 3], "fp16", config=NOT_ZIPPED),
    *configurations("not-zipped-bf16-optimizer", [1], "bf16_fp32acc", config=NOT_ZIPPED),
    *configurations("not-zipped-offload", [2, 3], "bf16", zero=CPU, config=NOT_ZIPPED),
    *configurations("not-zipped-arguments", [1, 2], "bf16", loads=LOADS, differ=ANEW, config=NOT_ZIPPED),
    *configurations(
        "not-zipped-lora",
        [0, 1, 3],
        model="LoraLM",
        exclude_frozen=True,
        loads=NOT_STRICT,
        config=NOT_ZIPPED,
    ),
    # DeepSpeed's loader of this writer cannot read what DeepSpeed puts into every file; ours can
    *configurations("writer-python", [3], config={"checkpoint": {"writer": {"type": "python"}}}, wrong=["load"]),
    *(
        each
        for stage, (name, params) in zip((1, 2, 3, 0, 1), SCHEDULERS.items(), strict=True)
        for each in configurations(
            name, [stage], config={"optimizer": ADAMW, "scheduler": {"type": name, "params": params}}
        )
    ),
    *(
        each
        for number, kind in enumerate(ODD_STATES)
        for each in configurations(f"scheduler-{kind}", [number % 4], scheduler=kind)
    ),
    *configurations("config-AdamW", [0, 2, 3], "bf16", config={"optimizer": ADAMW}),
    *configurations("config-SGD", [1], "bf16", config={"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}),
    *configurations("unknown-optimizer", [1, 3], optimizer="diary", left=DIARY),
    *configurations(
        "twin-flow",
        [3],
        "bf16",
        optimizer="cpuadam",
        zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 150},
    ),
    *configurations("random-ltd", [1, 3], config={"data_efficiency": {"enabled": True, **ROUTING}}),
    # below ZeRO-3 the first rank's is saved alone
    *configurations(
        "curriculum",
        [1],
        config={"data_efficiency": {"enabled": True, **SAMPLING}},
        data=True,
        wrong=["sampler"],
        wrong_too=["sampler"],
    ),
    *configurations("curriculum", [3], config={"data_efficiency": {"enabled": True, **SAMPLING}}, data=True),
    *configurations("arguments", [1, 2], "bf16", loads=LOADS, differ=ANEW),
    # DeepSpeed leaves masters behind that undo the weights at the next step
    *configurations(
        "arguments",
        [0],
        "bf16",
        loads=LOADS,
        differ=[*ANEW, *(f"{part} {WITHOUT_STATES}" for part in ("masters", "losses"))],
    ),
    # and loads nothing at all
    *configurations(
        "arguments",
        [3],
        "bf16",
        loads=LOADS,
        differ=[*ANEW, *(f"{part} {LOADS[1]}" for part in ("masters", "weights", "losses"))],
    ),
    # a class of the user's own is code that a file wants to run: the user must say so
    *configurations("class-in-client-state", [1], client="class", wrong_too=["load"]),
    *configurations(
        "class-in-client-state-trusted",
        [1, 3],
        client="class",
        config={"elastic_checkpoint": {"trust_pickle": True}},
    ),
]
FOUR_RANKS = [
    *configurations("hpz", [3], "bf16", zero={"zero_hpz_partition_size": 2}),
    *configurations("hpz-fp32", [3], zero={"zero_hpz_partition_size": 2}),
    *configurations("sequence-parallel", [0, 1, 2, 3], "bf16", sp=2, config={"train_micro_batch_size_per_gpu": 6}),
]


def compared(ranks: int, table: Sequence[Configuration]) -> list[Cell]:
    """Each is saved and loaded by a job of so many ranks."""
    return [
        Cell(each["name"], None, "unchanged_jobs.compare", ranks, each, fits=(None, {**each, "zero": {}}))
        for each in table
    ]


@cells(compared(2, TWO_RANKS) + compared(4, FOUR_RANKS))
def test_what_deepspeed_loads_alone_loads_with_elastic_ckpt_too(cell: Cell, facts: list[Any]) -> None:
    (found,), wanted = facts, cell.case
    assert _now(found["a"]) == sorted(wanted["wrong"]), found["a"]
    assert _now(found["b"]) == sorted(wanted["wrong_too"]), found["b"]
    assert _now(found["between"]) == sorted(wanted["differ"]), found["between"]
    lines = [line for line in found["lines"] if "DeepSpeed's own loader" in line]
    assert not any("DeepSpeed's own loader" in line for others in found["others"] for line in others), found["others"]
    if wanted["left"]:
        assert found["by"] == "DeepSpeed"
        assert len(lines) == len(wanted["loads"]) and all(wanted["left"] in line for line in lines), found["lines"]
    elif "load" not in wanted["wrong_too"]:
        assert found["by"] == "ours" and not lines, found["lines"]
    if "load" in found["b"] and wanted["client"] == "class":
        text = found["b"]["load"]
        assert "UnsafePickleError" in text and "Schedule" in text and '"trust_pickle": true' in text


def _now(parts: dict[str, str]) -> list[str]:
    """The parts that are wrong, but for what steps after the load leave, which is wrong only where losses are, too."""
    later = [part for part in parts if " later" in part]
    assert not later or any(part.startswith("losses") for part in parts), parts
    return sorted(parts.keys() - set(later))

"""Configurations of engines that are saved, and loaded at the same topology: entries of DeepSpeed configs, and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Why DeepSpeed's own loader runs.
DISKS = "each node has files of its own"
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

Configuration = dict[str, Any]


def configurations(name: str, stages: Sequence[int], precision: str = "fp32", **more: Any) -> list[Configuration]:
    """A configuration at some ZeRO stages.

    Args:
        name: of the configurations, with the stage behind it.
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

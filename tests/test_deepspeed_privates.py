"""DeepSpeed's private names that engines/ and formats/ lean on: this notices when a release moves them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo, OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero.partition_parameters import Init, NoGatherCoalescedHandle, NoGatherHandle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import elastic_ckpt

PACKAGE = Path(elastic_ckpt.__file__).parent
USED = {
    DeepSpeedZeroOptimizer: [
        "bit16_groups",
        "averaged_gradients",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "partition_size",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
        "real_dp_process_group",
        "dp_process_group",
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "_restore_from_bit16_weights",
        "update_lp_params",
        "cpu_offload",
        "flatten_dense_tensors_aligned",
        "loss_scaler",
        "overflow",
    ],
    DeepSpeedZeroOptimizer_Stage3: [
        "fp16_groups",
        "fp16_partitioned_groups",
        "fp16_partitioned_groups_flat",
        "fp32_partitioned_groups_flat",
        "sub_group_to_group_id",
        "persistent_parameters",
        "checkpoint_event_prologue",
        "checkpoint_event_epilogue",
        "refresh_fp32_params",
        "swap_optimizer",
        "params_in_nvme_and_cpu",
        "_swappable_optimizer_subgroup",
        "_optimizer_states_and_gradient_swap_in",
        "_reassign_or_swap_out_partitioned_parameters",
        "fp16_partitioned_groups_flat_numel",
        "optimizer_swapper",
        "averaged_gradients",
        "use_muon",
        "save_muon_momentum_buffer_in_memory",
        "__avg_scatter_grads",
        "reduce_scatter_coalesced",
        "unflatten",
        "dp_process_group",
    ],
    BF16_Optimizer: [
        "bf16_groups",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_has_gradients",
        "_flatten_dense_tensors_aligned",
        "real_dp_process_group",
        "dp_process_group",
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "_restore_from_bit16_weights",
        "update_lp_params",
    ],
    FP16_UnfusedOptimizer: ["fp16_groups", "fp32_groups", "refresh_fp32_params", "loss_scale_config", "overflow"],
    FP16_Optimizer: ["fp16_groups", "fp32_groups_flat", "refresh_fp32_params", "loss_scale_config", "overflow"],
    LossScaleConfig: [
        "dynamic_loss_scale",
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
    ],
    DynamicLossScaler: ["dynamic", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "min_scale"],
    Init: [
        "_padding_size",
        "_partition_world_size",
        "_aligned_size",
        "_dist_allgather_fn",
        "ds_tensor",
        "ds_numel",
        "ds_secondary_tensor",
        "all_gather_coalesced",
    ],
    NoGatherHandle: ["__param", "__complete"],
    NoGatherCoalescedHandle: ["__params", "__complete"],
    OptimizerSwapper: ["swap_params_info", "is_swappable_tensor"],
    OptimizerStateSwapInfo: ["tensors", "has_state_tensors"],
    PartitionedOptimizerSwapper: ["swap_out_optimizer_state", "swap_in_optimizer_state"],
    PipelinedOptimizerSwapper: ["swap_out_optimizer_state", "swap_in_optimizer_state"],
    DeepSpeedEngine: [
        "seq_data_parallel_group",
        "_configure_zero_optimizer",
        "_get_zero_param_shapes",
        "num_experts",
        "fp16_enabled",
        "param_names",
        "mp_world_size",
        "seq_dp_world_size",
        "has_moe_layers",
        "zero_nvme_offload_optimizer",
        "loaded_checkpoint_dp_world_size",
        "loaded_checkpoint_mp_world_size",
        "random_ltd_enabled",
        "curriculum_learning_enabled",
        "load_universal_checkpoint",
        "_config",
    ],
}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in USED.items() for name in names])
def test_deepspeed_still_has(owner: type, name: str) -> None:
    assert re.search(rf"\b{name}\b", inspect.getsource(owner)), f"{owner.__name__} no longer mentions {name}"


def test_private_attributes_of_deepspeed_are_touched_in_engines_and_formats_only() -> None:
    private = re.compile(r"\b(?:engine|optimizer|param|scaler)\._[a-z]")
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("engines", "formats"):
            assert not private.search(path.read_text(encoding="utf-8")), path


def test_the_planner_and_its_data_import_nothing_that_touches_the_world() -> None:
    for name in (
        "geometry",
        "catalog",
        "destinations",
        "plan",
        "planner",
        "plan_builder",
        "coded",
        "matching",
        "state_matching",
        "saved_state_checks",
        "optimizer_kinds",
        "states/kinds",
        "groups",
        "renaming",
        "shares",
        "dtypes",
    ):
        source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^(?:import|from) (?:torch|deepspeed|os)\b", source, re.MULTILINE), name

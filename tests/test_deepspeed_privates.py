"""DeepSpeed's private names that engines/ and formats/ lean on: this notices when a release moves them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine import DataStatesCheckpointEngine, DecoupledCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo, OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init, NoGatherCoalescedHandle, NoGatherHandle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import elastic_ckpt
from tests.source import code_of, names_in

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
        "parameter_offload",
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
    DeepSpeedZeRoOffload: ["partition_all_parameters", "persistent_parameters"],
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
        "_aligned_size",
        "_dist_allgather_fn",
        "ds_tensor",
        "ds_tensor.status",
        "ds_tensor.final_location",
        "ds_shape",
        "ds_numel",
        "ds_secondary_tensor",
        "ds_process_group",
        "all_gather_coalesced",
    ],
    NoGatherHandle: ["param.ds_tensor.data"],
    NoGatherCoalescedHandle: ["param.ds_tensor.data"],
    OptimizerSwapper: ["swap_params_info", "is_swappable_tensor"],
    OptimizerStateSwapInfo: ["tensors", "has_state_tensors"],
    PartitionedOptimizerSwapper: ["swap_out_optimizer_state", "swap_in_optimizer_state"],
    PipelinedOptimizerSwapper: ["swap_out_optimizer_state", "swap_in_optimizer_state"],
    DecoupledCheckpointEngine: ["is_decoupled", "commit_info", "ckpt_process"],
    DataStatesCheckpointEngine: ["is_decoupled", "commit_info"],
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
        "checkpoint_engine",
        "_commit_decoupled_checkpoint",
    ],
}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in USED.items() for name in names])
def test_deepspeed_still_has(owner: type, name: str) -> None:
    assert name in names_in(code_of(owner)), f"{owner.__name__} no longer has {name}"


def _private_attributes(source: str) -> list[str]:
    """Attributes with one leading underscore that are not of ``self``, ``cls`` or an imported module of the package."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls", *modules}:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_privates_of_other_packages_are_touched_in_engines_and_patches_only() -> None:
    """What torch's archives need (``_checkpoint_offset``) is in ``formats/pickled.py`` until it has a reader of its own."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("engines", "patches") and path.name != "pickled.py":
            assert _private_attributes(path.read_text(encoding="utf-8")) == [], path


def test_the_guard_sees_privates_whatever_the_variable_is_called() -> None:
    assert _private_attributes("module._layer_specs") == ["line 1: module._layer_specs"]
    assert _private_attributes("engine.optimizer._hp_mapping") != []
    assert _private_attributes("self._mine + cls._ours + x.__dict__") == []


@pytest.mark.parametrize("room", ["core", "sharding", "planning"])
def test_pure_rooms_can_be_imported_without_torch_and_deepspeed(room: str) -> None:
    script = (
        "import sys, pkgutil, importlib\n"
        "for name in ('torch', 'deepspeed'): sys.modules[name] = None\n"
        f"import elastic_ckpt.{room} as package\n"
        "names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "assert names, package\n"
        "[importlib.import_module(name) for name in names]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

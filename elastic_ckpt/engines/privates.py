"""The private names of DeepSpeed that elastic_ckpt uses, and which of them an installed version lacks."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from packaging.version import Version


@dataclass(frozen=True)
class Privates:
    """Names that a class or module of DeepSpeed must define, call or touch.

    Attributes:
        module: below ``deepspeed.``
        owner: class, or empty for the module itself.
        names: attributes and functions; of a function that is called or wrapped, with its first parameters:
            ``update(index)``.
        since: the first version that has them; :mod:`elastic_ckpt.engines.compat` does without them before.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = "0"

    def load(self) -> Any:
        """The class or module."""
        module = importlib.import_module(f"deepspeed.{self.module}")
        return getattr(module, self.owner) if self.owner else module

    def missing(self) -> list[str]:
        """Those that the installed version lacks, with their owner."""
        owner = self.owner or self.module
        try:
            code = textwrap.dedent(inspect.getsource(self.load()))
        except (ImportError, AttributeError):
            return [f"deepspeed.{self.module}{self.owner and '.'}{self.owner}"]
        found, functions = names_in(code), parameters_in(code)
        lacking = []
        for name in self.names:
            plain, _, asked = name.partition("(")
            wanted = [each.strip() for each in asked.removesuffix(")").split(",") if each.strip()]
            fits = not asked or any(has[: len(wanted)] == wanted for has in functions.get(plain, ()))
            if plain not in found or not fits:
                lacking.append(f"{owner}.{name}")
        return lacking


PRIVATES = (
    Privates(
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        (
            "bit16_groups",
            "averaged_gradients",
            "round_robin_bit16_groups",
            "partition_size",
            "single_partition_of_fp32_groups",
            "parallel_partitioned_bit16_groups",
            "real_dp_process_group",
            "dp_process_group",
            "_hp_optimizer_states_linked",
            "_lazy_init_hp_params_optimizer_state()",
            "_restore_from_bit16_weights()",
            "update_lp_params()",
            "cpu_offload",
            "flatten_dense_tensors_aligned(tensor_list, alignment)",
            "loss_scaler",
            "overflow",
        ),
    ),
    Privates("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ("round_robin_bit16_offsets",), since="0.19.7"),
    Privates(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        (
            "fp16_groups",
            "fp16_partitioned_groups",
            "fp16_partitioned_groups_flat",
            "fp32_partitioned_groups_flat",
            "sub_group_to_group_id",
            "parameter_offload",
            "refresh_fp32_params()",
            "swap_optimizer",
            "params_in_nvme_and_cpu",
            "_swappable_optimizer_subgroup(sub_group_id)",
            "_optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)",
            "_reassign_or_swap_out_partitioned_parameters(sub_group_id)",
            "fp16_partitioned_groups_flat_numel",
            "optimizer_swapper",
            "averaged_gradients",
            "__avg_scatter_grads(params_to_reduce)",
            "reduce_scatter_coalesced",
            "unflatten",
            "dp_process_group",
        ),
    ),
    Privates(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        ("use_muon", "save_muon_momentum_buffer_in_memory"),
        since="0.18",
    ),
    Privates(
        "runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload",
        ("partition_all_parameters()", "persistent_parameters"),
    ),
    Privates(
        "runtime.bf16_optimizer",
        "BF16_Optimizer",
        (
            "bf16_groups",
            "bf16_partitioned_groups",
            "fp32_groups_flat_partition",
            "fp32_groups_has_gradients",
            "_flatten_dense_tensors_aligned(tensor_list, alignment)",
            "real_dp_process_group",
            "dp_process_group",
            "_hp_optimizer_states_linked",
            "_lazy_init_hp_params_optimizer_state()",
            "_restore_from_bit16_weights()",
            "update_lp_params()",
        ),
    ),
    Privates(
        "runtime.fp16.unfused_optimizer",
        "FP16_UnfusedOptimizer",
        ("fp16_groups", "fp32_groups", "refresh_fp32_params()", "overflow"),
    ),
    Privates(
        "runtime.fp16.fused_optimizer",
        "FP16_Optimizer",
        ("fp16_groups", "fp32_groups_flat", "refresh_fp32_params()", "overflow"),
    ),
    Privates("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", ("loss_scale_config",), since="0.18"),
    Privates("runtime.fp16.fused_optimizer", "FP16_Optimizer", ("loss_scale_config",), since="0.18"),
    Privates(
        "runtime.fp16.loss_scaler",
        "LossScaleConfig",
        ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
        since="0.18",
    ),
    Privates(
        "runtime.fp16.loss_scaler",
        "DynamicLossScaler",
        ("dynamic", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "min_scale"),
    ),
    Privates(
        "runtime.zero.partition_parameters",
        "Init",
        (
            "_padding_size(param)",
            "_partition_param(param)",
            "_aligned_size",
            "_dist_allgather_fn",
            "ds_tensor",
            "ds_tensor.status",
            "ds_tensor.final_location",
            "ds_shape",
            "ds_numel",
            "ds_secondary_tensor",
            "ds_process_group",
            "all_gather(param_list)",
            "all_gather_coalesced(params)",
        ),
    ),
    Privates("runtime.zero.partition_parameters", "NoGatherHandle", ("param.ds_tensor.data",)),
    Privates("runtime.zero.partition_parameters", "NoGatherCoalescedHandle", ("param.ds_tensor.data",)),
    Privates("runtime.zero.partition_parameters", "", ("_dist_allgather_fn(input_tensor, output_tensor, group)",)),
    Privates("runtime.comm.coalesced_collectives", "", ("reduce_scatter_coalesced(tensors, group)",)),
    Privates("runtime.torch_autocast", "", ("has_comm_dtype(param)",), since="0.17"),
    Privates("runtime.swap_tensor.optimizer_utils", "OptimizerSwapper", ("swap_params_info",)),
    Privates("runtime.swap_tensor.optimizer_utils", "OptimizerStateSwapInfo", ("tensors", "has_state_tensors")),
    Privates(
        "runtime.swap_tensor.partitioned_optimizer_swapper",
        "PartitionedOptimizerSwapper",
        ("swap_out_optimizer_state(parameter, async_swap)", "swap_in_optimizer_state"),
    ),
    Privates(
        "runtime.swap_tensor.pipelined_optimizer_swapper",
        "PipelinedOptimizerSwapper",
        ("swap_out_optimizer_state(parameter, async_swap)", "swap_in_optimizer_state"),
    ),
    Privates(
        "runtime.checkpoint_engine.decoupled_checkpoint_engine",
        "DecoupledCheckpointEngine",
        ("is_decoupled()", "commit_info", "ckpt_process"),
        since="0.18",
    ),
    Privates(
        "runtime.checkpoint_engine.datastates_checkpoint_engine",
        "DataStatesCheckpointEngine",
        ("is_decoupled()", "commit_info"),
        since="0.18",
    ),
    Privates("runtime.engine", "DeepSpeedEngine", ("_commit_decoupled_checkpoint()",), since="0.18"),
    Privates(
        "runtime.pipe.module",
        "PipelineModule",
        ("_partition_layers(method)", "_layer_specs", "_topo", "_set_bounds(start, stop)", "parts"),
    ),
    Privates(
        "runtime.pipe.module",
        "PipelineModule",
        ("tied_weight_attrs",),
    ),
    Privates(
        "moe.layer",
        "MoE",
        ("expert_group_name", "num_local_experts", "deepspeed_moe", "enable_expert_tensor_parallelism"),
    ),
    Privates("moe.experts", "Experts", ("deepspeed_experts",)),
    Privates(
        "utils.groups",
        "",
        (
            "_get_expert_parallel_rank(group_name)",
            "_get_expert_parallel_world_size(group_name)",
            "_get_max_expert_size_name()",
        ),
    ),
    Privates(
        "runtime.engine",
        "DeepSpeedEngine",
        (
            "load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
            "load_module_only, custom_load_fn)",
            "_configure_zero_optimizer(optimizer)",
            "_configure_bf16_optimizer(optimizer)",
            "_get_zero_param_shapes()",
            "seq_data_parallel_group",
            "num_experts",
            "fp16_enabled",
            "param_names",
            "mp_world_size",
            "seq_dp_world_size",
            "sequence_parallel_size",
            "has_moe_layers",
            "loaded_checkpoint_dp_world_size",
            "loaded_checkpoint_mp_world_size",
            "random_ltd_enabled",
            "curriculum_learning_enabled",
            "load_universal_checkpoint",
            "use_node_local_storage",
            "_config",
            "checkpoint_engine",
        ),
    ),
)


def needed() -> list[Privates]:
    """Those that the installed version of DeepSpeed must have."""
    found = Version(version("deepspeed"))
    return [each for each in PRIVATES if Version(each.since).release <= found.release]


def missing() -> list[str]:
    """Names that the installed version of DeepSpeed lacks. Imports DeepSpeed and parses its sources."""
    return [name for each in needed() for name in each.missing()]


@cache
def names_in(code: str) -> frozenset[str]:
    """What code defines, calls and touches: functions, fields, attributes, and their ends: ``b.c`` of ``a.b.c``."""
    return frozenset(name for node in ast.walk(ast.parse(code)) for name in _names_of(node))


def _names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        parts = ast.unparse(node).split(".")
        yield from (".".join(parts[start:]) for start in range(len(parts)))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id
    elif isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@cache
def parameters_in(code: str) -> dict[str, list[list[str]]]:
    """Parameters of each function that code defines, without ``self``; more than one if the name is reused."""
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            names = [each.arg for each in node.args.args]
            found.setdefault(node.name, []).append(names[1:] if names[:1] == ["self"] else names)
    return found

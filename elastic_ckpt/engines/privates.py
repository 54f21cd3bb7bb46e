"""The private names of DeepSpeed that elastic_ckpt uses, and which of them an installed version or an engine lacks."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from packaging.version import Version

from elastic_ckpt.errors import UnsupportedError

#: What names are needed for: ``install()``, every load into an engine that has their owner, and some loads alone.
INSTALL, LOAD, ZERO3, NVME, EXPERTS = "install()", "loading", "ZeRO-3", "NVMe offload", "mixtures of experts"


@dataclass(frozen=True)
class Privates:
    """Names that a class or module of DeepSpeed must define, call or touch.

    Attributes:
        module: below ``deepspeed.``
        owner: class, or empty for the module itself.
        names: attributes and functions; of a function that is called or wrapped, with its first parameters:
            ``update(index)``.
        since: the first version that has them; :mod:`elastic_ckpt.engines.compat` does without them before.
        use: what they are needed for.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = "0"
    use: str = LOAD

    def load(self) -> Any:
        """The class or module."""
        module = importlib.import_module(f"deepspeed.{self.module}")
        return getattr(module, self.owner) if self.owner else module

    def missing(self) -> list[str]:
        """Those that the installed version lacks, with their owner; none if its sources are not installed."""
        owner = self.owner or self.module
        try:
            code = textwrap.dedent(inspect.getsource(self.load()))
        except (ImportError, AttributeError):
            return [f"deepspeed.{self.module}{self.owner and '.'}{self.owner}"]
        except OSError:  # an engine's own objects still show them
            return []
        found, functions = names_in(code), parameters_in(code)
        lacking = []
        for name in self.names:
            plain, wanted = _parts(name)
            fits = wanted is None or any(has[: len(wanted)] == wanted for has in functions.get(plain, ()))
            if plain not in found or not fits:
                lacking.append(f"{owner}.{name}")
        return lacking

    def missing_in(self, live: Any) -> list[str]:
        """Those that a live object lacks, with their owner."""
        return [f"{self.owner or self.module}.{name}" for name in self.names if not _has(live, *_parts(name))]


def _parts(name: str) -> tuple[str, list[str] | None]:
    """A name without its parameters, and these; ``None``: any."""
    plain, is_function, asked = name.partition("(")
    return plain, [each for each in asked.removesuffix(")").split(", ") if each] if is_function else None


def _has(live: Any, plain: str, wanted: list[str] | None) -> bool:
    try:
        found = attrgetter(plain)(live)
    except AttributeError:
        return False
    parameters = [] if wanted is None else list(inspect.signature(found).parameters.values())
    is_wrapped = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    return not wanted or is_wrapped or [each.name for each in parameters][: len(wanted)] == wanted


PRIVATES = (
    Privates(
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        (
            "bit16_groups",
            "averaged_gradients",
            "micro_step_id",
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
            "loss_scaler",
            "overflow",
        ),
    ),
    Privates("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ("round_robin_bit16_offsets",), since="0.19.7"),
    Privates("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ("all_grad_tensors",), since="0.17.6"),
    Privates("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", ("_epilogue_ran_this_backward",), since="0.18.5"),
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
            "averaged_gradients",
            "micro_step_id",
            "unflatten",
            "dp_process_group",
        ),
    ),
    Privates(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        ("use_muon", "save_muon_momentum_buffer_in_memory"),
        since="0.18.9",
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
    Privates("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", ("loss_scale_config",), since="0.18.6"),
    Privates("runtime.fp16.fused_optimizer", "FP16_Optimizer", ("loss_scale_config",), since="0.18.6"),
    Privates(
        "runtime.fp16.loss_scaler",
        "LossScaleConfig",
        ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
        since="0.18.6",
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
    Privates("runtime.torch_autocast", "", ("has_comm_dtype(param)",), since="0.17.6", use=ZERO3),
    Privates(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        (
            "_swappable_optimizer_subgroup(sub_group_id)",
            "_optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)",
            "_reassign_or_swap_out_partitioned_parameters(sub_group_id)",
            "fp16_partitioned_groups_flat_numel",
            "optimizer_swapper",
        ),
        use=NVME,
    ),
    Privates("runtime.swap_tensor.optimizer_utils", "OptimizerSwapper", ("swap_params_info",), use=NVME),
    Privates(
        "runtime.swap_tensor.optimizer_utils", "OptimizerStateSwapInfo", ("tensors", "has_state_tensors"), use=NVME
    ),
    Privates(
        "runtime.swap_tensor.partitioned_optimizer_swapper",
        "PartitionedOptimizerSwapper",
        ("swap_out_optimizer_state(parameter, async_swap)", "swap_in_optimizer_state"),
        use=NVME,
    ),
    Privates(
        "runtime.swap_tensor.pipelined_optimizer_swapper",
        "PipelinedOptimizerSwapper",
        ("swap_out_optimizer_state(parameter, async_swap)", "swap_in_optimizer_state"),
        use=NVME,
    ),
    Privates(
        "runtime.checkpoint_engine.decoupled_checkpoint_engine",
        "DecoupledCheckpointEngine",
        ("is_decoupled()", "commit_info", "ckpt_process"),
        since="0.17.1",
    ),
    Privates(
        "runtime.checkpoint_engine.datastates_checkpoint_engine",
        "DataStatesCheckpointEngine",
        ("is_decoupled()", "commit_info"),
        since="0.18.1",
    ),
    Privates("runtime.engine", "DeepSpeedEngine", ("_commit_decoupled_checkpoint()",), since="0.17.1"),
    Privates(
        "runtime.pipe.module",
        "PipelineModule",
        ("_partition_layers(method)", "_layer_specs", "_topo", "_set_bounds(start, stop)", "parts"),
        use=INSTALL,
    ),
    Privates("runtime.pipe.module", "PipelineModule", ("tied_weight_attrs",)),
    Privates(
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        ("flatten_dense_tensors_aligned(tensor_list, alignment)",),
        use=INSTALL,
    ),
    Privates(
        "runtime.bf16_optimizer",
        "BF16_Optimizer",
        ("_flatten_dense_tensors_aligned(tensor_list, alignment)",),
        use=INSTALL,
    ),
    Privates(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        ("__avg_scatter_grads(params_to_reduce)", "reduce_scatter_coalesced"),
        use=INSTALL,
    ),
    Privates(
        "runtime.zero.partition_parameters",
        "Init",
        ("_padding_size(param)", "_partition_param(param)", "_aligned_size", "_dist_allgather_fn"),
        use=INSTALL,
    ),
    Privates("runtime.zero.partition_parameters", "NoGatherHandle", ("param.ds_tensor.data",), use=INSTALL),
    Privates("runtime.zero.partition_parameters", "NoGatherCoalescedHandle", ("param.ds_tensor.data",), use=INSTALL),
    Privates(
        "runtime.zero.partition_parameters",
        "",
        ("_dist_allgather_fn(input_tensor, output_tensor, group)",),
        use=INSTALL,
    ),
    Privates("runtime.comm.coalesced_collectives", "", ("reduce_scatter_coalesced(tensors, group)",), use=INSTALL),
    Privates(
        "moe.layer",
        "MoE",
        ("expert_group_name", "num_local_experts", "deepspeed_moe", "enable_expert_tensor_parallelism"),
        use=EXPERTS,
    ),
    Privates("moe.experts", "Experts", ("deepspeed_experts",), use=EXPERTS),
    Privates(
        "utils.groups",
        "",
        (
            "_get_expert_parallel_rank(group_name)",
            "_get_expert_parallel_world_size(group_name)",
            "_get_max_expert_size_name()",
        ),
        use=EXPERTS,
    ),
    Privates(
        "runtime.engine",
        "DeepSpeedEngine",
        (
            "load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
            "load_module_only, custom_load_fn)",
            "_configure_zero_optimizer(optimizer)",
            "_configure_bf16_optimizer(optimizer)",
        ),
        use=INSTALL,
    ),
    Privates(
        "runtime.engine",
        "DeepSpeedEngine",
        (
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


def missing(for_install: bool | None = None) -> list[str]:
    """Names that the installed version of DeepSpeed lacks. Imports DeepSpeed and parses its sources.

    ``for_install``: only those without which ``install()`` fails, or only the others.
    """
    found = (each for each in needed() if for_install in (None, each.use == INSTALL))
    return [f"{name} ({each.use})" for each in found for name in each.missing()]


def refuse_missing(engine: Any, uses: Collection[str]) -> None:
    """Refuse to load into an engine whose own objects lack a name that this needs (:class:`UnsupportedError`)."""
    optimizer, module = engine.optimizer, engine.module
    writer = getattr(engine, "checkpoint_engine", None)
    objects = [engine, optimizer, module, writer, *getattr(optimizer, "__dict__", {}).values()]
    objects += module.modules() if EXPERTS in uses else ()
    live = {kind.__name__: each for each in objects for kind in type(each).__mro__}
    live["Init"] = next(module.parameters(), None)
    lacking: list[str] = []
    for each in needed():
        if each.use in uses and not each.owner:
            lacking += each.missing()
        elif each.use in uses and each.owner in live and (each.owner != "Init" or ZERO3 in uses):
            lacking += each.missing_in(live[each.owner])
    if lacking:
        raise UnsupportedError(
            "this version of DeepSpeed lacks private names that elastic_ckpt needs to load into such an engine",
            expected=", ".join(lacking),
            found=f"DeepSpeed {version('deepspeed')} without them",
            remedy="install a version of DeepSpeed that was tried (elastic-ckpt doctor), or a newer elastic_ckpt",
        )


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

"""The versions that elastic_ckpt was tried on, and the private names of DeepSpeed that it uses.

Nothing here imports torch or DeepSpeed.
"""

from __future__ import annotations

import inspect
import os
import platform
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from operator import attrgetter
from typing import Any, NamedTuple

from packaging.version import Version

from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.errors import UnsupportedError

logger = logger_of(__name__)
#: Brings what engines need; elastic_ckpt itself is on no package index, so that its extras cannot be named.
INSTALL = "pip install torch 'deepspeed>=0.14.5'"


def installed(name: str) -> str | None:
    """The version of Python or of a package, if any, of which vendors' forks have distributions of other names."""
    if name == "Python":
        return platform.python_version()
    with suppress(PackageNotFoundError):
        return version(name)
    forks = packages_distributions().get(name.lower(), ())
    return version(forks[0]) if forks else None


class Requirement(NamedTuple):
    """A range of versions that were tried, of ``name``, as people write it; of ``2.4``, every 2.4.x is in it."""

    name: str
    oldest: str
    newest: str

    @property
    def found(self) -> str | None:
        """The installed version, if any."""
        return installed(self.name)

    def __str__(self) -> str:
        return f"{self.name} {self.oldest} to {self.newest}"

    def compare(self, found: str) -> int:
        """-1 if a version is older than the range, 1 if it is newer, else 0."""
        oldest = Version(self.oldest).release
        newest = Version(self.newest).release
        release = Version(found).release
        return -1 if release[: len(oldest)] < oldest else int(release[: len(newest)] > newest)


#: What ``launch/matrix.sh`` runs with ``--all`` and ``--releases``, and docs/compatibility.md shows.
REQUIREMENTS = (
    Requirement("Python", "3.10", "3.13"),
    Requirement("torch", "2.4", "2.15"),
    Requirement("DeepSpeed", "0.14.5", "0.19.8"),
)
#: What DeepSpeed itself does wrong, for those who save, convert or resume: the first and the last version, and what.
KNOWN_BUGS = (
    ("0.17.6", "0.17.6", "bf16 in ZeRO-0, and in ZeRO-1 with fp32 gradients, saves no states: resume its weights"),
    ("0.17.6", "0.17.6", "bf16 without ZeRO never clears gradients, which add up over steps"),
    ("0.18.9", "0.18.9", "ZeRO-1 and 2 fail in engine.step() on gloo: call it under torch.no_grad()"),
    ("0.14.5", "0.17.6", "ds_to_universal.py fails on ZeRO-3 with several param groups"),
)


def known_bugs(deepspeed: str | None) -> list[str]:
    """Known bugs of a version of DeepSpeed."""
    found = Version(deepspeed or "0").release
    return [text for first, last, text in KNOWN_BUGS if Version(first).release <= found <= Version(last).release]


def refuse_older() -> None:
    """Refuse versions older than the range (:class:`UnsupportedError`), before anything of DeepSpeed is imported."""
    for requirement in REQUIREMENTS:
        name = requirement.name
        found = requirement.found
        if found is None:
            problem = f"{name} is not installed, without which there is no engine to load into"
            raise UnsupportedError(problem, expected=requirement, found=f"no {name}", remedy=INSTALL)
        if requirement.compare(found) < 0:
            problem = f"this version of {name} is too old for elastic_ckpt"
            found = f"{name} {found}"
            remedy = f"install {name} {requirement.oldest} or newer"
            raise UnsupportedError(problem, expected=requirement, found=found, remedy=remedy)


def warn_of_newer() -> None:
    """Warn (on rank 0) of versions that are newer than the range."""
    found = [f"{each.name} {each.found}" for each in REQUIREMENTS if each.found and each.compare(each.found) > 0]
    if found and os.environ.get("RANK", "0") == "0":
        tried = ", ".join(map(str, REQUIREMENTS))
        text = (
            "elastic_ckpt is not tested with %s, only with %s. Loads that need private names which it lacks are refused"
        )
        logger.warning(text, ", ".join(found), tried)


#: What names are needed for: ``install()``, every load into an engine that has their owner, and some loads alone.
LOAD = "loading"
ZERO3 = "ZeRO-3"
NVME = "NVMe offload"
EXPERTS = "mixtures of experts"
#: Below ``deepspeed.``, a module or a class in it; indented, its attributes, and its functions with their first
#: parameters. Before a colon, the first version that has them, and what they are needed for, if not for every load.
_TABLE = """
runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer
    bit16_groups averaged_gradients micro_step_id round_robin_bit16_groups partition_size
    single_partition_of_fp32_groups parallel_partitioned_bit16_groups real_dp_process_group dp_process_group
    _hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state() _restore_from_bit16_weights()
    update_lp_params() cpu_offload loss_scaler overflow
    0.19.7: round_robin_bit16_offsets
    0.17.6: all_grad_tensors
    align_partitions: flatten_dense_tensors_aligned(tensor_list,alignment)
runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3
    0.18.5: _epilogue_ran_this_backward
    fp16_groups fp16_partitioned_groups fp16_partitioned_groups_flat fp32_partitioned_groups_flat
    sub_group_to_group_id parameter_offload refresh_fp32_params() swap_optimizer params_in_nvme_and_cpu
    averaged_gradients micro_step_id unflatten dp_process_group
    0.18.9: use_muon save_muon_momentum_buffer_in_memory
    0.18.9, momenta in memory: muon_momentum_buffer_partitioned_groups_flat
    offload ratio: subgroup_to_device partial_offload
    NVMe offload: _swappable_optimizer_subgroup(sub_group_id) optimizer_swapper fp16_partitioned_groups_flat_numel
    NVMe offload: _optimizer_states_and_gradient_swap_in(sub_group_id,timer_names)
    NVMe offload: _reassign_or_swap_out_partitioned_parameters(sub_group_id)
    align_partitions: __avg_scatter_grads(params_to_reduce) reduce_scatter_coalesced
runtime.zero.parameter_offload:DeepSpeedZeRoOffload
    partition_all_parameters() persistent_parameters
runtime.bf16_optimizer:BF16_Optimizer
    bf16_groups bf16_partitioned_groups fp32_groups_flat_partition fp32_groups_has_gradients real_dp_process_group
    dp_process_group _hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state()
    _restore_from_bit16_weights() update_lp_params()
    align_partitions: _flatten_dense_tensors_aligned(tensor_list,alignment)
runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer
    fp16_groups fp32_groups refresh_fp32_params() overflow
    0.18.6: loss_scale_config
runtime.fp16.fused_optimizer:FP16_Optimizer
    fp16_groups fp32_groups_flat refresh_fp32_params() overflow
    0.18.6: loss_scale_config
runtime.fp16.loss_scaler:LossScaleConfig
    0.18.6: dynamic_loss_scale cur_scale cur_iter last_overflow_iter scale_factor scale_window
runtime.fp16.loss_scaler:DynamicLossScaler
    dynamic cur_scale cur_iter last_overflow_iter cur_hysteresis min_scale
runtime.zero.partition_parameters:Init
    ds_tensor ds_tensor.status ds_tensor.final_location ds_shape ds_numel ds_secondary_tensor ds_process_group
    all_gather(param_list) all_gather_coalesced(params)
    pretrained weights: ds_status partition(param_list) dtype local_device _convert_to_deepspeed_param(param)
    align_partitions: _padding_size(param) _partition_param(param) _aligned_size _dist_allgather_fn
runtime.torch_autocast
    0.17.6, ZeRO-3: has_comm_dtype(param)
runtime.swap_tensor.optimizer_utils:OptimizerSwapper
    NVMe offload: swap_params_info
runtime.swap_tensor.optimizer_utils:OptimizerStateSwapInfo
    NVMe offload: tensors has_state_tensors
runtime.swap_tensor.partitioned_optimizer_swapper:PartitionedOptimizerSwapper
    NVMe offload: swap_out_optimizer_state(parameter,async_swap) swap_in_optimizer_state
runtime.swap_tensor.pipelined_optimizer_swapper:PipelinedOptimizerSwapper
    NVMe offload: swap_out_optimizer_state(parameter,async_swap) swap_in_optimizer_state
runtime.checkpoint_engine.decoupled_checkpoint_engine:DecoupledCheckpointEngine
    0.17.1: is_decoupled() commit_info ckpt_process
runtime.checkpoint_engine.datastates_checkpoint_engine:DataStatesCheckpointEngine
    0.18.1: is_decoupled() commit_info
runtime.engine:DeepSpeedEngine
    0.17.1: _commit_decoupled_checkpoint()
    install(): load_checkpoint(load_dir,tag) save_checkpoint(save_dir,tag,client_state)
    data position: _is_gradient_accumulation_boundary micro_steps global_samples
    0.19.8, data position: _unmanaged_backward_count
    align_partitions: _configure_zero_optimizer(optimizer) _configure_bf16_optimizer(optimizer)
    _get_zero_param_shapes() seq_data_parallel_group num_experts fp16_enabled param_names mp_world_size
    seq_dp_world_size sequence_parallel_size has_moe_layers loaded_checkpoint_dp_world_size
    loaded_checkpoint_mp_world_size random_ltd_enabled curriculum_learning_enabled load_universal_checkpoint
    use_node_local_storage _config checkpoint_engine
runtime.pipe.module:PipelineModule
    weighted pipeline stages: _partition_layers(method) _layer_specs _topo _set_bounds(start,stop) parts
    tied_weight_attrs
    _local_start forward_funcs
runtime.zero.partition_parameters:NoGatherHandle
    align_partitions: param.ds_tensor.data
runtime.zero.partition_parameters:NoGatherCoalescedHandle
    align_partitions: param.ds_tensor.data
runtime.zero.partition_parameters
    align_partitions: _dist_allgather_fn(input_tensor,output_tensor,group)
runtime.comm.coalesced_collectives
    align_partitions: reduce_scatter_coalesced(tensors,group)
moe.layer:MoE
    mixtures of experts: expert_group_name num_local_experts deepspeed_moe enable_expert_tensor_parallelism
moe.experts:Experts
    mixtures of experts: deepspeed_experts
utils.groups
    mixtures of experts: _get_expert_parallel_rank(group_name) _get_expert_parallel_world_size(group_name)
    mixtures of experts: _get_max_expert_size_name()
"""


class Privates(NamedTuple):
    """Names that a class or module of DeepSpeed must define, call or touch: a line of the table.

    Before the version ``since``, :mod:`elastic_ckpt.engines.compat` does without them.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = "0"
    use: str = LOAD


def _has(live: Any, name: str) -> bool:
    plain, _, parameters = name.removesuffix(")").partition("(")
    try:
        found = attrgetter(plain)(live)
    except AttributeError:
        return False
    wanted = [each for each in parameters.split(",") if each]
    takes = list(inspect.signature(found).parameters.values()) if wanted else []
    is_wrapped = any(each.kind == each.VAR_POSITIONAL for each in takes)
    return is_wrapped or [each.name for each in takes][: len(wanted)] == wanted


def _listed() -> Iterator[Privates]:
    module = owner = ""
    for line in _TABLE.strip().splitlines():
        if line.startswith(" "):
            head, _, names = line.strip().rpartition(": ")
            since, use = re.fullmatch(r"([\d.]*)(?:, )?(.*)", head).groups()  # type: ignore[union-attr]
            yield Privates(module, owner, tuple(names.split()), since or "0", use or LOAD)
        else:
            module, _, owner = line.partition(":")


PRIVATES = tuple(_listed())


def needed() -> list[Privates]:
    """Those that the installed version of DeepSpeed must have."""
    found = Version(installed("DeepSpeed") or "0")
    return [each for each in PRIVATES if Version(each.since).release <= found.release]


def refuse_missing(engine: Any, uses: Collection[str]) -> None:
    """Refuse to load into an engine whose own objects lack a name that this needs (:class:`UnsupportedError`)."""
    optimizer = engine.optimizer
    module = engine.module
    writer = getattr(engine, "checkpoint_engine", None)
    objects = [engine, optimizer, module, writer, *getattr(optimizer, "__dict__", {}).values()]
    objects += module.modules() if EXPERTS in uses else ()
    live = {kind.__name__: each for each in objects for kind in type(each).__mro__}
    live["Init"] = next(module.parameters(), None) if ZERO3 in uses else None
    lacking: list[str] = []
    for each in needed():
        owner = live.get(each.owner) if each.owner else sys.modules.get(f"deepspeed.{each.module}")
        if each.use in uses and owner is not None:
            lacking += [f"{each.owner or each.module}.{name}" for name in each.names if not _has(owner, name)]
    if lacking:
        problem = "this version of DeepSpeed lacks private names that elastic_ckpt needs to load into such an engine"
        remedy = "install a version of DeepSpeed that is tested (elastic-ckpt doctor), or a newer elastic_ckpt"
        expected = ", ".join(lacking)
        found = f"DeepSpeed {installed('DeepSpeed')} without them"
        raise UnsupportedError(problem, expected=expected, found=found, remedy=remedy)

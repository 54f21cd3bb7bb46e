"""Adapters by ZeRO stage, whose parameters are whole on every rank in 0 to 2, and which a live engine gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt import distributed
from elastic_ckpt.core.chunks import group_rules, placements
from elastic_ckpt.core.flat_ranges import Placement
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import LoadPlan, Parts
from elastic_ckpt.core.state_kinds import ELEMENTWISE
from elastic_ckpt.distributed import in_buckets
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.adapter import EngineAdapter, partitions_of
from elastic_ckpt.engines.kept_apart import give_momenta, refuse_kept_apart
from elastic_ckpt.engines.optimizers import OptimizerParam, StateSchema, schema_of
from elastic_ckpt.engines.versions import EXPERTS, LOAD, NVME, ZERO3, refuse_missing
from elastic_ckpt.errors import UnsupportedError

#: By optimizer: its fp32 masters, their parameters in flat order, the parameters as it numbers them, and those of ZeRO
#: the low-precision partitions of all ranks. ``BF16_Optimizer`` is ZeRO-1 that accumulates gradients in fp32.
LISTS = {
    BF16_Optimizer: ("fp32_groups_flat_partition", "bf16_groups", "bf16_groups", "bf16_partitioned_groups"),
    DeepSpeedZeroOptimizer: (
        "single_partition_of_fp32_groups",
        "round_robin_bit16_groups",
        "bit16_groups",
        "parallel_partitioned_bit16_groups",
    ),
    FP16_Optimizer: ("fp32_groups_flat", "fp16_groups", "fp16_groups"),
    FP16_UnfusedOptimizer: ("fp32_groups", "fp16_groups", "fp16_groups"),
}
#: Optimizers whose Muon momenta are of whole parameters, all that have elements in the partition, unless offloaded. Any
#: other keeps as many elements as its master has: ``BF16_Optimizer`` exchanges pieces of matrices between ranks.
_KEEPS_TOUCHED = frozenset({DeepSpeedZeroOptimizer})
#: float32, or the result of ``bf16_master_weights_and_grads`` and ``fp16_master_weights_and_grads``.
_MASTER_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Zero012Adapter(EngineAdapter):
    """Adapter of a ZeRO-1/2 optimizer, of one without ZeRO, or of an engine below ZeRO-3 without an optimizer.

    ZeRO-1/2 and ``FP16_Optimizer`` (with FusedAdam, in fp16 and bf16) have one flat master for each param group,
    ``FP16_UnfusedOptimizer`` one for each parameter, and a plain fp32 optimizer updates the parameters themselves.
    In bf16 without an optimizer, DeepSpeed wraps a dummy in a ``BF16_Optimizer``, whose masters are never updated.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        optimizer = engine.optimizer
        trains = compat.has_optimizer(engine)
        lists = [getattr(optimizer, name) for name in LISTS.get(type(optimizer), ()) if trains]
        self._has_masters = bool(lists)
        if not lists:
            every = [group["params"] for group in compat.base_optimizer(engine).param_groups] if trains else []
            own = [[param for param in params if param.requires_grad] for params in every]
            lists = [own, own, every]
        masters, members, numbered, *partitions = lists
        self._partitions = partitions[0] if partitions else ()
        groups: Iterable[int] = range(len(masters))
        if not self._has_masters or isinstance(optimizer, FP16_UnfusedOptimizer):
            groups = [number for number, of_group in enumerate(masters) for _ in of_group]
            masters = [*chain(*masters)]
            members = [[param] for params in members for param in params]
        self._offsets = compat.flat_offsets(optimizer, members)
        # Muon orthogonalizes whole gradients on every rank that has some of their elements; offloaded, it gathers them
        self.keeps_touched = type(optimizer) in _KEEPS_TOUCHED and not optimizer.cpu_offload
        self.replicated = not partitions
        stage = engine.zero_optimization_stage() if partitions else 0
        super().__init__(engine, schema, stage, masters, list(groups), members, numbered, compat.dp_group_of(engine))

    def local_state(self) -> LocalState:
        for flat, master in enumerate(self.masters):
            momentum = self.base.state.get(master, {}).get("momentum_buffer")
            if momentum is not None and self.base.param_groups[self.groups[flat]].get("use_muon"):
                self._check_momentum(flat, momentum)
        return super().local_state()

    def _check_momentum(self, flat: int, momentum: torch.Tensor) -> None:
        """Compare the size of a live Muon momentum with what is known of the class of optimizer."""
        touched = {place.index for place in self.placements(flat)} if self.keeps_touched else ()
        numel = sum(self.members[flat][index].numel() for index in touched)
        numel = numel if self.keeps_touched else self.masters[flat].numel()
        if momentum.numel() != numel:
            problem = f"Muon's momentum in {type(self.optimizer).__name__} is not laid out as in known versions"
            name = self._names_of(self.members[flat])[0]
            found = f"{momentum.numel()} of DeepSpeed {deepspeed.__version__}"
            raise UnsupportedError(problem, None, f"{numel} elements", found, parameter=name)

    def placements(self, flat: int) -> Iterable[Placement]:
        numels = [param.numel() for param in self.members[flat]]
        rank = dist.get_rank(group=self.optimizer.real_dp_process_group[flat]) if self._partitions else 0
        return placements(group_rules(numels, self._offsets[flat], self.masters[flat].numel()), rank)

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        optimizer = self.optimizer
        if self._partitions:
            if all(partitions[0].device.type == "cpu" for partitions in self._partitions):
                # DeepSpeed gathers whole groups at once, for which gloo needs a second low-precision model in memory
                for index, (partitions, master) in enumerate(zip(self._partitions, self.masters, strict=True)):
                    group = optimizer.real_dp_process_group[index]
                    partitions[dist.get_rank(group=group)].data.copy_(master.data)
                    members = dist.get_process_group_ranks(group)
                    pending = [
                        # as bytes: not every backend knows every dtype
                        dist.broadcast(partition.data.view(torch.uint8), src=member, group=group, async_op=True)
                        for partition, member in zip(partitions, members, strict=True)
                    ]
                    for work in pending:
                        distributed.wait(work)
            else:
                optimizer.update_lp_params()
            if not exact_masters:
                optimizer._restore_from_bit16_weights()
            if plan.restores_states:
                # DeepSpeed links each parameter once to its slice of the states that exist then; new ones must be
                # linked again, or its public getters miss them
                optimizer._hp_optimizer_states_linked = False
                if all(self.base.state.get(master) for master in self.masters):
                    optimizer._lazy_init_hp_params_optimizer_state()
        elif self._has_masters:  # as the optimizers' own steps end
            for index, params in enumerate(self.members):
                flat = self.masters[index].data.reshape(-1)
                for placement in self.placements(index):
                    param = params[placement.index]
                    start = placement.flat_offset
                    param.data.copy_(flat[start : start + param.numel()].view(param.shape))
            if not exact_masters:
                optimizer.refresh_fp32_params()


class Zero3Adapter(EngineAdapter):
    """Adapter of a ZeRO-3 engine, with one flat partition per sub-group of its optimizer, if any.

    Where the optimizer swaps states or parameters to NVMe, one sub-group is in memory at a time.

    Raises :class:`UnsupportedError` for a frozen parameter that is quantized, or on NVMe, where DeepSpeed has no way to
    write it back.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        optimizer = engine.optimizer
        trains = compat.has_optimizer(engine)
        self._swaps = trains and compat.swaps_to_nvme(engine)
        self._offload = optimizer.parameter_offload if trains else optimizer
        masters = optimizer.fp32_partitioned_groups_flat if trains else ()
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(masters))]
        members = optimizer.fp16_groups if trains else ()
        numbered: list[list[Any]] = [[] for _ in compat.base_optimizer(engine).param_groups] if trains else []
        for group, params in zip(groups, members, strict=True):
            numbered[group] += params
        super().__init__(engine, schema, 3, masters, groups, members, numbered, compat.partition_group(engine))
        refuse_unwritable(self.frozen, trains)

    def local_state(self) -> LocalState:
        found = super().local_state()
        for state in (state for flat in found.flats for state in flat.states or () if self._swaps):
            if state.dtype != "float32" or state.layout != ELEMENTWISE or state.planes > 1:
                problem = f"state {state.key} of {found.optimizer} is not one fp32 value an element, as NVMe needs it"
                kind = f"{state.dtype}, {state.layout}"
                remedy = '"offload_optimizer": {"device": "cpu"}'
                raise UnsupportedError(problem, found=kind, remedy=remedy)
        return found

    def param(self, flat: int) -> OptimizerParam:
        param = super().param(flat)  # whose master may be swapped out
        if self._swaps:
            param = param._replace(numel=int(self.optimizer.fp16_partitioned_groups_flat_numel[flat]))
        return param

    def placements(self, flat: int) -> Iterable[Placement]:
        return partitions_of(self.members[flat])

    def fill(self, plan: LoadPlan, tensors: dict[int, torch.Tensor]) -> Parts:
        """Partitions all parameters first: a gathered one would otherwise keep its old values.

        On NVMe, reads one sub-group after the other, and derives its weights while it is in memory.
        """
        self._offload.partition_all_parameters()
        if not self._swaps:
            yield from super().fill(plan, tensors)
            return
        parts = plan.reads.by_flat()
        wholes, part = parts.get(-1, ([], None))  # what belongs to no sub-group
        if part is not None:
            memory = self.memory(part)
            tensors.update(zip(wholes, memory, strict=True))
            yield part, memory
        optimizer = self.optimizer
        for index, master in enumerate(self.masters):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped and plan.restores_states and plan.scalars[index] is None:
                # never stepped: DeepSpeed's swapper lists what it has on disk
                info = optimizer.optimizer_swapper.swap_params_info[optimizer.optimizer_swapper.parameter_id(master)]
                info.tensors = info.tensors[:1]
                info.has_state_tensors = False
                self.base.state.pop(master, None)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index, set())
            try:
                _, part = parts[index]
                yield part, self.memory(part)
                if not plan.restores_states:  # as refresh_fp32_params does to masters in memory
                    master.data.copy_(master.data.to(optimizer.dtype))
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            finally:
                if swapped:
                    optimizer.optimizer_swapper.swap_out_optimizer_state(parameter=master, async_swap=False)
                    master.grad = None  # a view of the swap buffer just returned

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        """The low-precision part follows ``_rigid_load_state_dict`` (stage3.py); on NVMe it is done.

        Then hpZ's secondary partitions are dropped, of frozen parameters too, from which the next forward pass would
        gather; and persistent parameters, which it expects whole, are gathered again, many per collective.
        """
        optimizer = self.optimizer
        for index, master in enumerate(() if self._swaps else self.masters):
            low_precision = optimizer.fp16_partitioned_groups_flat[index]
            low_precision.data.copy_(master.data)
            partitions = optimizer.fp16_partitioned_groups[index]
            for partition, values in zip(partitions, optimizer.unflatten(low_precision, partitions), strict=True):
                partition.data = values.data
        if self.masters and not (exact_masters or self._swaps):
            optimizer.refresh_fp32_params()
        if self.masters and plan.restores_states:
            give_momenta(optimizer)
        for param in self.param_names:
            param.ds_secondary_tensor = None  # type: ignore[attr-defined]
        if persistent := self._offload.persistent_parameters:  # in the same order on every rank
            with distributed.agree("gather persistent parameters"):  # in collectives that cannot be polled
                buckets = list(_gathering_buckets(persistent))
            for bucket in buckets:
                bucket[0].all_gather_coalesced(bucket).wait()
            persistent[0].all_gather(persistent)  # what is left


def refuse_unwritable(frozen: Mapping[str, Any], trains: bool) -> None:
    """Refuse frozen parameters whose partitions cannot be written; ``trains``: others have an optimizer."""
    for name, param in frozen.items():
        partition = getattr(param, "ds_tensor", None)
        if hasattr(partition, "ds_quant_scale"):
            problem = "a frozen parameter is quantized, and its scales are not in the checkpoint"
            raise UnsupportedError(problem, parameter=name, found='"zero_quantized_nontrainable_weights": true')
        swapped_out = getattr(partition, "status", None) == PartitionedParamStatus.NOT_AVAILABLE
        if swapped_out if trains else getattr(partition, "final_location", None) == OffloadDeviceEnum.nvme:
            problem = "a frozen parameter, or one of an engine without an optimizer, cannot be written to NVMe"
            remedy = '"offload_param": {"device": "cpu"}'
            raise UnsupportedError(problem, parameter=name, found="a parameter on NVMe", remedy=remedy)


def _gathering_buckets(params: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters that a common collective returns unchanged, by dtype and process group."""
    together: dict[tuple[torch.dtype, int], list[Any]] = {}
    for param in params:
        # torch_autocast's would be rounded to their communication dtype, and empty ones cannot travel together
        if not (hasattr(param.ds_tensor, "ds_quant_scale") or compat.has_comm_dtype(param) or not param.ds_numel):
            together.setdefault((param.ds_tensor.dtype, id(param.ds_process_group)), []).append(param)
    for (dtype, _), same in together.items():
        yield from in_buckets(same, [param.ds_numel * dtype.itemsize for param in same])


def select_adapter(engine: Any, with_states: bool) -> EngineAdapter:
    """The adapter of a live engine; without ``with_states``, any optimizer is accepted.

    Raises :class:`UnsupportedError` naming a feature that cannot be restored, or what DeepSpeed lacks for it.
    """
    optimizer = engine.optimizer
    features = compat.live_features(engine).names
    for present, what in (
        (features, features),
        (isinstance(engine, DeepSpeedHybridEngine), "the hybrid engine"),
    ):
        if present:
            raise UnsupportedError(f"the live engine uses {what}, which is not supported yet")
    refuse_kept_apart(engine)
    kind = type(optimizer)  # exactly: a subclass (MiCS, ZenFlow) lays out or updates its partitions differently
    zero3 = kind in (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeRoOffload)
    plain = engine.zero_optimization_stage() == 0 and isinstance(optimizer, torch.optim.Optimizer)
    if not (zero3 or plain or kind in LISTS) and compat.has_optimizer(engine):
        found = f"{kind.__name__} at ZeRO stage {engine.zero_optimization_stage()}"
        raise UnsupportedError("the live engine's optimizer is not supported", found=found)
    if compat.has_optimizer(engine):  # DeepSpeed sets up nothing else for weights alone
        uses = {LOAD: True, ZERO3: zero3, NVME: zero3 and compat.swaps_to_nvme(engine), EXPERTS: engine.has_moe_layers}
        refuse_missing(engine, [use for use, is_needed in uses.items() if is_needed])
    base = compat.base_optimizer(engine)
    schema = schema_of(base) if with_states else StateSchema(base, known=())
    chosen = Zero3Adapter(engine, schema) if zero3 else Zero012Adapter(engine, schema)
    masters = {master.dtype for master in chosen.masters}
    if masters - _MASTER_DTYPES:
        expected, found = (", ".join(sorted(map(str, dtypes))) for dtypes in (_MASTER_DTYPES, masters))
        raise UnsupportedError("master weights of this dtype are not supported", expected=expected, found=found)
    return chosen

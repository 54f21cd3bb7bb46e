"""Live ZeRO-3 engines: ``DeepSpeedZeroOptimizer_Stage3``, and ``DeepSpeedZeRoOffload``, which has no optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

from elastic_ckpt import distributed
from elastic_ckpt.core.chunks import parameter_rules, placements
from elastic_ckpt.core.flat_ranges import FlatRange, Placement
from elastic_ckpt.core.local_state import LocalState, WholeTensor
from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.core.read_plan import LoadPlan, Slot
from elastic_ckpt.core.state_kinds import ELEMENTWISE
from elastic_ckpt.distributed import in_buckets
from elastic_ckpt.engines.adapter import EngineAdapter, ReadPart
from elastic_ckpt.engines.compat import has_comm_dtype, has_optimizer, partition_group, swaps_to_nvme
from elastic_ckpt.engines.optimizers import StateSchema, dtype_name
from elastic_ckpt.errors import UnsupportedError

#: The part of a plan that belongs to no sub-group.
_WHOLES = -1


class Zero3Adapter(EngineAdapter):
    """Adapter of a ZeRO-3 engine, with one flat partition per sub-group of its optimizer, if any.

    Where the optimizer swaps states or parameters to NVMe, one sub-group is in memory at a time.

    Raises :class:`UnsupportedError` for a frozen parameter on NVMe, which DeepSpeed has no way to write back.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        optimizer, trains = engine.optimizer, has_optimizer(engine)
        self._swaps = trains and swaps_to_nvme(engine)
        self._offload = optimizer.parameter_offload if trains else optimizer
        masters = optimizer.fp32_partitioned_groups_flat if trains else ()
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(masters))]
        members = optimizer.fp16_groups if trains else ()
        super().__init__(engine, schema, 3, masters, groups, members, partition_group(engine))
        for name, param in self.frozen.items():
            swapped_out = param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
            if swapped_out if trains else param.ds_tensor.final_location == OffloadDeviceEnum.nvme:
                problem = "a frozen parameter, or one of an engine without an optimizer, cannot be written to NVMe"
                remedy = '"offload_param": {"device": "cpu"}'
                raise UnsupportedError(problem, parameter=name, found="a parameter on NVMe", remedy=remedy)

    def local_state(self) -> LocalState:
        found = super().local_state()
        for state in (state for flat in found.flats for state in flat.states or () if self._swaps):
            if state.dtype != "float32" or state.layout != ELEMENTWISE or state.rows > 1:
                problem = f"state {state.key} of {found.optimizer} is not one fp32 value an element, as NVMe needs it"
                kind, remedy = f"{state.dtype}, {state.layout}", '"offload_optimizer": {"device": "cpu"}'
                raise UnsupportedError(problem, found=kind, remedy=remedy)
        return found

    def numel(self, flat: int) -> int:
        return int(self.optimizer.fp16_partitioned_groups_flat_numel[flat]) if self._swaps else super().numel(flat)

    def placements(self, flat: int) -> Iterable[Placement]:
        return self._placements(self.members[flat])

    def _placements(self, params: Sequence[Any]) -> Iterable[Placement]:
        """In consecutive parameters, whose partitions include padding."""
        numels = [math.prod(param.ds_shape) for param in params]
        steps = [int(param.ds_tensor.ds_numel) for param in params]
        return placements(parameter_rules(numels, steps), dist.get_rank(group=params[0].ds_process_group))

    def whole(self, name: str, key: str, tensor: Any) -> WholeTensor:
        if key != FROZEN:
            return super().whole(name, key, tensor)
        if hasattr(tensor.ds_tensor, "ds_quant_scale"):
            problem = "a frozen parameter is quantized, and its scales are not in the checkpoint"
            raise UnsupportedError(problem, parameter=name, found='"zero_quantized_nontrainable_weights": true')
        mine = next((placement.range for placement in self._placements([tensor])), FlatRange(0, 0))
        trains, dtype = not self.has_optimizer and tensor.requires_grad, dtype_name(tensor.ds_tensor)
        return WholeTensor(name, FROZEN, tuple(tensor.ds_shape), mine, dtype, trains=trains)

    def fill(self, plan: LoadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """Partitions all parameters first: a gathered one would otherwise keep its old values.

        On NVMe, reads one sub-group after the other, and derives its weights while it is in memory.
        """
        self._offload.partition_all_parameters()
        if not self._swaps:
            return super().fill(plan, read)
        parts = plan.reads.by_flat()
        wholes, part = parts.get(_WHOLES, ([], None))
        tensors = [] if part is None else self.memory(part)
        if part is not None:
            read(part, tensors)
        for index, master in enumerate(self.masters):
            with self._in_memory(index, clears_states=plan.restores_states and plan.scalars[index] is None):
                _, part = parts[index]
                read(part, self.memory(part))
                if not plan.restores_states:  # as refresh_fp32_params does to masters in memory
                    master.data.copy_(master.data.to(self.optimizer.dtype))
                self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        return dict(zip(wholes, tensors, strict=True))

    @contextmanager
    def _in_memory(self, index: int, clears_states: bool) -> Iterator[None]:
        """Swap one sub-group in, and out again with all its states."""
        optimizer, master = self.optimizer, self.masters[index]
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            if clears_states:
                # never stepped: DeepSpeed's swapper lists what it has on disk
                swapper = optimizer.optimizer_swapper
                info = swapper.swap_params_info[swapper.parameter_id(master)]
                info.tensors, info.has_state_tensors = info.tensors[:1], False
                self.base.state.pop(master, None)
            optimizer._optimizer_states_and_gradient_swap_in(index, set())
        try:
            yield
        finally:
            if swapped:
                optimizer.optimizer_swapper.swap_out_optimizer_state(parameter=master, async_swap=False)
                master.grad = None  # a view of the swap buffer just returned

    def whole_data(self, slot: Slot) -> torch.Tensor:
        if slot.key != FROZEN:
            return super().whole_data(slot)
        return self.frozen[slot.name].ds_tensor.data.view(-1)[: slot.numel]

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        """The low-precision part follows ``_rigid_load_state_dict`` (stage3.py); on NVMe it is done.

        Then drop everything that was gathered, or kept for gathering, before the load: hpZ's secondary partitions,
        from which the next forward pass would gather, of frozen parameters too, which DeepSpeed keeps; and persistent
        parameters, which a forward pass expects whole, are gathered again: many per collective, where DeepSpeed takes
        one for each. It still gathers what cannot travel together.
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
        for param in self.param_names:
            if param.ds_secondary_tensor is not None:  # type: ignore[attr-defined]
                param.ds_secondary_tensor = None  # type: ignore[attr-defined]
        persistent = self._offload.persistent_parameters  # in the same order on every rank
        if persistent:
            distributed.meet()
        for bucket in _gathering_buckets(persistent):
            bucket[0].all_gather_coalesced(bucket).wait()
        if persistent:
            persistent[0].all_gather(persistent)  # what is left


def _gathering_buckets(params: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters that a common collective returns unchanged, by dtype and process group."""
    together: dict[tuple[torch.dtype, int], list[Any]] = {}
    for param in params:
        # torch_autocast's would be rounded to their communication dtype, and empty ones cannot travel together
        if not (hasattr(param.ds_tensor, "ds_quant_scale") or has_comm_dtype(param) or not param.ds_numel):
            together.setdefault((param.ds_tensor.dtype, id(param.ds_process_group)), []).append(param)
    for (dtype, _), same in together.items():
        yield from in_buckets(same, [param.ds_numel * dtype.itemsize for param in same])

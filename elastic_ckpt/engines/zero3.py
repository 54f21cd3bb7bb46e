"""Live ZeRO-3 engines (``DeepSpeedZeroOptimizer_Stage3``).

Private attributes used, all of DeepSpeed 0.19: ``fp16_groups``, ``fp16_partitioned_groups``,
``fp16_partitioned_groups_flat``, ``fp32_partitioned_groups_flat``, ``sub_group_to_group_id``,
``persistent_parameters``, ``checkpoint_event_prologue`` / ``_epilogue``, and of parameters ``ds_shape``, ``ds_numel``,
``ds_tensor``, ``ds_secondary_tensor``, ``ds_process_group``, ``all_gather_coalesced``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import has_comm_dtype

from elastic_ckpt.core.flat_ranges import FlatRange, per_parameter_partition
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LocalState, WholeTensor
from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.distributed import in_buckets
from elastic_ckpt.engines.base import FlatOptimizer, ReadPart
from elastic_ckpt.engines.state_schema import StateSchema
from elastic_ckpt.errors import UnsupportedError


class Zero3Adapter(FlatOptimizer):
    """Adapter of a ZeRO-3 optimizer: one flat partition for each sub-group."""

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        self._optimizer = engine.optimizer
        masters = engine.optimizer.fp32_partitioned_groups_flat
        super().__init__(
            module=engine.module,
            param_names=engine.param_names,
            base=engine.optimizer.optimizer,
            schema=schema,
            masters=masters,
            groups=[engine.optimizer.sub_group_to_group_id[index] for index in range(len(masters))],
            dp_group=partition_group(engine),
        )

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        rank = dist.get_rank(group=self.dp_group)
        flats, fragments = [], []
        group_names: list[list[str]] = [[] for _ in self.base.param_groups]
        for index, params in enumerate(self._optimizer.fp16_groups):
            names = self.names_of(params)
            shapes = [tuple(param.ds_shape) for param in params]
            dtype = self.dtype_of(self.masters[index])
            flats.append(FlatPartition(index, self.groups[index], self._partition_numel(index), dtype, names))
            fragments += [
                Fragment(names[p.index], shapes[p.index], p.range, index, p.flat_offset)
                for p in per_parameter_partition(list(map(math.prod, shapes)), _steps(params), rank)
            ]
            group_names[self.groups[index]] += names
        return self.describe(3, flats, fragments, self._whole_frozen(rank), group_names)

    def _partition_numel(self, index: int) -> int:
        return self.masters[index].numel()

    def _frozen_params(self) -> Mapping[str, Any]:
        owned = {id(param) for params in self._optimizer.fp16_groups for param in params}
        return {name: param for param, name in self.param_names.items() if id(param) not in owned}

    def _whole_frozen(self, rank: int) -> list[WholeTensor]:
        wholes = []
        for name, param in self._frozen_params().items():
            if hasattr(param.ds_tensor, "ds_quant_scale"):
                raise UnsupportedError(
                    "a frozen parameter is quantized, and its scales are not in the checkpoint",
                    parameter=name,
                    expected="frozen weights as the model has them",
                    found='"zero_quantized_nontrainable_weights": true',
                    remedy="leave that option out, or load at the topology it was saved with",
                )
            shape = tuple(param.ds_shape)
            held = [p.range for p in per_parameter_partition([math.prod(shape)], _steps([param]), rank)]
            part = held[0] if held else FlatRange(0, 0)
            wholes.append(WholeTensor(name, FROZEN, shape, part, self.dtype_of(param.ds_tensor)))
        return wholes

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`.

        Partitions all parameters first: a gathered one would otherwise keep its old values.
        """
        self._optimizer.checkpoint_event_prologue()
        return self.fill_at_once(plan, read, self._frozen_memory(plan))

    def _frozen_memory(self, plan: ReadPlan) -> dict[str, torch.Tensor]:
        numels = {slot.name: slot.numel for slot in plan.slots}
        return {
            name: param.ds_tensor.data.view(-1)[: numels.get(name, 0)] for name, param in self._frozen_params().items()
        }

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`.

        The low-precision part follows ``_rigid_load_state_dict`` (stage3.py).
        """
        optimizer = self._optimizer
        for index, master in enumerate(self.masters):
            low_precision = optimizer.fp16_partitioned_groups_flat[index]
            low_precision.data.copy_(master.data)
            partitions = optimizer.fp16_partitioned_groups[index]
            for partition, values in zip(partitions, optimizer.unflatten(low_precision, partitions), strict=True):
                partition.data = values.data
        if not exact_masters:
            optimizer.refresh_fp32_params()
        self._finish_weights()

    def _finish_weights(self) -> None:
        gather_anew(self.param_names, self._optimizer.persistent_parameters)
        # gathers what is left
        self._optimizer.checkpoint_event_epilogue()


def partition_group(engine: Any) -> Any:
    """The process group over which ZeRO-3 partitions the parameters of an engine.

    With a device mesh for sequence parallelism it is all ranks, and ``optimizer.dp_process_group`` is not.
    """
    groups = [param.ds_process_group for param in engine.param_names]
    return groups[0] if groups else engine.seq_data_parallel_group


def gather_anew(params: Iterable[Any], persistent: Sequence[Any]) -> None:
    """Nothing that was gathered, or kept for gathering, outlives a load. Collective.

    Persistent parameters are whole on every rank: they are gathered anew, many in one collective, where DeepSpeed takes
    one for each; what does not travel together (quantized parameters, empty ones, those of torch_autocast) is left to
    it. hpZ's second partitions, from which the next forward pass would gather, hold old values; DeepSpeed drops those
    of parameters that an optimizer owns, and a frozen one would keep its own for good.

    Args:
        params: all parameters of a ZeRO-3 engine; each is partitioned, or DeepSpeed raises an error.
        persistent: those of them that a forward pass finds whole, in the same order on every rank.
    """
    for param in params:
        if param.ds_secondary_tensor is not None:
            param.ds_secondary_tensor = None
    for bucket in _gathering_buckets(persistent):
        bucket[0].all_gather_coalesced(bucket).wait()


def _gathering_buckets(params: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters that come back from a common collective as they lie; each dtype by itself."""
    kinds: dict[torch.dtype, list[Any]] = {}
    for param in params:
        # torch_autocast's would come back rounded to the dtype they travel in, and empty ones cannot travel together
        if not (hasattr(param.ds_tensor, "ds_quant_scale") or has_comm_dtype(param) or not param.ds_numel):
            kinds.setdefault(param.ds_tensor.dtype, []).append(param)
    for dtype, alike in kinds.items():
        yield from in_buckets(alike, [param.ds_numel * dtype.itemsize for param in alike])


def _steps(params: Sequence[Any]) -> list[int]:
    """Elements of each parameter's partition, padding included."""
    return [int(param.ds_tensor.ds_numel) for param in params]

"""Live ZeRO-3 engines that swap to NVMe: one sub-group at a time is in memory.

Private attributes used beside those of :mod:`elastic_ckpt.engines.zero3`, all of DeepSpeed 0.19:
``_swappable_optimizer_subgroup``, ``_optimizer_states_and_gradient_swap_in``,
``_reassign_or_swap_out_partitioned_parameters``, ``fp16_partitioned_groups_flat_numel``, ``optimizer_swapper``
(``swap_out_optimizer_state``, ``swap_params_info``) and ``ds_tensor.status`` of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.core.state_kinds import ELEMENTWISE
from elastic_ckpt.engines.base import ReadPart
from elastic_ckpt.engines.state_schema import StateSchema
from elastic_ckpt.engines.zero3 import Zero3Adapter
from elastic_ckpt.errors import UnsupportedError

#: The part of a plan that belongs to no sub-group.
_WHOLES = -1


class Zero3NvmeAdapter(Zero3Adapter):
    """Adapter of a ZeRO-3 optimizer that swaps optimizer states, parameters or both.

    Raises:
        UnsupportedError: a frozen parameter is swapped out: DeepSpeed has no way to write it back.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        super().__init__(engine, schema)
        for name, param in self._frozen_params().items():
            if param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE:
                raise UnsupportedError(
                    "a frozen parameter is swapped out to NVMe, and cannot be written there",
                    parameter=name,
                    expected="frozen parameters in memory",
                    found='"offload_param": {"device": "nvme"}',
                    remedy='"offload_param": {"device": "cpu"}',
                )

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        found = super().local_state()
        for flat in found.flats:
            for state in flat.states or ():
                if state.dtype != "float32" or state.layout != ELEMENTWISE or state.rows > 1:
                    raise UnsupportedError(
                        f"state {state.key} of {found.optimizer} cannot be swapped to NVMe and back here",
                        expected="states of one fp32 value an element",
                        found=f"{state.dtype}, {state.layout}, {state.rows} rows",
                        remedy='"offload_optimizer": {"device": "cpu"}',
                    )
        return found

    def _partition_numel(self, index: int) -> int:
        return int(self._optimizer.fp16_partitioned_groups_flat_numel[index])

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        self._optimizer.checkpoint_event_prologue()
        parts = plan.by_flat()
        wholes, part = parts.get(_WHOLES, ([], replace(plan, slots=(), copies=())))
        tensors = self.memory(part, self._frozen_memory(part))
        read(part, tensors)
        for index in range(len(self.masters)):
            with self._in_memory(index, clears_states=plan.restores_states and plan.scalars[index] is None):
                _, part = parts[index]
                read(part, self.memory(part, {}))
                if not plan.restores_states:
                    self._round_master(index)
                self._optimizer._reassign_or_swap_out_partitioned_parameters(index)
        return dict(zip(wholes, tensors, strict=True))

    @contextmanager
    def _in_memory(self, index: int, clears_states: bool) -> Iterator[None]:
        """Swap one sub-group in, and out again with all its states."""
        optimizer, master = self._optimizer, self.masters[index]
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            if clears_states:
                self._forget_states(master)
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            if swapped:
                optimizer.optimizer_swapper.swap_out_optimizer_state(parameter=master, async_swap=False)
                master.grad = None  # a view of the swap buffer just given back

    def _forget_states(self, master: Any) -> None:
        """As if the sub-group had never been stepped: DeepSpeed's swapper keeps a list of what it has on disk."""
        info = self._optimizer.optimizer_swapper.swap_params_info[master.ds_id]
        info.tensors = info.tensors[:1]
        info.has_state_tensors = False
        self.base.state.pop(master, None)

    def _round_master(self, index: int) -> None:
        """What ``refresh_fp32_params`` does to masters in memory."""
        master = self.masters[index]
        master.data.copy_(master.data.to(self._optimizer.dtype))

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """Weights were derived while each sub-group was in memory. Collective."""
        self._finish_weights()
